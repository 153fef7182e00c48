"""Concurrent scoring of completions, with time limits, bounded retries, threads, and counts of failures."""

import asyncio
import contextvars
import inspect
import math
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

from gcore_rollout.errors import NoScoreError, RewardConfigError, RewardError, RewardExitError
from gcore_rollout.rewards.reward import (
    FailureLog,
    GroupRewardFunction,
    RewardFunction,
    Scored,
    blocking_limit,
    call,
    evaluate,
    evaluate_group,
    is_async,
    name_of,
)

OnError = Literal["raise", "drop"]
"""A reward that fails after its retries raises, or gives `Failed`."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The number of retries and the time between them."""

    max_retries: int = 2
    """Attempts after the first."""
    backoff_s: float = 0.5
    """Seconds before the first retry. It doubles with each, and is shortened by up to half at random, so that calls
    which failed together do not come back together."""
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_retries", "backoff_s"):
            if not getattr(self, name) >= 0:
                raise RewardConfigError(f"{name} is {getattr(self, name)}; expected 0 or more")
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
        """Return the result of ``attempt``, or raise its last error; ``may_pass``: it is worth another attempt."""
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


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A completion without a score: its group must be dropped."""

    error: RewardError
    """The error, with the reward's name, the prompt and the completion."""


@dataclass(kw_only=True)
class RewardStats:
    """Counters since the runner was made."""

    num_scored: int = 0
    num_failed: int = 0
    """Calls that ended in an error after their retries; `NoScoreError` is not one."""
    num_no_score: int = 0
    """Calls to which the reward had no score to give."""
    num_retries: int = 0
    num_timeouts: int = 0
    """Attempts that were given up after ``timeout_s``."""
    num_running: int = 0
    num_waiting: int = 0
    busy_s: float = 0.0
    """Total seconds of all attempts."""


@dataclass(frozen=True, kw_only=True)
class RewardRunnerConfig:
    """Settings of a runner."""

    max_concurrency: int = 64
    """Largest number of concurrent calls; the others wait, and their time does not run yet."""
    timeout_s: float = 60.0
    """Time limit of each attempt."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Retries after time-outs and broken connections (`TimeoutError`, `ConnectionError`); nothing else is tried
    again."""
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
    """The base of runners, of single completions or of groups.

    Attributes:
        failures: Counts calls, and those that ended in an error after their retries.
    """

    def __init__(self, config: RewardRunnerConfig | None) -> None:
        self.failures = FailureLog()
        self._config = config or RewardRunnerConfig()
        self._places = asyncio.Semaphore(self._config.max_concurrency)
        self._stats = RewardStats()

    def stats(self) -> RewardStats:
        return replace(self._stats)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> T | Failed:
        stats = self._stats

        async def attempt() -> T:
            stats.num_waiting += 1
            try:
                await self._places.acquire()
            finally:
                stats.num_waiting -= 1
            began = time.monotonic()
            stats.num_running += 1
            try:
                return await call()
            finally:
                stats.num_running -= 1
                stats.busy_s += time.monotonic() - began
                self._places.release()

        def count_retry() -> None:
            stats.num_retries += 1

        try:
            result = await self._config.retry.run(attempt, may_pass=_may_pass, on_retry=count_retry)
        except NoScoreError as error:
            stats.num_no_score += 1
            self.failures.succeeded()
            return Failed(error=error)
        except RewardError as error:
            stats.num_failed += 1
            self.failures.failed(error)
            if self._config.on_error == "raise" or isinstance(error, RewardExitError):
                raise
            return Failed(error=error)
        stats.num_scored += 1
        self.failures.succeeded()
        return result

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        timeout = asyncio.timeout(self._config.timeout_s)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            self._stats.num_timeouts += 1
            raise TimeoutError(f"no answer within timeout_s={self._config.timeout_s}") from None


class RewardRunner(_Runner[Scored]):
    """Scores completions one by one, concurrently."""

    def __init__(self, reward: RewardFunction, config: RewardRunnerConfig | None = None) -> None:
        super().__init__(config)
        self._threads: ThreadedReward | None = None
        if self._config.sync_in_threads and not is_async(reward):
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
        return await self._run(
            partial(evaluate, self._reward, prompt=prompt, completion=completion, row=row, limit=self._in_time)
        )

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
            # Failures of the trial are not those of the run, which may have another log file.
            self.failures = FailureLog()

    def close(self) -> None:
        """Let the threads of a synchronous reward end. Idempotent."""
        if self._threads is not None:
            self._threads.close()


class GroupRewardRunner(_Runner[list[Scored]]):
    """Scores groups of completions, for example by `PairwiseJudge`; a group is one call."""

    def __init__(self, reward: GroupRewardFunction, config: RewardRunnerConfig | None = None) -> None:
        super().__init__(config)
        self._reward = reward

    async def score(self, *, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[Scored] | Failed:
        """Return one `Scored` for each completion, in their order; otherwise as `RewardRunner.score`."""
        return await self._run(
            partial(evaluate_group, self._reward, prompt=prompt, completions=completions, row=row, limit=self._in_time)
        )


def _may_pass(error: BaseException | None) -> bool:
    """Return whether the error was caused by a time-out or a broken connection."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        error = error.__cause__
    return False


class ThreadedReward:
    """Runs a reward in at most ``max_workers`` daemon threads, so that generation continues meanwhile.

    No thread can be stopped: a call that was abandoned holds its thread until it returns, and one that never returns
    holds it until the process ends; threads of `concurrent.futures` and `asyncio.to_thread` would keep the process from
    ending. Code that can hang belongs in a sandbox or on a server.

    Args:
        reward: synchronous, and safe to be called by several threads.
        max_workers: threads, which are started on demand.
    """

    def __init__(self, reward: Callable[..., Any], *, max_workers: int = 8) -> None:
        if max_workers < 1:
            raise RewardConfigError(f"max_workers is {max_workers}; expected at least 1")
        self._reward = reward
        self.__name__ = name_of(reward)
        self._max_workers = max_workers
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_pending = 0

    async def __call__(self, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        work = partial(contextvars.copy_context().run, call, self._reward, *arguments)
        self._num_pending += 1
        if self._num_pending > self._num_threads < self._max_workers:
            self._num_threads += 1
            name = f"reward-{self.__name__}-{self._num_threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put(partial(self._call, work, result, loop))
        value = await result
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Let the threads end when they are done. Idempotent."""
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._num_threads = 0

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, work: Callable[[], Any], result: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop) -> None:
        """Make one call, and pass its outcome to the event loop."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        # A loop that is closed has no use for the outcome of a call that was given up.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._settle, result, value, error)

    def _settle(self, result: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
        # A call that was given up has held its thread until now.
        self._num_pending -= 1
        if result.done():
            return
        if error is None:
            result.set_result(value)
        elif isinstance(error, StopIteration):
            result.set_exception(RuntimeError(f"the function raised {error!r}"))
        else:
            result.set_exception(error)


def part_means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return ``reward/PART/mean`` of every part, over the completions that have it."""
    values: dict[str, list[float]] = {}
    for one in parts:
        for name, part in one.items():
            values.setdefault(name, []).append(part)
    return {f"reward/{name}/mean": math.fsum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def reward_metrics(outcomes: Iterable[Scored | Failed]) -> dict[str, float]:
    """Return means over completions: ``reward/mean``, those of `part_means`, and ``reward/failed_fraction``.

    Without outcomes the result is empty.
    """
    everything = list(outcomes)
    scored = [outcome for outcome in everything if isinstance(outcome, Scored)]
    if not everything:
        return {}
    mean = {"reward/mean": math.fsum(one.score for one in scored) / len(scored)} if scored else {}
    failed = {"reward/failed_fraction": (len(everything) - len(scored)) / len(everything)}
    return mean | part_means(one.parts for one in scored) | failed
