"""Rewards of completions: how they are called and checked, their weighted sums, and counts of their failures."""

import asyncio
import inspect
import logging
import math
import signal
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar

from gcore_rollout.errors import NoScoreError, RewardConfigError, RewardError, RewardExitError, RolloutError

T = TypeVar("T")

_MAX_KINDS = 100
"""Most kinds of failures that are distinguished."""
_logger = logging.getLogger(__name__)
_blocking_limit_s: ContextVar[float | None] = ContextVar("blocking_limit_s", default=None)
_interrupted: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Loops in which Ctrl-C has interrupted a call: others that are ready would block them again before they can react."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The score of one completion with its parts and feedback."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name, for metrics such as ``reward/format/mean``. They are not added to it."""
    feedback: str = ""
    """The reason in words, such as a judge's: a next turn can give it to the policy."""


RewardFunction = Callable[[str, str, Mapping[str, Any]], float | Scored | Awaitable[float | Scored]]
"""``reward(prompt, completion, row)``: both texts, and the data set's row. May be async."""

GroupRewardFunction = Callable[[str, Sequence[str], Mapping[str, Any]], Awaitable[Sequence[Scored]]]
"""``reward(prompt, completions, row)`` scores the completions of one prompt against each other, in their order. It
raises `NoScoreError` for a group that is to be dropped."""

Limit = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Wraps the wait for an async reward, such as by a time limit."""


async def score(reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return only the number of `evaluate`."""
    return (await evaluate(reward, prompt=prompt, completion=completion, row=row)).score


async def evaluate(
    reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any], limit: Limit | None = None
) -> Scored:
    """Call a reward and check what it returns.

    Raises:
        NoScoreError: the reward raised it.
        RewardExitError: it tried to end the process.
        RewardError: it raised anything else, or did not return finite numbers; the message holds the prompt and the
            completion.
    """
    try:
        return checked(await answer(reward, prompt, completion, row, limit=limit))
    except Exception as error:
        raise _with_texts(error, reward, prompt, completion) from error


async def evaluate_group(
    reward: GroupRewardFunction,
    *,
    prompt: str,
    completions: Sequence[str],
    row: Mapping[str, Any],
    limit: Limit | None = None,
) -> list[Scored]:
    """Evaluate a group of completions of one prompt; see `evaluate`."""
    try:
        values = await answer(reward, prompt, completions, row, limit=limit)
        if len(values) != len(completions):
            raise RewardError(f"returned {len(values)} scores; expected one for each of {len(completions)} completions")
        return [checked(value) for value in values]
    except Exception as error:
        raise _with_texts(error, reward, prompt, completions[0] if completions else "") from error


def checked(value: object) -> Scored:
    """Return what a reward returned, finite numbers; raise `RewardError` for anything else."""
    if not isinstance(value, Scored):
        return Scored(score=_finite("returned", value))
    parts = {name: _finite(f"returned a part {name!r} of", part) for name, part in value.parts.items()}
    return Scored(score=_finite("returned a score of", value.score), parts=parts, feedback=value.feedback)


def _finite(what: str, value: Any) -> float:
    try:
        # A string would pass through float(), but a reward returns one by mistake.
        number = float(value + 0.0)
    except (TypeError, ValueError):
        raise RewardError(f"{what} {value!r}; expected one number") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; expected a finite number")
    return number


def located(error: Exception, where: str) -> RewardError:
    """Return the same error with the place where it happened; a `NoScoreError` or `RewardExitError` stays one."""
    kind = type(error) if isinstance(error, NoScoreError | RewardExitError) else RewardError
    reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    return kind(f"{where}: {reason}")


def _with_texts(error: Exception, reward: object, prompt: str, completion: str) -> RewardError:
    return located(error, f"reward {name_of(reward)!r} on prompt {prompt[-80:]!r}, completion {completion[:80]!r}")


def name_of(reward: object) -> str:
    """Return a reward's name, for errors."""
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: object) -> bool:
    """Return whether a reward is an async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class CompositeReward:
    """The weighted sum of named rewards, which run at the same time.

    Each reward's own score, before its weight, is the part of its name, and its parts are below that: ``judge`` and
    ``judge/parsed``. Their feedback is joined by blank lines.

    Args:
        rewards: by name; one that is synchronous runs on the event loop, so wrap one that takes long in
            `ThreadedReward`.
        weights: one for each name; they need not sum to 1, and 0 measures a reward without using it.

    Raises:
        RewardConfigError: no reward, other names in ``weights``, or a weight that is not finite.
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], *, weights: Mapping[str, float]) -> None:
        if not rewards:
            raise RewardConfigError("rewards is empty; expected at least one")
        if rewards.keys() != weights.keys():
            raise RewardConfigError(f"weights has {sorted(weights)}; expected the names of rewards, {sorted(rewards)}")
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise RewardConfigError(f"weights[{name!r}] is {weight}; expected a finite number")
        if not any(weights.values()):
            raise RewardConfigError(f"weights are all 0 ({sorted(weights)}); expected at least one that is not")
        self._rewards = dict(rewards)
        self._weights = dict(weights)

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        async def part(name: str, reward: RewardFunction) -> Scored:
            try:
                return checked(await answer(reward, prompt, completion, row))
            except Exception as error:
                raise located(error, f"part {name!r}") from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(part(name, reward)) for name, reward in self._rewards.items()}
        except BaseExceptionGroup as errors:
            # The others were cancelled.
            first = errors.exceptions[0]
            raise first from first.__cause__
        scored = {name: task.result() for name, task in tasks.items()}
        parts: dict[str, float] = {}
        for name, one in scored.items():
            parts |= {name: one.score, **{f"{name}/{part}": value for part, value in one.parts.items()}}
        return Scored(
            score=math.fsum(self._weights[name] * one.score for name, one in scored.items()),
            parts=parts,
            feedback="\n\n".join(one.feedback for one in scored.values() if one.feedback),
        )


class InterruptedCallError(BaseException):
    """Ctrl-C ended a call; the handler of the signal has been notified, and will cancel what called."""


@contextmanager
def blocking_limit(timeout_s: float) -> Generator[None]:
    """Give calls inside the block a time limit, if they are made in the main thread."""
    token = _blocking_limit_s.set(timeout_s)
    try:
        yield
    finally:
        _blocking_limit_s.reset(token)


async def answer(function: Callable[..., Any], *arguments: Any, limit: Limit | None = None) -> Any:
    """Call a function, and wait for what it returns if that is awaitable, within a limit if there is one.

    After Ctrl-C has interrupted the call, this waits until it is cancelled.

    Raises:
        RewardExitError: the function tried to end the process, or exceeded a `blocking_limit`.
    """
    try:
        value = call(function, *arguments)
        if not inspect.isawaitable(value):
            return value
        return await (value if limit is None else limit(value))
    except InterruptedCallError:
        await asyncio.get_running_loop().create_future()
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _exit_error(error) from error


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function so that SIGINT interrupts it even if it blocks the main thread.

    The handler of asyncio acts when the event loop runs again, which it does not while the function blocks.

    Raises:
        InterruptedCallError: Ctrl-C was pressed; the handler that was installed before has been called.
        RewardExitError: the function tried to end the process, or exceeded a `blocking_limit`.
    """
    if threading.current_thread() is not threading.main_thread():
        try:
            return function(*arguments)
        except KeyboardInterrupt as error:
            # No signal is handled here.
            raise _exit_error(error) from error
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        return function(*arguments)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if loop in _interrupted:
        raise InterruptedCallError
    guarded = _Guarded(_blocking_limit_s.get())
    signal.signal(signal.SIGINT, guarded.interrupt)
    try:
        with guarded:
            return function(*arguments)
    except KeyboardInterrupt as error:
        if guarded.is_expired:
            raise RewardExitError(f"no answer within {guarded.timeout_s:g} s") from None
        if guarded.is_interrupted:
            raise InterruptedCallError from None
        raise _exit_error(error) from error
    finally:
        signal.signal(signal.SIGINT, before)
        if guarded.is_interrupted:
            if loop is not None:
                _interrupted.add(loop)
            before(signal.SIGINT, None)


class _Guarded:
    """Interrupts a call of the main thread, on SIGINT or after a time."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.is_interrupted = False
        self.is_expired = False
        self._is_over = False
        self._lock = threading.Lock()
        self._timer = None if timeout_s is None else threading.Timer(timeout_s, self._expire)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            with self._lock:
                self._is_over = True
            self._timer.cancel()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        del number, frame
        if not self.is_expired:
            self.is_interrupted = True
        if not self._is_over:
            raise KeyboardInterrupt

    def _expire(self) -> None:
        with self._lock:
            if not self._is_over:
                self.is_expired = True
                # It wakes the main thread out of a system call, too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _exit_error(error: BaseException) -> RewardExitError:
    return RewardExitError(f"tried to end the process: {type(error).__name__}: {error}".removesuffix(": "))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failures of one kind."""

    kind: str
    """The exception's type, and where it was raised."""
    message: str
    """Message of the first failure."""
    count: int


class FailureLog:
    """Counts calls, and failures by the exception's type and the line that raised it.

    The first traceback of each kind is logged.
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
        root = error
        while isinstance(root, RolloutError) and root.__cause__ is not None:
            root = root.__cause__
        frames = traceback.extract_tb(root.__traceback__)
        where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        kind = f"{type(root).__name__}{where}"
        if kind not in self._known and len(self._known) >= _MAX_KINDS:
            kind = "another error"
        if kind not in self._known:
            self._known.add(kind)
            _logger.info("%s; the first of its kind:", error, exc_info=error)
        found = self._counts.get(kind) or Failure(kind=kind, message=str(root), count=0)
        self._counts[kind] = replace(found, count=found.count + 1)

    def drain(self) -> tuple[int, list[Failure]]:
        """Return the number of calls and the failures since this method was called last."""
        drained = self._num_calls, list(self._counts.values())
        self._num_calls, self._counts = 0, {}
        return drained
