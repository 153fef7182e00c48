"""A synchronous reward off the event loop."""

import inspect
from collections.abc import Mapping
from typing import Any

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.rewards.daemon_threads import DaemonThreads
from gcore_rollout.rewards.reward import RewardFunction, Scored, name_of
from gcore_rollout.rewards.user_code import call


class ThreadedReward:
    """Runs a reward in threads of its own, so that generation goes on while it computes.

    No thread can be stopped: a call that was given up holds its thread until it returns, and one that never returns
    holds it until the process ends. What can hang belongs in a sandbox or behind HTTP.

    Args:
        reward: synchronous, and safe to be called by several threads.
        max_workers: threads.
    """

    def __init__(self, reward: RewardFunction, *, max_workers: int = 8) -> None:
        if max_workers < 1:
            raise RewardConfigError(f"max_workers is {max_workers}: at least 1 is needed")
        self._reward = reward
        self.__name__ = name_of(reward)
        self._threads = DaemonThreads(max_workers, name=f"reward-{self.__name__}")

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        value = await self._threads.run(call, self._reward, prompt, completion, row)
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Let the threads end when they are done. Idempotent."""
        self._threads.close()
