"""How completions are scored."""

from gcore_rollout.rewards.code import CodeReward, last_code_block
from gcore_rollout.rewards.composite import CompositeReward
from gcore_rollout.rewards.failures import Failure, FailureLog
from gcore_rollout.rewards.http import HTTPReward
from gcore_rollout.rewards.judge import JudgeReward, JudgeStats, Reduce, ScorePattern, Verdict
from gcore_rollout.rewards.judge_model import JudgeModel, QuestionTemplate
from gcore_rollout.rewards.math_verify import MathVerifyReward
from gcore_rollout.rewards.metrics import part_means, reward_metrics
from gcore_rollout.rewards.pairwise import PairwiseJudge, Winner, WinnerPattern
from gcore_rollout.rewards.python_file import load_function, load_reward
from gcore_rollout.rewards.reasoning_gym import ReasoningGymReward, import_reasoning_gym
from gcore_rollout.rewards.retry import RetryPolicy
from gcore_rollout.rewards.reward import (
    GroupRewardFunction,
    RewardFunction,
    Scored,
    evaluate,
    evaluate_group,
    score,
)
from gcore_rollout.rewards.runner import (
    Failed,
    GroupRewardRunner,
    OnError,
    RewardRunner,
    RewardRunnerConfig,
    RewardStats,
)
from gcore_rollout.rewards.threaded import ThreadedReward

__all__ = [
    "CodeReward",
    "CompositeReward",
    "Failed",
    "Failure",
    "FailureLog",
    "GroupRewardFunction",
    "GroupRewardRunner",
    "HTTPReward",
    "JudgeModel",
    "JudgeReward",
    "JudgeStats",
    "MathVerifyReward",
    "OnError",
    "PairwiseJudge",
    "QuestionTemplate",
    "ReasoningGymReward",
    "Reduce",
    "RetryPolicy",
    "RewardFunction",
    "RewardRunner",
    "RewardRunnerConfig",
    "RewardStats",
    "ScorePattern",
    "Scored",
    "ThreadedReward",
    "Verdict",
    "Winner",
    "WinnerPattern",
    "evaluate",
    "evaluate_group",
    "import_reasoning_gym",
    "last_code_block",
    "load_function",
    "load_reward",
    "part_means",
    "reward_metrics",
    "score",
]
