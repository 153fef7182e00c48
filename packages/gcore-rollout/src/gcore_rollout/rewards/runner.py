"""The service that scores completions: many at one time, each within a time limit, and no failure lost."""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

from gcore_rollout.errors import NoScoreError, RewardConfigError, RewardError, RewardExitError
from gcore_rollout.rewards.failures import FailureLog
from gcore_rollout.rewards.retry import RetryPolicy
from gcore_rollout.rewards.reward import (
    GroupRewardFunction,
    RewardFunction,
    Scored,
    evaluate,
    evaluate_group,
    name_of,
)
from gcore_rollout.rewards.threads import ThreadedReward
from gcore_rollout.rewards.user_code import blocking_limit, call

OnError = Literal["raise", "drop"]
"""A reward that failed at last ends the run, or gives `Failed`."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """No score: the group that the completion belongs to is to be dropped."""

    error: RewardError
    """With the reward's name, the prompt and the completion."""


@dataclass(frozen=True, kw_only=True)
class RewardStats:
    """Counters since the runner was made."""

    num_scored: int
    num_failed: int
    """Calls that ended in an error after their retries; `NoScoreError` is not one."""
    num_no_score: int
    """Calls to which the reward had no score to give."""
    num_retries: int
    num_timeouts: int
    """Attempts that were given up after ``timeout_s``."""
    num_running: int
    num_waiting: int
    busy_s: float
    """Seconds of all attempts added up."""


@dataclass(frozen=True, kw_only=True)
class RewardRunnerConfig:
    """How a runner goes about its calls."""

    max_concurrency: int = 64
    """Most calls at one time; the others wait, and their time does not run yet."""
    timeout_s: float = 60.0
    """Of each attempt."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """For time-outs and broken connections (`TimeoutError`, `ConnectionError`); nothing else is tried again."""
    on_error: OnError = "raise"
    sync_in_threads: bool = True
    """Run a synchronous reward in as many threads as there may be calls (see `ThreadedReward`), not on the loop."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise RewardConfigError(f"max_concurrency is {self.max_concurrency}; expected at least 1")
        if not self.timeout_s > 0:
            raise RewardConfigError(f"timeout_s is {self.timeout_s}; expected more than 0")
        if self.on_error not in get_args(OnError):
            raise RewardConfigError(f"on_error is {self.on_error!r}; expected one of {', '.join(get_args(OnError))}")


class _Runner(Generic[T]):
    """The part that does not depend on what is scored: one completion, or a group.

    Attributes:
        failures: Counts calls, and those that ended in an error after their retries.
    """

    def __init__(self, config: RewardRunnerConfig | None) -> None:
        self.failures = FailureLog()
        self._config = config or RewardRunnerConfig()
        self._places = asyncio.Semaphore(self._config.max_concurrency)
        self._num_scored = self._num_failed = self._num_no_score = self._num_retries = self._num_timeouts = 0
        self._num_running = self._num_waiting = 0
        self._busy_s = 0.0

    def stats(self) -> RewardStats:
        return RewardStats(
            num_scored=self._num_scored,
            num_failed=self._num_failed,
            num_no_score=self._num_no_score,
            num_retries=self._num_retries,
            num_timeouts=self._num_timeouts,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            busy_s=self._busy_s,
        )

    async def _run(self, call: Callable[[], Awaitable[T]]) -> T | Failed:
        try:
            result = await self._config.retry.run(
                lambda: self._attempt(call), may_pass=_may_pass, on_retry=self._count_retry
            )
        except NoScoreError as error:
            self._num_no_score += 1
            self.failures.succeeded()
            return Failed(error=error)
        except RewardError as error:
            self._num_failed += 1
            self.failures.failed(error)
            if self._config.on_error == "raise" or isinstance(error, RewardExitError):
                raise
            return Failed(error=error)
        self._num_scored += 1
        self.failures.succeeded()
        return result

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        began = time.monotonic()
        self._num_running += 1
        try:
            return await call()
        finally:
            self._num_running -= 1
            self._busy_s += time.monotonic() - began
            self._places.release()

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        timeout = asyncio.timeout(self._config.timeout_s)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            self._num_timeouts += 1
            raise TimeoutError(f"no answer within timeout_s={self._config.timeout_s}") from None

    def _count_retry(self) -> None:
        self._num_retries += 1


class RewardRunner(_Runner[Scored]):
    """Scores completions one by one, as many at one time as it may."""

    def __init__(self, reward: RewardFunction, config: RewardRunnerConfig | None = None) -> None:
        super().__init__(config)
        self._threads: ThreadedReward | None = None
        self.__name__ = name_of(reward)
        if self._config.sync_in_threads and not _is_async(reward):
            reward = self._threads = ThreadedReward(reward, max_workers=self._config.max_concurrency)
        self._reward = reward

    async def score(self, *, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored | Failed:
        """Score one completion.

        Returns:
            `Failed` if the reward raised `NoScoreError`, or if it failed and ``on_error`` is "drop".

        Raises:
            RewardError: the reward failed, after its retries, and ``on_error`` is "raise".
            RewardExitError: the reward tried to end the process.
        """
        return await self._run(lambda: evaluate(self._limited, prompt=prompt, completion=completion, row=row))

    async def try_on(self, *, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored | Failed:
        """Score one completion before a run starts, with ``timeout_s`` for a synchronous reward, too.

        Raises:
            RewardError: see `score`.
            RewardExitError: the reward blocked the process for longer than ``timeout_s``, or tried to end it.
        """
        try:
            with blocking_limit(self._config.timeout_s):
                return await self.score(prompt=prompt, completion=completion, row=row)
        finally:
            # What the trial found is no failure of the run, which may have another log file.
            self.failures = FailureLog()

    def close(self) -> None:
        """Let the threads of a synchronous reward end. Idempotent."""
        if self._threads is not None:
            self._threads.close()

    @property
    def _limited(self) -> RewardFunction:
        async def limited(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
            value = call(self._reward, prompt, completion, row)
            return await self._in_time(value) if inspect.isawaitable(value) else value

        limited.__name__ = self.__name__
        return limited


class GroupRewardRunner(_Runner[list[Scored]]):
    """Scores groups of completions, such as with `PairwiseJudge`; a group is one call."""

    def __init__(self, reward: GroupRewardFunction, config: RewardRunnerConfig | None = None) -> None:
        super().__init__(config)
        self.__name__ = name_of(reward)
        self._reward = reward

    async def score(self, *, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[Scored] | Failed:
        """One `Scored` for each completion, in their order; otherwise as `RewardRunner.score`."""
        return await self._run(lambda: evaluate_group(self._limited, prompt=prompt, completions=completions, row=row))

    @property
    def _limited(self) -> GroupRewardFunction:
        async def limited(prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> Sequence[Scored]:
            return await self._in_time(self._reward(prompt, completions, row))

        limited.__name__ = self.__name__
        return limited


def _is_async(reward: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def _may_pass(error: BaseException | None) -> bool:
    """Whether a time-out or a broken connection is at the bottom of it."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        error = error.__cause__
    return False


def part_means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """``reward/PART/mean`` of every part, over the completions that have it."""
    values: dict[str, list[float]] = {}
    for one in parts:
        for name, part in one.items():
            values.setdefault(name, []).append(part)
    return {f"reward/{name}/mean": math.fsum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def reward_metrics(outcomes: Iterable[Scored | Failed]) -> dict[str, float]:
    """Means over completions: ``reward/mean``, those of `part_means`, and ``reward/failed_fraction``.

    Without outcomes the result is empty.
    """
    everything = list(outcomes)
    scored = [outcome for outcome in everything if isinstance(outcome, Scored)]
    if not everything:
        return {}
    mean = {"reward/mean": math.fsum(one.score for one in scored) / len(scored)} if scored else {}
    failed = {"reward/failed_fraction": (len(everything) - len(scored)) / len(everything)}
    return mean | part_means(one.parts for one in scored) | failed
