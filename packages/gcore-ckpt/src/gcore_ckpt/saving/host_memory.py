"""Host memory for copies of tensors, exactly as large as needed, and pinned where they come from CUDA."""

import logging
import mmap
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from gcore_ckpt.ranks.shards import NumpyArray
from gcore_ckpt.threads import Workers, cuda_state

_logger = logging.getLogger(__name__)

_MADV_WIPEONFORK = 18
"""Advice of Linux that `mmap` has no name for: a forked child gets empty pages, not a copy of each that is written."""
_TOUCHED_BYTES = 64 << 20
"""Size of what a thread faults in before it takes the next part."""


class _Pages(mmap.mmap):
    """Anonymous memory that is unregistered with CUDA, if it was registered, before it is unmapped."""

    _pinned: tuple[int, int] | None = None

    def pin(self, address: int) -> None:
        """Register it with CUDA, for copies that the host does not wait for; log a warning if that fails."""
        device = torch.cuda.current_device()
        use_device = cuda_state()

        def register() -> str:
            use_device()
            cudart: Any = torch.cuda.cudart()
            error = cudart.cudaHostRegister(address, len(self), 0)
            return f"error {int(error)}, {cudart.cudaGetErrorString(error)}" if int(error) else ""

        # CUDA keeps an error for the thread that made it, where torch would raise it at the next kernel.
        with Workers(1) as other_thread:
            [failure] = other_thread.run([register])
        if not failure:
            self._pinned = device, address
            return
        _logger.warning(
            "CUDA cannot pin %d MiB of host memory (cudaHostRegister: %s): saves copy more slowly, through memory "
            "that is not pinned; expected a limit of locked memory (ulimit -l) above that",
            len(self) >> 20,
            failure,
        )

    def __del__(self) -> None:
        # A forked child cannot use CUDA, and at exit the driver unregisters.
        if self._pinned is not None and not sys.is_finalizing() and torch.cuda.is_initialized():
            device, address = self._pinned
            cudart: Any = torch.cuda.cudart()
            with torch.cuda.device(device):
                cudart.cudaHostUnregister(address)


def allocate(size_bytes: int) -> NumpyArray:
    """Return page-aligned memory, which takes no space until it is written to."""
    return np.frombuffer(_map(size_bytes), np.uint8)


def allocate_pinned(size_bytes: int, workers: Workers) -> NumpyArray:
    """Return page-aligned memory that CUDA copies to directly; if it cannot be pinned, log a warning.

    It is unpinned and unmapped when no array or memoryview uses it any more. torch's own pinned memory is rounded up to
    a power of two, is kept for the process, and is faulted in by one thread.
    """
    pages = _map(size_bytes)
    memory = np.frombuffer(pages, np.uint8)
    workers.run(
        partial(_fault_in, memory[start : start + _TOUCHED_BYTES])
        for start in range(0, len(memory), _TOUCHED_BYTES)
    )
    pages.pin(memory.ctypes.data)
    return memory


def _map(size_bytes: int) -> _Pages:
    # Private, because few systems back shared memory by huge pages.
    pages = _Pages(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with suppress(OSError):  # a kernel that was built without it
                pages.madvise(advice)
    return pages


def _fault_in(memory: NumpyArray) -> None:
    """Write to each page, without the GIL, which `mmap.madvise` keeps while it populates pages."""
    memory[:: mmap.PAGESIZE] = 0
