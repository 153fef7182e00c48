"""Ctrl-C that ends a run between two steps."""

import asyncio
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def at_once() -> Generator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` at any time inside the block, in coroutines of an `asyncio.Runner`, too.

    The runner's own handler waits until its task awaits something, which a loading model or a blocking reward may do
    late, or never. Outside the main thread, which alone gets signals, nothing is changed.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    # The runner replaces Python's default handler, and no other.
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


class Interrupt:
    """Cancels a task on the first Ctrl-C, at a moment when the last finished step can still be saved.

    The second one raises Python's own `KeyboardInterrupt` immediately.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_held_back = False
        self._is_requested = False

    @contextmanager
    def cancels(self, task: "asyncio.Task[None]") -> Generator[None]:
        """Cancel ``task``, one of the running loop, if Ctrl-C is pressed inside the block.

        Only the main thread gets signals; in another one, nothing is cancelled.
        """
        self._task = task
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        task.get_loop().add_signal_handler(signal.SIGINT, self._request)
        try:
            yield
        finally:
            task.get_loop().remove_signal_handler(signal.SIGINT)

    def hold_back(self) -> None:
        """Delay Ctrl-C until `let_through`."""
        self._is_held_back = True

    def let_through(self) -> None:
        """Act on a Ctrl-C that came since `hold_back`."""
        self._is_held_back = False
        self._cancel_if_requested()

    def _request(self) -> None:
        assert self._task is not None
        self._task.get_loop().remove_signal_handler(signal.SIGINT)
        self._is_requested = True
        self._cancel_if_requested()

    def _cancel_if_requested(self) -> None:
        if self._is_requested and not self._is_held_back and self._task is not None:
            self._task.cancel()


class Stop:
    """Ctrl-C for a loop without tasks: noted, and raised where the loop calls `check`.

    The second one raises Python's own `KeyboardInterrupt` immediately.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self.is_orderly = False
        """Whether `check` has ended the loop."""

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note Ctrl-C inside the block; in the main thread only, which alone gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._is_requested:
            self.is_orderly = True
            raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_requested = True
