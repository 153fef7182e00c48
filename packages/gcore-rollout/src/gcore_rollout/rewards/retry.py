"""Trying again what may pass, a bounded number of times."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gcore_rollout.errors import RewardConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, and after how long."""

    max_retries: int = 2
    """Attempts after the first."""
    backoff_s: float = 0.5
    """Seconds before the first retry. It doubles with each, and is shortened by up to half at random, so that calls
    which failed together do not come back together."""
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("max_retries", self.max_retries), ("backoff_s", self.backoff_s)):
            if not value >= 0:
                raise RewardConfigError(f"{name} is {value}; expected 0 or more")
        if not self.max_backoff_s >= self.backoff_s:
            raise RewardConfigError(
                f"max_backoff_s is {self.max_backoff_s}; expected at least backoff_s={self.backoff_s}"
            )

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        may_pass: Callable[[Exception], bool],
        on_retry: Callable[[], None] | None = None,
    ) -> T:
        """What ``attempt`` returns, or the error that it raised at last.

        Args:
            may_pass: whether an error is worth another attempt.
            on_retry: called before each attempt after the first.
        """
        for retry in range(self.max_retries):
            try:
                return await attempt()
            except Exception as error:
                if not may_pass(error):
                    raise
            wait_s = min(self.max_backoff_s, self.backoff_s * 2**retry)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            if on_retry is not None:
                on_retry()
        return await attempt()
