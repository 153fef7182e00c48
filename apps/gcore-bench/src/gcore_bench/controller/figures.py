"""Figures of control processes: their steps and memory; and the speed of this machine's memory."""

import os
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from statistics import median
from typing import Any

import numpy as np

from gcore_bench.harness.measure import status_bytes
from gcore_bench.harness.report import Figures

_INTERVAL_S = 0.005
_COPIES = 3
MOST_COPIED_BYTES = 512 << 20
"""Larger copies have the same rate."""

WARMUP_STEPS = 2
"""Steps of every contender in every round that are not measured; buffers, connections and pages are made in them."""


@dataclass(frozen=True, kw_only=True)
class ControlFigures:
    """Figures of one control process: start and end of each step on the machine's clock, and memory."""

    steps: list[tuple[float, float]]
    idle_bytes: int
    peak_bytes: int


def step_row(processes: Sequence[ControlFigures]) -> Figures:
    """Return the figures of a contender; a step lasts from the first process that starts it to the last that ends it.

    The warm-up steps are left out, but not their memory.
    """
    steps = zip(*(process.steps[WARMUP_STEPS:] for process in processes), strict=True)
    seconds = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    return {
        "step_s": median(seconds),
        "idle_bytes": float(max(process.idle_bytes for process in processes)),
        "peak_bytes": float(max(process.peak_bytes for process in processes)),
    }


def anonymous_bytes() -> int:
    """Return this process's own resident memory (RssAnon), which excludes mapped pages of Ray's object store."""
    return status_bytes("RssAnon")


class Peak:
    """The highest memory so far."""

    def __init__(self) -> None:
        self.nbytes = anonymous_bytes()


@contextmanager
def anonymous_peak() -> Generator[Peak]:
    """Sample the memory of this process every few milliseconds."""
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
    """Measure a copy of ``nbytes`` into shared memory whose pages exist, with the best number of threads."""
    size = min(nbytes, MOST_COPIED_BYTES)
    cores = os.cpu_count() or 1
    shared = SharedMemory(create=True, size=size)
    try:
        target: Any = np.ndarray(size, np.uint8, shared.buf)
        target[:] = 0
        source = np.ones(size, np.uint8)
        seconds = min(_copy_seconds(target, source, threads) for threads in {1, cores} for _ in range(_COPIES))
        # Shared memory with a view cannot be closed.
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
