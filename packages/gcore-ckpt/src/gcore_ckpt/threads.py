"""Threads that no signal can tear apart: workers for large blocks, and the thread of a Checkpointer's calls.

Python raises KeyboardInterrupt, or what a signal handler raises, between any two instructions of the main thread: an
exchange with other ranks, or the accounting of memory, would stop halfway. Here the main thread only waits, and leaves
no lock taken: interrupted in `concurrent.futures.wait` or `Event.wait`, it can keep a lock that the other thread needs
in order to finish.
"""

import math
import sys
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

from gcore_ckpt.errors import CheckpointError

T = TypeVar("T")
_Queue: TypeAlias = "SimpleQueue[_Job[Any] | None]"

WAKE_UP_S = 0.2
"""Interval at which a waiting thread looks for signals."""
_POLL_S = 0.005


class Outcome(Generic[T]):
    """Holds the result or the error of another thread; it is set once, and any number of threads may wait for it."""

    def __init__(self) -> None:
        self._gate = Lock()
        self._gate.acquire()
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: T) -> None:
        self._result = result
        self._open()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._open()

    def set_by(self, function: Callable[[], T]) -> None:
        """Call a function, whose result or error is the outcome."""
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False after `timeout_s`."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._done:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            # A thread that is interrupted before the release leaves the gate shut: then the others look at `_done`.
            if self._gate.acquire(timeout=min(WAKE_UP_S, left_s)):
                self._gate.release()
        return True

    def result(self) -> T:
        """Wait, and return or raise what it was set to."""
        error = self.exception()
        if error is not None:
            raise error
        return cast(T, self._result)

    def exception(self) -> BaseException | None:
        """Wait, and return the error, if it is one."""
        self.wait()
        return self._error

    def _open(self) -> None:
        self._done = True
        self._gate.release()


class _Job(Outcome[T]):
    """Work for a thread, and its outcome."""

    def __init__(self, act: Callable[[], T]) -> None:
        super().__init__()
        self._act = [act]

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        act = self._claim()
        if act is not None:
            self.set_by(act)

    def cancel(self) -> bool:
        """Drop the work; False if it has started."""
        return self._claim() is not None

    def _claim(self) -> Callable[[], T] | None:
        try:
            return self._act.pop()  # atomic: one thread gets it
        except IndexError:
            return None


class Workers:
    """Runs jobs that leave the GIL alone on `count` threads, which are started by the first job.

    The threads are daemons of our own because an executor refuses work once the interpreter has started to exit, which
    is when a save that is still in flight must be able to finish.
    """

    def __init__(self, count: int) -> None:
        self._count = count
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
        outcomes: list[_Job[T]] = []
        try:
            outcomes.extend(self.submit(job) for job in jobs)  # keeps those before an interruption
            for outcome in outcomes:
                outcome.wait()
        except BaseException:
            for outcome in [outcome for outcome in outcomes if not outcome.cancel()]:
                outcome.wait()
            raise
        return [outcome.result() for outcome in outcomes]

    def submit(self, job: Callable[[], T]) -> _Job[T]:
        """Run one job in the background."""
        outcome = _Job(job)
        with self._lock:
            if self._queue is None:
                queue: _Queue = SimpleQueue()
                for _ in range(self._count):
                    # Thread.start would wait for an Event.
                    start_new_thread(_work, (queue,))
                self._queue = queue  # with all its threads, or not at all
            self._queue.put(outcome)
        return outcome

    def close(self) -> None:
        """End the threads once what was submitted is done; the next job starts them again."""
        with self._lock:
            if self._queue is not None:
                for _ in range(self._count):
                    self._queue.put(None)
            self._queue = None


def _work(queue: _Queue) -> None:
    while True:
        job = queue.get()
        if job is None:
            return
        job.run()
        del job  # a thread that waits for work must not keep the last tensor alive


class CheckpointCall:
    """One call of a Checkpointer."""

    def __init__(self) -> None:
        self.cancelled = False  # whether the caller was interrupted and no longer waits
        self.dropped = False  # whether the Checkpointer was closed after that, while the call waited for other ranks
        self._is_working = False

    def check(self) -> None:
        if self.cancelled:
            raise CheckpointError("the call was interrupted by a signal in its process")

    @contextmanager
    def working(self) -> Generator[None]:
        """Enclose what uses the caller's memory or changes the storage; an interrupted caller waits for its end.

        Raises:
            CheckpointError: The caller was interrupted before or meanwhile.
        """
        self._is_working = True  # before the check: a caller sets `cancelled` and then waits
        try:
            self.check()
            yield
            self.check()
        finally:
            self._is_working = False

    def wait_until_quiet(self) -> None:
        """Wait until no `working` part is running; if `cancelled`, none starts after that."""
        while self._is_working:
            time.sleep(_POLL_S)


class CheckpointCalls:
    """Runs calls one after another on a thread."""

    def __init__(self) -> None:
        self._workers = Workers(1)
        weakref.finalize(
            self, self._workers.close
        ).atexit = False  # a Checkpointer that only loads is rarely closed
        self._last: tuple[CheckpointCall, Outcome[None]] | None = None

    def start(
        self, act: Callable[[CheckpointCall], T], call: CheckpointCall | None = None
    ) -> Outcome[T]:
        """Run `act` after the calls before it."""
        call = call or CheckpointCall()
        outcome = Outcome[T]()
        use_device = cuda_state()

        def job() -> None:
            use_device()
            outcome.set_by(partial(act, call))

        self._last = (
            call,
            self._workers.submit(job),
        )  # without the result, which may be a whole model
        return outcome

    def run(self, act: Callable[[CheckpointCall], T]) -> T:
        """Return or raise what `act` does.

        If the caller is interrupted, its `working` part stops, the rest continues in the background, so that the
        exchanges with other ranks stay in step, and what interrupted the caller is raised.
        """
        call = CheckpointCall()
        try:
            return self.start(act, call).result()
        except BaseException:
            call.cancelled = True  # CPython handles no signal between the raise and this line
            call.wait_until_quiet()
            raise

    def close(self) -> bool:
        """End the thread after all calls; False if an interrupted call is still waiting for other ranks there."""
        self._workers.close()
        if self._last is None:
            return True
        call, outcome = self._last
        if not call.cancelled:
            outcome.wait()
        call.dropped = not outcome.done()
        return not call.dropped


def cuda_state() -> Callable[[], None]:
    """Return a function that gives another thread this one's current CUDA device and streams."""
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    if cuda is None or not cuda.is_initialized():
        return lambda: None
    device = cuda.current_device()
    streams = [cuda.current_stream(i) for i in range(cuda.device_count())]

    def use() -> None:
        for i, stream in enumerate(streams):
            if (
                cuda.current_stream(i) != stream
            ):  # because to set it takes memory of a device that is not used yet
                cuda.set_stream(stream)
        cuda.set_device(device)

    return use
