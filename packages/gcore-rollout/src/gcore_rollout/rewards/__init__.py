"""How completions are scored."""

from gcore_rollout.rewards.math_verify import MathVerifyReward
from gcore_rollout.rewards.python_file import load_reward
from gcore_rollout.rewards.reasoning_gym import ReasoningGymReward, import_reasoning_gym
from gcore_rollout.rewards.reward import RewardFunction, score

__all__ = ["MathVerifyReward", "ReasoningGymReward", "RewardFunction", "import_reasoning_gym", "load_reward", "score"]
