"""Calls of rewards, many at a time: checks of results, time limits, bounded retries and counts of failures.

Ctrl-C interrupts a synchronous reward that blocks the event loop: `_Relay` passes the signal on to the running call.
"""

import asyncio
import inspect
import math
import random
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, TypeVar, get_args

from gcore_rollout.errors import (
    NoScoreError,
    RewardError,
    RewardExitError,
    require,
    require_one_of,
)
from gcore_rollout.rewards.reward import (
    FailureLog,
    GroupRewardFunction,
    InterruptedCallError,
    RewardFunction,
    RewardStats,
    Scored,
    ThreadedReward,
    check_row,
    describe_call,
    locate_errors,
    make_exit_error,
    may_pass,
    name_of,
    slow_calls,
)

OnError = Literal["raise", "drop"]
"""A reward that fails after its retries: "raise" raises its error; "drop" returns it, so that its group is dropped."""

T = TypeVar("T")
_blocking_limit_s: ContextVar[float | None] = ContextVar("blocking_limit_s", default=None)
"""Time limit of a call in the main thread."""
_time_limit: ContextVar["_TimeLimit | None"] = ContextVar("time_limit", default=None)
"""Time limit of the present attempt."""
_interrupted: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Loops in which Ctrl-C has interrupted a call: others that are ready would block them again before they can react."""


async def score(
    reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]
) -> float:
    """Return the score alone of what `evaluate` returns."""
    return (await evaluate(reward, prompt=prompt, completion=completion, row=row)).score


async def evaluate(
    reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]
) -> Scored:
    """Call a reward and check what it returns.

    Raises:
        NoScoreError: the reward raised it.
        RewardExitError: it tried to end the process.
        RewardError: it raised anything else, or did not return finite numbers; the message quotes both texts.
    """
    with locate_errors(partial(describe_call, reward, (prompt, completion))):
        return check_score(await answer(reward, prompt, completion, row))


async def evaluate_group(
    reward: GroupRewardFunction, *, prompt: str, completions: Sequence[str], row: Mapping[str, Any]
) -> list[Scored]:
    """Evaluate a group of completions of one prompt; see `evaluate`."""
    first = next(iter(completions), "")
    with locate_errors(partial(describe_call, reward, (prompt, first))):
        values = await answer(reward, prompt, completions, row)
        if len(values) != len(completions):
            raise RewardError(
                f"returned {len(values)} scores; expected one for each of {len(completions)} completions"
            )
        return [check_score(value) for value in values]


def check_score(value: object) -> Scored:
    """Return a reward's result, a number or a `Scored` of finite numbers; `RewardError` for anything else."""
    if not isinstance(value, Scored):
        return Scored(score=check_number("returned", value))
    parts = {
        name: check_number(f"returned a part {name!r} of", part)
        for name, part in value.parts.items()
    }
    score = check_number("returned a score of", value.score)
    steps = {
        end: check_number("returned a step's score of", step) for end, step in value.steps.items()
    }
    return replace(value, score=score, parts=parts, steps=steps)


def check_number(what: str, value: Any) -> float:
    """Return a value as a float; `RewardError`, after the words of ``what``, if it is no finite number."""
    try:
        # A string would pass through float(), but a reward returns one by mistake.
        number = float(value + 0.0)
    except (TypeError, ValueError):
        raise RewardError(f"{what} {value!r}; expected one number") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; expected a finite number")
    return number


def is_async(reward: object) -> bool:
    """Return whether a reward is an async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


async def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and wait for what it returns if that is awaitable.

    After Ctrl-C has interrupted the call, this never returns: it waits to be cancelled. `RewardExitError` if the
    function tried to end the process, or blocked it for too long in `RewardRunner.try_on`.
    """
    try:
        with slow_calls.watch(partial(describe_call, function, arguments)):
            value = _call(function, *arguments)
        if inspect.isawaitable(value):
            value = await value
        return value
    except InterruptedCallError:
        await asyncio.get_running_loop().create_future()
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise make_exit_error(error) from error


def _call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function so that SIGINT interrupts it, by an `InterruptedCallError`, even if it blocks the main thread.

    The handler of asyncio, which has been called then, acts when the event loop runs again. `RewardExitError` if the
    function raised KeyboardInterrupt, or blocked for longer than ``_blocking_limit_s``.
    """
    relay = _Relay.install()
    if relay is None:
        try:
            return function(*arguments)
        except KeyboardInterrupt as error:
            # No signal is handled here.
            raise make_exit_error(error) from error
    if relay.loop in _interrupted:
        raise InterruptedCallError
    guard = _Guard(_blocking_limit_s.get())
    relay.guard = guard
    try:
        with guard:
            return function(*arguments)
    except KeyboardInterrupt as error:
        relay.remove()
        if guard.is_expired:
            raise RewardExitError(f"no answer within {guard.timeout_s:g} s") from None
        if guard.is_interrupted:
            raise InterruptedCallError from None
        raise make_exit_error(error) from error
    except BaseException:
        relay.remove()
        raise
    finally:
        relay.guard = None
        if guard.is_interrupted:
            relay.remove()
            _interrupted.add(relay.loop)
            relay.pass_on(signal.SIGINT, None)


class _Relay:
    """Passes SIGINT on to the running call during one pass of the event loop, otherwise to the previous handler.

    The many calls of a pass share it, because Python takes longer to install a handler than most rewards to score.
    """

    _present: "_Relay | None" = None

    def __init__(self, loop: asyncio.AbstractEventLoop, before: Any) -> None:
        self.loop = loop
        self._before = before
        """The handler before, or `signal.SIG_IGN`, as of a program that a script runs in the background."""
        self.guard: _Guard | None = None
        self._has_relayed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.guard is not None and (callable(self._before) or self.guard.is_expired):
            self.guard.interrupt()
        else:
            self._has_relayed = True
            self.pass_on(number, frame)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Call the handler before, if it is a function."""
        if callable(self._before):
            self._before(number, frame)

    @classmethod
    def install(cls) -> "_Relay | None":
        """Return the relay of this pass of the loop; None in other threads than the main one, which get no signals."""
        if threading.current_thread() is not threading.main_thread():
            return None
        loop = asyncio.get_running_loop()
        if cls._present is None or cls._present.loop is not loop:
            before = signal.getsignal(signal.SIGINT)
            if before is None or before is signal.SIG_DFL:
                return None
            cls._present = cls(loop, before)
            signal.signal(signal.SIGINT, cls._present)
            loop.call_soon(cls._present.remove)
        return cls._present

    def remove(self) -> None:
        """Install the handler before again, unless a handler that was called has installed another. Idempotent."""
        if _Relay._present is not self:
            return
        _Relay._present = None
        if not self._has_relayed or signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, self._before)


class _Guard:
    """Interrupts a call of the main thread, on SIGINT or after a time."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.is_interrupted = self.is_expired = self._is_over = False
        self._lock = threading.Lock()
        self._timer = None if timeout_s is None else threading.Timer(timeout_s, self._expire)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self) -> None:
        """Handle the signal."""
        self.is_interrupted |= not self.is_expired
        if not self._is_over:
            raise KeyboardInterrupt

    def _expire(self) -> None:
        with self._lock:
            if not self._is_over:
                self.is_expired = True
                # It wakes the main thread out of a system call, too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _TimeLimit:
    """The time limit of an attempt, which does not run while a part of it is paused."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self.num_paused = 0
        self.rest_s = 0.0


@contextmanager
def pause_time_limit() -> Generator[None]:
    """Stop the time of the attempt during this block: for a call with a limit of its own that may have to wait."""
    limit = _time_limit.get()
    if limit is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    if limit.num_paused == 0:
        end_s = limit.timeout.when()
        assert end_s is not None
        limit.rest_s = end_s - clock()
        limit.timeout.reschedule(None)
    limit.num_paused += 1
    try:
        yield
    finally:
        limit.num_paused -= 1
        if limit.num_paused == 0:
            limit.timeout.reschedule(clock() + limit.rest_s)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The number of retries and the time between them.

    Example:
        >>> answers = iter(["lost", "lost", "42"])
        >>> async def attempt():
        ...     answer = next(answers)
        ...     if answer == "lost":
        ...         raise ConnectionError("the server does not answer")
        ...     return answer
        >>> asyncio.run(RetryPolicy(max_retries=2, backoff_s=0.0).run(attempt))
        '42'
    """

    max_retries: int = 2
    """Attempts after the first."""
    backoff_s: float = 0.5
    """Seconds before the first retry. It doubles with each, and is shortened by up to half at random, so that calls
    which failed together do not come back together."""
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        require("max_retries", self.max_retries, self.max_retries >= 0, "0 or more")
        require("backoff_s", self.backoff_s, self.backoff_s >= 0, "0 or more")
        longest_s = self.max_backoff_s
        require(
            "max_backoff_s",
            longest_s,
            longest_s >= self.backoff_s,
            f"at least backoff_s={self.backoff_s}",
        )

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``attempt``, or raise its last error, or the first that is not transient."""
        for retry in range(self.max_retries):
            try:
                return await attempt()
            except Exception as error:
                if not may_pass(error):
                    raise
            wait_s = min(self.max_backoff_s, self.backoff_s * 2**retry)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        return await attempt()


@dataclass(frozen=True, kw_only=True)
class RewardRunnerConfig:
    """Settings of a runner.

    Example:
        >>> def reward(prompt, completion, row):
        ...     return float(row["answer"] in completion)
        >>> runner = RewardRunner(reward, RewardRunnerConfig(on_error="drop", max_concurrency=8))
        >>> result = asyncio.run(runner.score(prompt="1 + 1 =", completion="2", row={}))
        >>> type(result).__name__
        'RewardError'
        >>> runner.stats().num_failed
        1
        >>> runner.close()
    """

    max_concurrency: int = 64
    """Largest number of concurrent calls; the others wait, and their time does not run yet."""
    timeout_s: float = 60.0
    """Time limit of each attempt, but of synchronous rewards on the loop, which nothing can interrupt."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Retries after time-outs and broken connections (`TimeoutError`, `ConnectionError`), and nothing else."""
    on_error: OnError = "raise"
    sync_in_threads: bool = True
    """Run a synchronous reward in as many threads as there may be calls (see `ThreadedReward`), not on the loop."""

    def __post_init__(self) -> None:
        require("max_concurrency", self.max_concurrency, self.max_concurrency >= 1, "at least 1")
        require("timeout_s", self.timeout_s, self.timeout_s > 0, "more than 0")
        require_one_of("on_error", self.on_error, get_args(OnError))


class RewardRunner:
    """Scores completions one by one, or by a `GroupRewardFunction` in groups, many calls at a time.

    Example:
        >>> def reward(prompt, completion, row):
        ...     return float(completion == row["answer"])
        >>> runner = RewardRunner(reward)
        >>> asyncio.run(runner.score(prompt="1 + 1 =", completion="2", row={"answer": "2"}))
        Scored(score=1.0, parts={}, feedback='', answer=None)
        >>> runner.close()
    """

    def __init__(
        self, reward: RewardFunction | GroupRewardFunction, config: RewardRunnerConfig | None = None
    ) -> None:
        self.failures = FailureLog()
        """Counts calls, and those that ended in an error after their retries."""
        self._config = config or RewardRunnerConfig()
        self._slots = asyncio.Semaphore(self._config.max_concurrency)
        self._stats = RewardStats()
        self._threads: ThreadedReward | None = None
        self._check_row = partial(check_row, reward)
        if self._config.sync_in_threads and not is_async(reward):
            self._threads = ThreadedReward(reward, max_workers=self._config.max_concurrency)
            reward = self._threads

        def call_in_time(*arguments: Any) -> Any:
            value = reward(*arguments)
            if inspect.isawaitable(value):
                return self._limit_time(value)
            return value

        call_in_time.__name__ = name_of(reward)
        self._reward: Callable[..., Any] = call_in_time

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` for a row that the reward cannot score, as far as that is known before it is called."""
        self._check_row(row)

    def stats(self) -> RewardStats:
        return replace(self._stats)

    async def score(
        self, *, prompt: str, completion: str, row: Mapping[str, Any]
    ) -> Scored | RewardError:
        """Score one completion; or return the error if it is a `NoScoreError`, or ``on_error`` is "drop".

        `RewardError` if it failed, after its retries, and ``on_error`` is "raise"; `RewardExitError` if it tried to end
        the process.
        """
        return await self._run(
            partial(evaluate, self._reward, prompt=prompt, completion=completion, row=row)
        )

    async def score_group(
        self, *, prompt: str, completions: Sequence[str], row: Mapping[str, Any]
    ) -> list[Scored] | RewardError:
        """Return one `Scored` for each completion, in their order, from one call; otherwise as `score`."""
        return await self._run(
            partial(evaluate_group, self._reward, prompt=prompt, completions=completions, row=row)
        )

    async def try_on(
        self, *, prompt: str, completion: str, row: Mapping[str, Any]
    ) -> Scored | RewardError:
        """Score one completion before a run starts, with ``timeout_s`` for a synchronous reward, too; see `score`.

        `RewardExitError` also if the reward blocked the process for longer than ``timeout_s``.
        """
        token = _blocking_limit_s.set(self._config.timeout_s)
        try:
            return await self.score(prompt=prompt, completion=completion, row=row)
        finally:
            _blocking_limit_s.reset(token)
            # Failures of the trial are not those of the run, which may have another log file.
            self.failures = FailureLog()

    def close(self) -> None:
        """Let the threads of a synchronous reward end. Idempotent."""
        if self._threads is not None:
            self._threads.close()

    async def _run(self, call: Callable[[], Awaitable[T]]) -> T | RewardError:
        stats = self._stats
        num_attempts = 0

        async def attempt() -> T:
            nonlocal num_attempts
            stats.num_retries += num_attempts > 0
            num_attempts += 1
            stats.num_waiting += 1
            try:
                await self._slots.acquire()
            finally:
                stats.num_waiting -= 1
            start_s = time.monotonic()
            stats.num_running += 1
            try:
                return await call()
            finally:
                stats.num_running -= 1
                stats.busy_s += time.monotonic() - start_s
                self._slots.release()

        try:
            result = await self._config.retry.run(attempt)
            stats.num_scored += 1
        except NoScoreError as error:
            stats.num_no_score += 1
            result = error
        except RewardError as error:
            stats.num_failed += 1
            self.failures.failed(error)
            if self._config.on_error == "raise" or isinstance(error, RewardExitError):
                raise
            return error
        self.failures.succeeded()
        return result

    async def _limit_time(self, work: Awaitable[Any]) -> Any:
        timeout = asyncio.timeout(self._config.timeout_s)
        token = _time_limit.set(_TimeLimit(timeout))
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            self._stats.num_timeouts += 1
            raise TimeoutError(f"no answer within timeout_s={self._config.timeout_s}") from None
        finally:
            _time_limit.reset(token)
