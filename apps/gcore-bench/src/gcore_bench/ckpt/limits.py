"""Physical limits: the same bytes copied in memory, written to one file and read from it, without any library."""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from gcore_bench.ckpt.timing import PIECE_BYTES, drop_cache, seconds_of, sync_paths, warm_cache
from gcore_bench.harness.rounds import Figures

MEMCPY, RAW_WRITE, RAW_READ = "memcpy", "raw-write", "raw-read"

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BLOCK_BYTES = 4096
"""Alignment of direct reads and writes."""
_COPIES = 3


class Arena:
    """Page-aligned memory, in huge pages where the machine has them."""

    def __init__(self, size_bytes: int, *, huge_pages: bool = True) -> None:
        self.size_bytes = size_bytes
        self.aligned_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        self._memory = mmap.mmap(-1, self.aligned_bytes)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._memory, dtype=np.uint8)

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> "Arena":
        """Return a copy of ``parts``, one after the other."""
        arena = cls(sum(part.numel() for part in parts))
        _copy(_pairs(arena, parts))
        return arena

    @classmethod
    def warm(cls, size_bytes: int) -> "Arena":
        """Return memory whose pages are allocated."""
        arena = cls(size_bytes)
        arena.array.fill(0)
        return arena


def copy_rows(parts: Sequence[torch.Tensor], *, max_threads: int) -> dict[str, Figures]:
    """Measure copies of ``parts`` into warm memory, for each number of threads; the best of a few."""
    pairs = _pairs(Arena.of(parts), parts)
    rows: dict[str, Figures] = {}
    for threads in sorted({min(2**i, max_threads) for i in range(max_threads.bit_length() + 1)}):
        with ThreadPoolExecutor(threads) as executor:
            copy_all = partial(_copy_all, executor, [pairs[i::threads] for i in range(threads)])
            seconds = min(seconds_of(copy_all) for _ in range(_COPIES))
        rows[f"{MEMCPY}, {threads} thread{'s' * (threads > 1)}"] = {"stall": seconds}
    return rows


def file_modes(root: Path, *, probe: str = "probe") -> list[tuple[str, bool]]:
    """Return the ways to access a file below ``root``, and whether each bypasses the page cache."""
    try:
        descriptor = os.open(root / probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return [("buffered", False)]
    os.close(descriptor)
    (root / probe).unlink()
    return [("buffered", False), ("direct", True)]


def write_seconds(arena: Arena, path: Path, *, direct: bool) -> float:
    """Measure how long it takes to write a new file and to sync it."""
    return seconds_of(lambda: write_file(arena, path, direct=direct))


def write_file(arena: Arena, path: Path, *, direct: bool) -> None:
    """Write the arena in pieces, bypassing the page cache if ``direct``.

    Raises:
        OSError: the file system does not support direct writes.
    """
    end = arena.aligned_bytes if direct else arena.size_bytes
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0), 0o644)
    try:
        at = 0
        while at < end:
            at += os.pwrite(descriptor, arena.array.data[at : min(at + PIECE_BYTES, end)], at)
        os.ftruncate(descriptor, arena.size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_paths(path.parent)


def read_rows(path: Path) -> dict[str, Figures]:
    """Measure reads of a whole file, cold and warm, into new and existing memory, with and without the page cache."""
    existing = Arena.warm(path.stat().st_size)
    rows: dict[str, Figures] = {}
    for mode, direct in file_modes(path.parent):
        row = f"{RAW_READ}, {mode}"
        rows |= {row: {}, f"{row}, huge": {}}
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            if direct and temperature == "warm":
                continue
            prepare(path.parent)
            rows[row][f"in_place_{temperature}"] = seconds_of(partial(_read, path, existing, direct=direct))
            for name, huge_pages in ((row, False), (f"{row}, huge", True)):
                prepare(path.parent)
                read = partial(_read_fresh, path, huge_pages=huge_pages, direct=direct)
                rows[name][f"load_{temperature}"] = seconds_of(read)
    return rows


def _read_fresh(path: Path, *, huge_pages: bool, direct: bool) -> None:
    _read(path, Arena(path.stat().st_size, huge_pages=huge_pages), direct=direct)


def _read(path: Path, arena: Arena, *, direct: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        at = 0
        while at < arena.size_bytes:
            got = os.preadv(descriptor, [arena.array.data[at : at + PIECE_BYTES]], at)
            if not got:
                raise EOFError(f"{path} ended after {at} of {arena.size_bytes} bytes")
            at += got
    finally:
        os.close(descriptor)


def _pairs(arena: Arena, parts: Sequence[torch.Tensor]) -> list[tuple[_Array, _Array]]:
    """Return target and source of each piece."""
    pairs: list[tuple[_Array, _Array]] = []
    at = 0
    for part in parts:
        for start in range(0, part.numel(), PIECE_BYTES):
            source = part[start : start + PIECE_BYTES].numpy()
            pairs.append((arena.array[at : at + source.size], source))
            at += source.size
    return pairs


def _copy_all(executor: ThreadPoolExecutor, parts: Sequence[Sequence[tuple[_Array, _Array]]]) -> None:
    for _ in executor.map(_copy, parts):
        pass


def _copy(pairs: Sequence[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)
