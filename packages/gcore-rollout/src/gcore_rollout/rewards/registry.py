"""The registry of rewards that settings name, besides ``PATH.py:function``."""

from collections.abc import Callable

from gcore_rollout.python_file import load_reward
from gcore_rollout.rewards.reward import RewardFunction


def _math_verify() -> RewardFunction:
    from gcore_rollout.rewards.kinds.math_verify import MathVerifyReward

    return MathVerifyReward()


def _code() -> RewardFunction:
    from gcore_rollout.rewards.kinds.code import CodeReward
    from gcore_rollout.sandbox.sandbox import Sandbox

    return CodeReward(Sandbox())


_REWARDS: dict[str, Callable[[], RewardFunction]] = {"math-verify": _math_verify, "code": _code}


def register_reward(name: str, make: Callable[[], RewardFunction]) -> None:
    """Add a reward, for settings to name.

    Raises:
        ValueError: the name is taken.
    """
    if name in _REWARDS:
        raise ValueError(f"name is {name!r}; expected one that is not registered yet: {', '.join(_REWARDS)} are")
    _REWARDS[name] = make


def reward_names() -> list[str]:
    """Return the names of the registered rewards."""
    return list(_REWARDS)


def build_reward(spec: str) -> RewardFunction:
    """Make the registered reward of this name, or import the function that ``PATH.py:function`` names.

    Raises:
        RewardError: it does not load.
    """
    return _REWARDS[spec]() if spec in _REWARDS else load_reward(spec)
