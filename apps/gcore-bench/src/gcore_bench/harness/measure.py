"""Time and peak memory of work on one device."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SMALLEST_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 25
_COPIES = 3


def settle() -> None:
    """Collect garbage and give freed memory back to the system, so that later work has to allocate its pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _peak_bytes(work: Callable[[], object], device: str) -> int:
    """Return the peak memory of a call, less the memory in use before: of the process on the CPU, of torch on CUDA."""
    settle()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before_bytes
    # The kernel's mark is reset; `getrusage` cannot be: it would count imports and the loading of weights.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    work()
    return max(0, status_bytes("VmHWM") - before_bytes)


def status_bytes(name: str) -> int:
    """Return a size of this process from ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def measured(work: Callable[[], object], *, times: int, device: str = "cpu") -> dict[str, float]:
    """Call ``work`` once for its memory and then ``times`` times for its time; its results are dropped.

    Returns:
        Medians of ``step_s`` and of ``cpu_s``, which is the sum over all threads; ``peak_bytes`` of one call, less the
        memory in use before it.
    """
    _return_blocks_from(_SMALLEST_BYTES)
    peak_bytes = _peak_bytes(work, device)
    _return_blocks_from(_LARGEST_BYTES)
    seconds: list[tuple[float, float]] = []
    for _ in range(times):
        start_s, start_cpu_s = _now(device)
        work()
        end_s, end_cpu_s = _now(device)
        seconds.append((end_s - start_s, end_cpu_s - start_cpu_s))
    step_s, cpu_s = map(median, zip(*seconds, strict=True))
    return {"step_s": step_s, "cpu_s": cpu_s, "peak_bytes": float(peak_bytes)}


def copy_seconds(targets: Sequence[Array], sources: Sequence[Array], *, threads: int) -> float:
    """Return the seconds in which threads copy all sources to their targets, the best of a few times."""

    def copy() -> float:
        start_s = time.perf_counter()
        list(pool.map(np.copyto, targets, sources))
        return time.perf_counter() - start_s

    with ThreadPoolExecutor(threads) as pool:
        return min(copy() for _ in range(_COPIES))


def _return_blocks_from(size_bytes: int) -> None:
    """Let malloc return freed blocks of this size to the system at once, and keep smaller ones."""
    # With a low size, resident memory is memory in use. glibc raises its own threshold to the high one over time.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, size_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * size_bytes)


def _now(device: str) -> tuple[float, float]:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
