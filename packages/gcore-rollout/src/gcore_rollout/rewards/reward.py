"""Rewards: the forms of a function that scores, its results and metrics, and threads and warnings for a slow one."""

import asyncio
import contextvars
import inspect
import itertools
import logging
import numbers
import queue
import statistics
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from gcore_rollout.errors import NoScoreError, RewardError, RewardExitError, RolloutError, require

_MAX_KINDS = 100
"""Most kinds of failures that are distinguished."""
SLOW_S = 5.0
"""Seconds after which a call is named."""
CHECK_S = 1.0
"""Seconds between two looks at the calls that run."""
_logger = logging.getLogger(__name__)
_slow_calls_logger = logging.getLogger("gcore_rollout.rewards.slow_calls")
"""An app may show the warnings of slow calls without the other ones."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The score of one completion with its parts and feedback.

    Example:
        >>> verdict = Scored(score=0.7, parts={"parsed": 1.0}, feedback="Nearly right.")
        >>> verdict.as_parts("judge")
        {'judge': 0.7, 'judge/parsed': 1.0}
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name, for metrics such as ``reward/format/mean``. They are not added to it."""
    feedback: str = ""
    """The reason in words, such as a judge's: a next turn can give it to the policy."""
    answer: str | None = None
    """The answer that was found in the completion, in one spelling for equal answers: evaluations vote by it."""
    steps: Mapping[int, float] = field(default_factory=dict[int, float], repr=False)
    """The score of each step of the completion, by the number of characters up to its end; empty: it has none."""

    def as_parts(self, name: str) -> dict[str, float]:
        """Return score and parts as the parts of another score: ``judge`` and ``judge/parsed``."""
        return {name: self.score, **{f"{name}/{part}": value for part, value in self.parts.items()}}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failures of one kind.

    Example:
        >>> Failure.of(ValueError("there is no number"))
        Failure(kind='ValueError', message='there is no number', count=1)
    """

    kind: str
    """The exception's type, and where it was raised."""
    message: str
    """Message of the first failure."""
    count: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the failure of one call, by the root cause of an error of this package."""
        while isinstance(error, RolloutError) and error.__cause__ is not None:
            error = error.__cause__
        frames = traceback.extract_tb(error.__traceback__)
        kind = type(error).__name__
        if frames:
            kind += f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        return cls(kind=kind, message=str(error))


class FailureLog:
    """Counts calls, and failures by kind; the first traceback of each kind is logged.

    Example:
        >>> log = FailureLog()
        >>> log.succeeded()
        >>> log.failed(ValueError("there is no number"))
        >>> log.failed(ValueError("there is none here"))
        >>> log.drain()
        (3, [Failure(kind='ValueError', message='there is no number', count=2)])
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._counts: dict[str, Failure] = {}
        self._num_calls = 0

    def succeeded(self) -> None:
        """Count a call that did not fail."""
        self._num_calls += 1

    def failed(self, error: BaseException) -> None:
        """Count a call that failed, by the root cause of an error of this package."""
        self._num_calls += 1
        failure = Failure.of(error)
        if failure.kind not in self._known and len(self._known) >= _MAX_KINDS:
            failure = replace(failure, kind="another error")
        if failure.kind not in self._known:
            self._known.add(failure.kind)
            _logger.info("%s; the first of its kind:", error, exc_info=error)
        earlier = self._counts.get(failure.kind)
        if earlier is not None:
            failure = replace(earlier, count=earlier.count + 1)
        self._counts[failure.kind] = failure

    def drain(self) -> tuple[int, list[Failure]]:
        """Return the number of calls and the failures since this method was called last."""
        num_calls = self._num_calls
        failures = list(self._counts.values())
        self._num_calls = 0
        self._counts.clear()
        return num_calls, failures


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


RewardFunction = Callable[[str, str, Mapping[str, Any]], float | Scored | Awaitable[float | Scored]]
"""``reward(prompt, completion, row)``: both texts, and the data set's row. May be async."""

GroupRewardFunction = Callable[[str, Sequence[str], Mapping[str, Any]], Awaitable[Sequence[Scored]]]
"""``reward(prompt, completions, row)`` scores the completions of one prompt against each other, in their order. It
raises `NoScoreError` for a group that is to be dropped."""


def name_of(reward: object) -> str:
    """Return a reward's name, for errors."""
    return getattr(reward, "__name__", type(reward).__name__)


def describe_call(reward: object, arguments: Sequence[object]) -> str:
    """Return the name of a reward with the ends of the prompt and the completion of a call, for errors."""
    call = f"reward {name_of(reward)!r}"
    if len(arguments) > 1 and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        call += f" on prompt {arguments[0][-80:]!r}, completion {arguments[1][:80]!r}"
    return call


def column(row: Mapping[str, Any], name: str, purpose: str) -> Any:
    """Return a column of a row; `RewardError` if there is none."""
    if name not in row:
        raise RewardError(f"the row has no {name!r} for {purpose}: it has {sorted(row)}")
    return row[name]


def check_row(reward: object, row: Mapping[str, Any]) -> None:
    """Raise `RewardError` for a row that the reward cannot score, if the reward has a method ``check_row`` for it."""
    check: Callable[[Mapping[str, Any]], None] | None = getattr(reward, "check_row", None)
    if check is not None:
        check(row)


def gold_answer(row: Mapping[str, Any], name: str, purpose: str) -> str:
    """Return the right answer in a column of a row as text; `RewardError` if it is missing, NaN, blank, or of another
    type than text or a number."""
    value = column(row, name, purpose)
    is_answer = not isinstance(value, bool) and isinstance(value, str | numbers.Number)
    # NaN alone differs from itself; tables have it where a cell is empty.
    if not is_answer or value != value or not str(value).strip():
        raise RewardError(f"the row's {name!r} is {value!r:.200}; expected a text or a number")
    return str(value)


@contextmanager
def locate_errors(where: str | Callable[[], str]) -> Generator[None]:
    """Raise errors of a block with the place where they happened; a `NoScoreError` or `RewardExitError` stays one.

    A function is called for an error alone.
    """
    try:
        yield
    except Exception as error:
        place = where if isinstance(where, str) else where()
        if isinstance(error, NoScoreError | RewardExitError):
            raise type(error)(f"{place}: {error}") from error
        if isinstance(error, RewardError):
            raise RewardError(f"{place}: {error}") from error
        raise RewardError(f"{place}: {type(error).__name__}: {error}") from error


def may_pass(error: BaseException | None) -> bool:
    """Return whether the error was caused by a time-out or a broken connection."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        error = error.__cause__
    return False


class InterruptedCallError(BaseException):
    """Ctrl-C ended a call; the handler of the signal has been notified, and will cancel what called."""


def finish_call(future: "asyncio.Future[Any]", value: Any) -> None:
    """Set the result of a call, or its error, unless the caller has given it up."""
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def make_exit_error(error: BaseException) -> RewardExitError:
    """Return the error of a reward that raised something else than an `Exception`."""
    exit_error = RewardExitError(
        f"tried to end the process: {type(error).__name__}: {error}".removesuffix(": ")
    )
    exit_error.__cause__ = error
    return exit_error


_ThreadCall = tuple[Future[Any], Callable[[], str], Callable[[], Any]]
"""The result to come of a call, its description, and the call."""


class ThreadedReward:
    """Runs a reward in at most ``max_workers`` daemon threads, so that generation continues meanwhile.

    The reward is synchronous, and safe to be called by several threads, which are started on demand. None can be
    stopped: a call that was abandoned holds its thread until it returns, and one that never returns until the process
    ends; threads of `concurrent.futures` and `asyncio.to_thread` would keep it from ending. Code that can hang belongs
    in a sandbox or on a server.

    Example:
        >>> def reward(prompt, completion, row):
        ...     time.sleep(0.01)
        ...     return float(completion == row["answer"])
        >>> async def main():
        ...     threaded = ThreadedReward(reward, max_workers=2)
        ...     scores = await asyncio.gather(*[threaded("1 + 1 =", text, {"answer": "2"}) for text in ("2", "3")])
        ...     threaded.close()
        ...     return scores
        >>> asyncio.run(main())
        [1.0, 0.0]
    """

    def __init__(self, reward: Callable[..., Any], *, max_workers: int = 8) -> None:
        require("max_workers", max_workers, max_workers >= 1, "at least 1")
        self._reward = reward
        self.__name__ = name_of(reward)
        self._max_workers = max_workers
        self._calls: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        """Calls without a thread; None ends one thread."""
        self._num_threads = 0
        self._idle = threading.Semaphore(0)

    async def __call__(self, *arguments: Any) -> Any:
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_workers:
            self._num_threads += 1
            name = f"reward-{self.__name__}-{self._num_threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        result: Future[Any] = Future()
        describe = partial(describe_call, self, arguments)
        self._calls.put(
            (result, describe, partial(contextvars.copy_context().run, self._reward, *arguments))
        )
        value = await asyncio.wrap_future(result)
        if inspect.isawaitable(value):
            value = await value
        return value

    def close(self) -> None:
        """Let the threads end when they are done. Idempotent."""
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._num_threads = 0

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            result, describe, work = call
            # A call that was given up before its turn is not made.
            if result.set_running_or_notify_cancel():
                try:
                    with slow_calls.watch(describe):
                        value = work()
                    result.set_result(value)
                    del value
                except StopIteration as error:
                    result.set_exception(RuntimeError(f"the function raised {error!r}"))
                except Exception as error:
                    result.set_exception(error)
                except BaseException as error:
                    result.set_exception(make_exit_error(error))
            del call, result, describe, work
            self._idle.release()


def part_means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return ``reward/PART/mean`` of every part, over the completions that have it."""
    return {
        f"reward/{name}/mean": statistics.fmean(numbers)
        for name, numbers in values_by_name(parts).items()
    }


def part_stds(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return ``reward/PART/std`` of every part, over the completions that have it."""
    return {
        f"reward/{name}/std": statistics.pstdev(numbers)
        for name, numbers in values_by_name(parts).items()
    }


def values_by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the numbers of each name, of those that have it."""
    values = defaultdict[str, list[float]](list)
    for named_parts in parts:
        for name, part in named_parts.items():
            values[name].append(part)
    return dict(sorted(values.items()))


def warn_of_slow_call(call: str) -> None:
    """Log that a call has been running for ``SLOW_S``."""
    _slow_calls_logger.warning("%s has been running for %g s", call, SLOW_S)


class SlowCalls:
    """The synchronous calls that run now. One thread looks at all of them: a timer for each would take longer than most
    rewards do."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, Callable[[], str]]] = {}
        self._numbers = itertools.count()
        self._has_calls = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, describe: Callable[[], str]) -> Generator[None]:
        """Name the call of this block, by ``describe()``, if it takes longer than ``SLOW_S``."""
        if self._thread is None or not self._thread.is_alive():
            # A fork of this process has the object without the thread.
            self._thread = threading.Thread(target=self._check, name="slow-rewards", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        self._running[number] = (time.monotonic(), describe)
        if not self._has_calls.is_set():
            self._has_calls.set()
        try:
            yield
        finally:
            del self._running[number]

    def _check(self) -> None:
        reported = -1
        while True:
            self._has_calls.wait()
            time.sleep(CHECK_S)
            self._has_calls.clear()
            for number, (start_s, describe) in list(self._running.items()):
                self._has_calls.set()
                if number > reported and time.monotonic() - start_s >= SLOW_S:
                    reported = number
                    warn_of_slow_call(describe())


slow_calls = SlowCalls()
"""The calls of this process."""
