"""The memory of one process, and the speed of this machine's."""

import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

_INTERVAL_S = 0.005
_COPIES = 3
MOST_COPIED_BYTES = 512 << 20
"""A copy of more is as fast."""


def anonymous_bytes() -> int:
    """Resident memory of this process that is its own (RssAnon), that of Ray's object store not among it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


class Peak:
    """The most that was seen."""

    def __init__(self) -> None:
        self.nbytes = anonymous_bytes()


@contextmanager
def anonymous_peak() -> Generator[Peak]:
    """Look every few milliseconds at how large this process is."""
    peak = Peak()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_INTERVAL_S):
            peak.nbytes = max(peak.nbytes, anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def copy_seconds(nbytes: int) -> float:
    """Seconds to copy ``nbytes`` into shared memory whose pages are there, with the best number of threads."""
    size = min(nbytes, MOST_COPIED_BYTES)
    cores = os.cpu_count() or 1
    shared = SharedMemory(create=True, size=size)
    try:
        target: Any = np.ndarray(size, np.uint8, shared.buf)
        target[:] = 0
        source = np.ones(size, np.uint8)
        seconds = min(_copy_seconds(target, source, threads) for threads in {1, cores} for _ in range(_COPIES))
        # A memory that is looked at cannot be closed.
        del target
    finally:
        shared.close()
        shared.unlink()
    return seconds * nbytes / size


def _copy_seconds(target: Any, source: Any, threads: int) -> float:
    pairs = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        start_s = time.perf_counter()
        for work in [pool.submit(partial(np.copyto, *pair)) for pair in pairs]:
            work.result()
        return time.perf_counter() - start_s
