"""A few threads for work that leaves the GIL alone: copying, hashing, reading and writing of large blocks."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias

Job: TypeAlias = Callable[[], object]


WAKE_UP_S = 0.2
"""Interval at which a waiting thread looks for signals."""


def wait_for(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
    """Wait until all futures are done; False after `timeout_s`.

    It wakes up in between: a signal that arrives just before a thread falls asleep is handled when it wakes up.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = WAKE_UP_S if deadline is None else min(WAKE_UP_S, max(0.0, deadline - time.monotonic()))
        if not wait(futures, left_s).not_done:
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False


class Workers:
    """Runs jobs on `count` threads, which are started by the first call.

    The threads are daemons of our own because an executor refuses work once the interpreter has started to exit, which
    is when a save that is still in flight must be able to finish.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[Job, Future[None]] | None] | None = None

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs and wait for them. Raises the error of the first that failed, after all have ended.

        If the waiting thread is interrupted, jobs that have not started are dropped, and the others end first.
        """
        futures: list[Future[None]] = []
        try:
            futures.extend(self.submit(job) for job in jobs)  # keeps those before an interruption
            wait_for(futures)
        except BaseException:
            wait_for([future for future in futures if not future.cancel()])
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def submit(self, job: Job) -> Future[None]:
        """Run one job in the background."""
        future: Future[None] = Future()
        self._started().put((job, future))
        return future

    def close(self) -> None:
        """End the threads once what was submitted is done; the next call starts them again."""
        with self._lock:
            if self._queue is not None:
                for _ in range(self._count):
                    self._queue.put(None)
            self._queue = None

    def _started(self) -> "SimpleQueue[tuple[Job, Future[None]] | None]":
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                for number in range(self._count):
                    Thread(target=_work, args=(self._queue,), name=f"{self._name}-{number}", daemon=True).start()
            return self._queue


def _work(queue: "SimpleQueue[tuple[Job, Future[None]] | None]") -> None:
    while (item := queue.get()) is not None:
        job, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future  # a thread that waits for work must not keep the last tensor alive
