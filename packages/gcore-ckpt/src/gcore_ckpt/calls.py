"""Runs the calls of a Checkpointer on a thread of its own, so that no signal can tear one apart.

Python raises KeyboardInterrupt, or what a signal handler raises, between any two instructions of the main thread: an
exchange with other ranks, or the accounting of memory, would stop halfway. Here the thread that calls only waits.
"""

import sys
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

from gcore_ckpt.errors import CheckpointError
from gcore_ckpt.workers import WAKE_UP_S, Workers, wait_for

T = TypeVar("T")


class Call:
    """One call.

    Attributes:
        cancelled: Whether the caller was interrupted and no longer waits.
        dropped: Whether the Checkpointer was closed after that, while the call was waiting for other ranks.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.dropped = False
        self._quiet = Event()
        self._quiet.set()

    def check(self) -> None:
        """Raise `CheckpointError` if the caller was interrupted."""
        if self.cancelled:
            raise CheckpointError("the call was interrupted by a signal in its process")

    @contextmanager
    def working(self) -> Generator[None]:
        """Enclose what uses the caller's memory or changes the storage; an interrupted caller waits for its end.

        Raises:
            CheckpointError: The caller was interrupted before or meanwhile.
        """
        self._quiet.clear()  # before the check: a caller sets `cancelled` and then waits
        try:
            self.check()
            yield
            self.check()
        finally:
            self._quiet.set()

    def wait_until_quiet(self) -> None:
        """Wait until no `working` part is running; if `cancelled`, none starts after that."""
        while not self._quiet.wait(WAKE_UP_S):
            pass


class Calls:
    """Runs calls one after another, each while its caller waits."""

    def __init__(self) -> None:
        self._workers = Workers(1, "gcore-ckpt-call")
        weakref.finalize(self, self._workers.close).atexit = False  # a Checkpointer that only loads is rarely closed
        self._last: tuple[Call, Future[None]] | None = None

    def run(self, act: Callable[[Call], T]) -> T:
        """Return or raise what `act` does.

        If the caller is interrupted, its `working` part stops, the rest continues in the background, so that the
        exchanges with other ranks stay in step, and what interrupted the caller is raised.
        """
        call, results, device = Call(), list[T](), _CudaState.of_this_thread()

        def job() -> None:
            if device is not None:
                device.use()
            results.append(act(call))

        try:
            future = self._workers.submit(job)
            self._last = call, future
            wait_for([future])
            future.result()
            return results[0]
        except BaseException:
            call.cancelled = True  # CPython handles no signal between the raise and this line
            call.wait_until_quiet()
            raise

    def close(self) -> bool:
        """End the thread; False if an interrupted call is still waiting for other ranks there."""
        self._workers.close()
        if self._last is None:
            return True
        call, future = self._last
        call.dropped = not future.done()
        return not call.dropped


@dataclass(frozen=True)
class _CudaState:
    """The current CUDA device and streams, which are a thread's own."""

    device: int
    streams: tuple[Any, ...]

    @classmethod
    def of_this_thread(cls) -> "_CudaState | None":
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        if cuda is None or not cuda.is_initialized():
            return None
        return cls(cuda.current_device(), tuple(cuda.current_stream(i) for i in range(cuda.device_count())))

    def use(self) -> None:
        cuda = sys.modules["torch"].cuda
        for stream in self.streams:
            cuda.set_stream(stream)
        cuda.set_device(self.device)
