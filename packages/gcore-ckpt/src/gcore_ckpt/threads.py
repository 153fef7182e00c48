"""Threads that no signal can tear apart: workers for large blocks, the thread of a Checkpointer's calls, save handles.

Python raises KeyboardInterrupt, or what a signal handler raises, between any two instructions of the main thread: an
exchange with other ranks, or the accounting of memory, would stop halfway. Here the main thread only waits.
"""

import math
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Self, TypeAlias, TypeVar

from gcore_ckpt.errors import CheckpointError

T = TypeVar("T")
_Queue: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"

WAKE_UP_S = 0.2
"""Interval at which a waiting thread looks for signals."""


def wait_for(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
    """Wait until all futures are done; False after `timeout_s`.

    It wakes up in between: a signal that arrives just before a thread falls asleep is handled when it wakes up.
    """
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while wait(futures, max(0.0, min(WAKE_UP_S, end_s - time.monotonic()))).not_done:
        if time.monotonic() >= end_s:
            return False
    return True


class Workers:
    """Runs jobs that leave the GIL alone on `count` threads, which are started by the first job.

    The threads are daemons of our own because an executor refuses work once the interpreter has started to exit, which
    is when a save that is still in flight must be able to finish.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = Lock()
        self._queue: _Queue | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Iterable[Callable[[], T]]) -> list[T]:
        """Return what all jobs return. Raises the error of the first that failed, after all have ended.

        If the waiting thread is interrupted, jobs that have not started are dropped, and the others end first.
        """
        futures: list[Future[T]] = []
        try:
            futures.extend(self.submit(job) for job in jobs)  # keeps those before an interruption
            wait_for(futures)
        except BaseException:
            wait_for([future for future in futures if not future.cancel()])
            raise
        return [future.result() for future in futures]

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run one job in the background."""
        future: Future[T] = Future()
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                for number in range(self._count):
                    Thread(target=_work, args=(self._queue,), name=f"{self._name}-{number}", daemon=True).start()
            self._queue.put((job, future))
        return future

    def close(self) -> None:
        """End the threads once what was submitted is done; the next job starts them again."""
        with self._lock:
            if self._queue is not None:
                for _ in range(self._count):
                    self._queue.put(None)
            self._queue = None


def _work(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        job, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del item, job, future  # a thread that waits for work must not keep the last tensor alive


class Call:
    """One call of a Checkpointer."""

    def __init__(self) -> None:
        self.cancelled = False  # whether the caller was interrupted and no longer waits
        self.dropped = False  # whether the Checkpointer was closed after that, while the call waited for other ranks
        self._quiet = Event()
        self._quiet.set()

    def check(self) -> None:
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
    """Runs calls one after another on a thread, each while its caller waits."""

    def __init__(self) -> None:
        self._workers = Workers(1, "gcore-ckpt-call")
        weakref.finalize(self, self._workers.close).atexit = False  # a Checkpointer that only loads is rarely closed
        self._last: tuple[Call, Future[None]] | None = None

    def run(self, act: Callable[[Call], T]) -> T:
        """Return or raise what `act` does.

        If the caller is interrupted, its `working` part stops, the rest continues in the background, so that the
        exchanges with other ranks stay in step, and what interrupted the caller is raised.
        """
        call, results, use_device = Call(), list[T](), _cuda_state()

        def job() -> None:
            use_device()
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


def _cuda_state() -> Callable[[], None]:
    """Return a function that gives another thread this one's current CUDA device and streams."""
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    if cuda is None or not cuda.is_initialized():
        return lambda: None
    device, streams = cuda.current_device(), [cuda.current_stream(i) for i in range(cuda.device_count())]

    def use() -> None:
        for stream in streams:
            cuda.set_stream(stream)
        cuda.set_device(device)

    return use


class SaveHandle:
    """A save, of `step`, that is being written in the background."""

    def __init__(self, step: int, future: Future[None]) -> None:
        self.step = step
        self.abandoned = False  # whether `save` was interrupted or refused, so that its caller has no handle
        self._future = future
        self._collected = False

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the step is committed; what retention deletes after that, `Checkpointer.wait` waits for.

        Raises:
            CheckpointWriteError: The save failed. The `Checkpointer` will not raise this error again.
            TimeoutError: It is still being written after `timeout_s` seconds.
        """
        self.join(timeout_s)
        self._collected = True
        self._future.result()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the save has ended, well or not."""
        if not wait_for([self._future], timeout_s):
            raise TimeoutError(f"step {self.step} is still being written after {timeout_s} s")

    def uncollected_error(self) -> BaseException | None:
        """Return the error of a save that has ended and that no call has waited for."""
        if self._collected or self.abandoned or not self._future.done():
            return None
        return self._future.exception()
