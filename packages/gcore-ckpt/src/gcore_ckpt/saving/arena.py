"""Host memory that saves are staged in: page-aligned, kept from save to save, pinned for CUDA."""

import mmap

import numpy as np
import torch

PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """A block of host memory that grows when it must."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._pinned = False

    def reserve(self, size_bytes: int, *, pinned: bool) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Return at least `size_bytes` of memory; memory returned by an earlier call must no longer be in use."""
        if len(self._bytes) < size_bytes or (pinned and not self._pinned):
            self._pinned = self._pinned or pinned
            self._bytes = np.empty(0, np.uint8)  # the old memory goes before the new comes
            self._bytes = _pinned(size_bytes) if self._pinned else _huge_pages(size_bytes)
        return self._bytes


def _pinned(size_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def _huge_pages(size_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    memory = mmap.mmap(-1, max(size_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a first save faults in hundreds of pages, not hundreds of thousands
    return np.frombuffer(memory, np.uint8)


def page_aligned(offset_bytes: int) -> int:
    """Return the next multiple of a page."""
    return -(-offset_bytes // PAGE_BYTES) * PAGE_BYTES
