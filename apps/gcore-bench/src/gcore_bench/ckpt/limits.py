"""Physical limits: the same bytes copied in memory, written to one file and read from it, without any library."""

import mmap
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from gcore_bench.harness.report import Figures

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PIECE_BYTES = 16 << 20
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


def copy_rows(parts: Sequence[torch.Tensor], *, max_threads: int) -> dict[str, Figures]:
    """Measure copies of ``parts`` into warm memory, for each number of threads; the best of a few."""
    pairs = _pairs(Arena.of(parts), parts)
    rows: dict[str, Figures] = {}
    for threads in sorted({min(2**i, max_threads) for i in range(max_threads.bit_length() + 1)}):
        shares = [pairs[i::threads] for i in range(threads)]
        with ThreadPoolExecutor(threads) as executor:
            copy = partial(executor.map, _copy, shares)
            seconds = min(seconds_of(lambda copy=copy: [*copy()]) for _ in range(_COPIES))
        rows[f"memcpy, {threads} thread{'s' * (threads > 1)}"] = {"stall": seconds}
    return rows


def write_rows(
    parts: Sequence[torch.Tensor], path: Path, *, before: Callable[[], object], after: Callable[[], object]
) -> dict[str, Figures]:
    """Measure how long it takes to write ``parts`` to a new file and to sync it, in each way; the last one is left."""
    arena = Arena.of(parts)
    rows: dict[str, Figures] = {}
    for name, flag in _file_modes(path).items():
        path.unlink(missing_ok=True)
        before()
        rows[f"raw-write, {name}"] = {"durable": seconds_of(partial(_write_file, arena, path, flag))}
        after()
    return rows


def _file_modes(path: Path) -> dict[str, int]:
    """Return the ways to access a file next to ``path``, and the flag that opens it so."""
    probe = path.with_name(f"probe-{path.name}")
    try:
        with _opened(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT):
            probe.unlink()
    except OSError:
        return {"buffered": 0}
    return {"buffered": 0, "direct": os.O_DIRECT}


def _write_file(arena: Arena, path: Path, flag: int) -> None:
    end = arena.aligned_bytes if flag else arena.size_bytes
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag) as descriptor:
        at = 0
        while at < end:
            at += os.pwrite(descriptor, arena.array.data[at : min(at + _PIECE_BYTES, end)], at)
        os.ftruncate(descriptor, arena.size_bytes)
        os.fsync(descriptor)
    sync_paths(path.parent)


def read_rows(path: Path) -> dict[str, Figures]:
    """Measure reads of a whole file, cold and warm, into new and existing memory, with and without the page cache."""
    existing = Arena(path.stat().st_size)
    existing.array.fill(0)
    rows: dict[str, Figures] = {}
    for (mode, flag), (temperature, prepare) in product(_file_modes(path).items(), TEMPERATURES.items()):
        if flag and temperature == "warm":
            continue
        fresh, huge = (partial(Arena, existing.size_bytes, huge_pages=huge_pages) for huge_pages in (False, True))
        for pages, way, make in (("", "in_place", lambda: existing), ("", "load", fresh), (", huge", "load", huge)):
            prepare(path.parent)
            seconds = seconds_of(partial(_read, path, make, flag))
            rows.setdefault(f"raw-read, {mode}{pages}", {})[f"{way}_{temperature}"] = seconds
    return rows


def _read(path: Path, make: Callable[[], Arena], flag: int) -> None:
    arena = make()
    with _opened(path, os.O_RDONLY | flag) as descriptor:
        at = 0
        while at < arena.size_bytes:
            got = os.preadv(descriptor, [arena.array.data[at : at + _PIECE_BYTES]], at)
            if not got:
                raise EOFError(f"{path} ended after {at} of {arena.size_bytes} bytes")
            at += got


@contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pairs(arena: Arena, parts: Sequence[torch.Tensor]) -> list[tuple[_Array, _Array]]:
    """Return target and source of each piece."""
    sources = [piece.numpy() for part in parts for piece in part.split(_PIECE_BYTES)]
    ends = np.cumsum([source.size for source in sources])
    return list(zip(np.split(arena.array[: ends[-1]], ends[:-1]), sources, strict=True))


def _copy(pairs: Sequence[tuple[_Array, _Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def sync_paths(*paths: Path) -> None:
    """Sync files and folders, but not the files in the folders."""
    for path in paths:
        with _opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)


def drop_cache(root: Path) -> None:
    """Remove every file below ``root`` from the page cache, so that the next read comes from the disk."""
    for path in _files(root):
        with _opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def warm_cache(root: Path) -> None:
    """Read every file below ``root`` into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for path in _files(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


TEMPERATURES = {"cold": drop_cache, "warm": warm_cache}
"""Calls that prepare the files below a folder for a cold or a warm read."""
