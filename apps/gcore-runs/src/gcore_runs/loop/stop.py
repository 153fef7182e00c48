"""Ends of a run between two steps: Ctrl-C, a scheduler's SIGTERM, or early stopping."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

_INTERRUPTS = signal.SIGINT, signal.SIGTERM
"""Signals that end a run between two steps: Ctrl-C, and what a scheduler sends before it takes the machine."""


@contextmanager
def interrupted_by(handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Let Ctrl-C and SIGTERM call ``handler`` inside the block; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Stop:
    """Ctrl-C, or a scheduler's SIGTERM, that ends a loop between two steps, where the last finished one can be saved.

    The second one raises Python's own `KeyboardInterrupt` immediately.
    """

    is_orderly = False
    """Whether `check` has ended the loop."""
    is_early = False
    """Whether `end_early` was called."""
    _is_requested = False
    _is_held_back = False
    _act: Callable[[], object] | None = None

    def noted(self, act: Callable[[], object] | None = None) -> AbstractContextManager[None]:
        """Note Ctrl-C inside the block, and call ``act`` unless it is held back."""
        self._act = act
        return interrupted_by(self._request)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self._is_requested:
            self.is_orderly = True
            raise KeyboardInterrupt

    def end_early(self) -> None:
        """End the loop as Ctrl-C does, although the run is complete."""
        self.is_early = not self._is_requested
        if self._act is not None:
            self._act()

    def hold_back(self) -> None:
        """Delay Ctrl-C until `let_through`."""
        self._is_held_back = True

    def let_through(self) -> None:
        """Act on a Ctrl-C that came since `hold_back`."""
        self._is_held_back = False
        if self._is_requested and self._act is not None:
            self._act()

    def _request(self, *_: object) -> None:
        for number in _INTERRUPTS:
            signal.signal(number, signal.default_int_handler)
        self._is_requested = True
        if not self._is_held_back:
            self.let_through()
