"""Time and peak memory of work on one device."""

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SMALLEST_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 25


class PeakMemory:
    """Highest memory since it was made, over what there was then: of the process on the CPU, of torch on CUDA.

    The kernel's own high-water mark is reset first. `getrusage` would do for a process whose start was its smallest
    moment; imports and the loading of weights are not.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before_bytes = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = _status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """Until now."""
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated() - self._before_bytes
        return max(0, _status_bytes("VmHWM") - self._before_bytes)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over calls."""

    wall_s: float
    cpu_s: float
    """Of all threads."""
    peak_bytes: int
    """Of one call, over what there was before it."""

    def figures(self) -> dict[str, float]:
        """By the names that tables use."""
        return {"step_s": self.wall_s, "cpu_s": self.cpu_s, "peak_bytes": float(self.peak_bytes)}


def measured(work: Callable[[], object], *, times: int, device: str = "cpu") -> Measured:
    """Call ``work`` once for its memory and then so often for its time; what it returns is dropped."""
    _return_blocks_from(_SMALLEST_BYTES)
    peak = PeakMemory(device)
    work()
    peak_bytes = peak.extra_bytes()
    _return_blocks_from(_LARGEST_BYTES)
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(times):
        wall_s, cpu_s = _now(device)
        work()
        end_wall_s, end_cpu_s = _now(device)
        walls.append(end_wall_s - wall_s)
        cpus.append(end_cpu_s - cpu_s)
    return Measured(wall_s=median(walls), cpu_s=median(cpus), peak_bytes=peak_bytes)


def _return_blocks_from(size_bytes: int) -> None:
    """Give freed blocks of this size back to the system at once, and keep smaller ones.

    With a low size, resident memory is memory in use. glibc's own size rises to the high one by itself.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, size_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * size_bytes)


def _now(device: str) -> tuple[float, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
