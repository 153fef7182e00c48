"""How much memory processes take for a piece of work, by real measurement."""

import ctypes
import gc
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

PRIVATE, SHARED, RESIDENT = "RssAnon", "RssShmem", "VmRSS"
"""Lines of /proc/PID/status: memory of a process alone, shared memory that it maps, and both with mapped files."""
_M_MMAP_THRESHOLD = -3


@contextmanager
def growing(*lines: str, pids: Sequence[int] | None = None) -> Generator[list[int]]:
    """Yield by how many bytes the sum of these lines was above its present value in each process, at most, so far.

    None: in this one, whose C library returns what is freed to the system meanwhile.
    """
    measured = pids or [os.getpid()]

    def taken() -> list[int]:
        statuses = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in measured]
        found = [dict(line.split(":", 1) for line in status) for status in statuses]
        return [sum(int(status[line].split()[0]) for line in lines) * 1024 for status in found]

    libc = ctypes.CDLL(None)
    if pids is None:
        # Freed memory that the C library kept would be taken again without growth.
        gc.collect()
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)
    before, growth, is_over = taken(), [0] * len(measured), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            growth[:] = [
                max(most, now - then)
                for most, now, then in zip(growth, taken(), before, strict=True)
            ]

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        is_over.set()
        watcher.join()
        if pids is None:
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
