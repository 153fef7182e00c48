"""Calls of user functions that Ctrl-C and a time limit can interrupt while they block the event loop."""

import asyncio
import inspect
import signal
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from gcore_rollout.errors import RewardExitError

T = TypeVar("T")

_limit_s: ContextVar[float | None] = ContextVar("limit_s", default=None)
_interrupted: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Loops in which Ctrl-C has interrupted a call: others that are ready would block them again before they can react."""


class InterruptedCallError(BaseException):
    """Ctrl-C ended a call; the handler of the signal has been notified, and will cancel what called."""


@contextmanager
def blocking_limit(timeout_s: float) -> Generator[None]:
    """Give calls inside the block a time limit, if they are made in the main thread."""
    token = _limit_s.set(timeout_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


async def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and wait for what it returns if that is awaitable.

    After Ctrl-C has interrupted the call, this waits until it is cancelled.

    Raises:
        RewardExitError: the function tried to end the process, or exceeded a `blocking_limit`.
    """
    try:
        value = call(function, *arguments)
        return await value if inspect.isawaitable(value) else value
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
    loop = _running_loop()
    if loop in _interrupted:
        raise InterruptedCallError
    guarded = _Guarded(_limit_s.get())
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


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


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
