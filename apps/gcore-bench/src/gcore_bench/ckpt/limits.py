"""Physical limits: the same bytes copied in memory, written to one file and read from it, without any library."""

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from gcore_bench.harness.measure import Array, copy_seconds
from gcore_bench.harness.report import Figures

_PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 4096
"""Alignment of direct reads and writes."""


def _memory(size_bytes: int, *, huge_pages: bool = True) -> Array:
    """Return page-aligned memory of whole blocks, in huge pages where the machine has them."""
    memory = mmap.mmap(-1, -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _filled(parts: Sequence[torch.Tensor]) -> tuple[Array, int]:
    """Return memory with a copy of ``parts``, one after the other, and their size."""
    size_bytes = sum(part.numel() for part in parts)
    memory = _memory(size_bytes)
    np.concatenate([part.numpy() for part in parts], out=memory[:size_bytes])
    return memory, size_bytes


def copy_rows(parts: Sequence[torch.Tensor], *, max_threads: int) -> dict[str, Figures]:
    """Measure copies of ``parts`` into warm memory, for each number of threads; the best of a few."""
    memory, size_bytes = _filled(parts)
    sources = [piece.numpy() for part in parts for piece in part.split(_PIECE_BYTES)]
    targets = np.split(memory[:size_bytes], np.cumsum([source.size for source in sources])[:-1])
    counts = sorted({min(2**i, max_threads) for i in range(max_threads.bit_length() + 1)})
    return {
        f"memcpy, {threads} thread{'s' * (threads > 1)}": {"stall": copy_seconds(targets, sources, threads=threads)}
        for threads in counts
    }


def write_rows(
    parts: Sequence[torch.Tensor], path: Path, *, before: Callable[[], object], after: Callable[[], object]
) -> dict[str, Figures]:
    """Measure how long it takes to write ``parts`` to a new file and to sync it, in each way; the last one is left."""
    memory, size_bytes = _filled(parts)
    rows: dict[str, Figures] = {}
    for name, flag in _file_modes(path).items():
        path.unlink(missing_ok=True)
        before()
        rows[f"raw-write, {name}"] = {"durable": seconds_of(partial(_write_file, memory, size_bytes, path, flag))}
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


def _write_file(memory: Array, size_bytes: int, path: Path, flag: int) -> None:
    end = memory.size if flag else size_bytes
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag) as descriptor:
        at = 0
        while at < end:
            at += os.pwrite(descriptor, memory.data[at : min(at + _PIECE_BYTES, end)], at)
        os.ftruncate(descriptor, size_bytes)
        os.fsync(descriptor)
    sync_paths(path.parent)


def read_rows(path: Path) -> dict[str, Figures]:
    """Measure reads of a whole file, cold and warm, into new and existing memory, with and without the page cache."""
    size_bytes = path.stat().st_size
    existing = _memory(size_bytes)
    existing.fill(0)
    fresh, huge = (partial(_memory, size_bytes, huge_pages=huge_pages) for huge_pages in (False, True))
    ways = (("", "in_place", lambda: existing), ("", "load", fresh), (", huge", "load", huge))
    rows: dict[str, Figures] = defaultdict(dict)
    for (mode, flag), (temperature, prepare) in product(_file_modes(path).items(), TEMPERATURES.items()):
        if flag and temperature == "warm":
            continue
        for pages, way, make in ways:
            prepare(path.parent)
            seconds = seconds_of(partial(_read, path, size_bytes, make, flag))
            rows[f"raw-read, {mode}{pages}"][f"{way}_{temperature}"] = seconds
    return rows


def _read(path: Path, size_bytes: int, make: Callable[[], Array], flag: int) -> None:
    memory, at = make(), 0
    with _opened(path, os.O_RDONLY | flag) as descriptor:
        while at < size_bytes:
            got = os.preadv(descriptor, [memory.data[at : at + _PIECE_BYTES]], at)
            if not got:
                raise EOFError(f"{path} ended after {at} of {size_bytes} bytes")
            at += got


@contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
