"""Signals that ask a job to save and to end, such as the SIGTERM of a scheduler that takes the machine away."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignals:
    """Some signals, and whether one of them has come; made by `Checkpointer.stop_on`.

        stop = checkpointer.stop_on(signal.SIGTERM)
        for step in ...:
            ...
            if stop():  # on all ranks, once any has got the signal
                checkpointer.save(step, state).wait()
                break

    A handler of signals must not save, since it may run in the middle of an update: it takes note, and the training
    loop asks at the end of a step. The first signal of a kind is noted; another one acts as before. In a group all
    ranks ask together, and `stop()` passes a message to the root and back. `Checkpointer.close` lets the signals act as
    before. Only the main thread can make it, as `signal.signal` says.

    Example:
        >>> checkpointer = Checkpointer("stopped")
        >>> stop = checkpointer.stop_on(signal.SIGTERM)
        >>> stop()
        False
        >>> signal.raise_signal(signal.SIGTERM)  # as a scheduler does
        >>> if stop():
        ...     checkpointer.save(7, {"step": 7}).wait()
        >>> checkpointer.close()
        >>> stop.received.name
        'SIGTERM'
    """

    def __init__(self, signals: tuple[int, ...], agree: Callable[[bool], bool]) -> None:
        self.received: signal.Signals | None = None
        """The first signal of this process."""
        self._agree = agree
        self._previous: dict[int, Any] = {}
        for number in dict.fromkeys(signals):
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        """Return whether a signal has come; in a group, to any rank, and all ranks get the same answer."""
        return self._agree(self.received is not None)

    def close(self) -> None:
        """Restore the previous signal handlers. Idempotent."""
        for number in list(self._previous):
            self._restore(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = self.received or signal.Signals(number)
        self._restore(number)

    def _restore(self, number: int) -> None:
        # None: a handler that was not installed by Python, which cannot install it again.
        signal.signal(number, self._previous.pop(number) or signal.SIG_DFL)
