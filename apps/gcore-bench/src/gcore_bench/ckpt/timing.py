"""Seconds and memory of saves, from files that are out of the page cache."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from gcore_bench.ckpt.contenders.base import Contender
from gcore_bench.ckpt.workload import State
from gcore_bench.harness.child import Spec
from gcore_bench.harness.measure import settle
from gcore_bench.harness.rounds import Figures

PIECE_BYTES = 16 << 20


def root_of(spec: Spec) -> Path:
    """Return the folder of the contender's files."""
    return Path(spec.folder) / "files"


def rows_only(rows: Mapping[str, Figures]) -> dict[str, Any]:
    """Return what a child reports that has not watched its memory."""
    return {"rows": rows, "before_bytes": None, "saving_s": None}


def measured_saves(
    name: str, contender: Contender, state: State, *, rank: int = 0, barrier: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Save twice, and return the seconds of the second save, memory before both, and when they were.

    The first save allocates buffers and starts processes. ``before_bytes`` is resident memory, where pages that
    processes share are divided among them; ``saving_s`` is on the monotonic clock, the same for all processes.
    """
    before_bytes, start_s = psutil.Process().memory_full_info().pss, time.monotonic()
    save_once(contender, 0, state)
    seconds = _save_seconds(contender, 1, state, rank=rank, barrier=barrier)
    return {"rows": {name: seconds}, "before_bytes": before_bytes, "saving_s": (start_s, time.monotonic())}


def save_once(contender: Contender, step: int, state: State) -> None:
    """Save without measuring."""
    contender.save(step, state).wait()
    sync_paths(*contender.unsynced(step))


def _save_seconds(
    contender: Contender, step: int, state: State, *, rank: int, barrier: Callable[[], object]
) -> Figures:
    """Return seconds until the state may be changed, and until the save survives a crash of the machine."""
    if rank == 0:
        drop_cache(contender.root)
        os.sync()
    settle()
    barrier()
    start_s = time.perf_counter()
    pending = contender.save(step, state)
    stall_s = time.perf_counter() - start_s
    pending.wait()
    barrier()
    if rank == 0:
        sync_paths(*contender.unsynced(step))
    return {"stall": stall_s, "durable": time.perf_counter() - start_s}


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def sync_paths(*paths: Path) -> None:
    """Sync files and folders, but not the files in the folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cache(root: Path) -> None:
    """Remove every file below ``root`` from the page cache, so that the next read comes from the disk."""
    for path in _files(root):
        sync_paths(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(root: Path) -> None:
    """Read every file below ``root`` into the page cache."""
    buffer = bytearray(PIECE_BYTES)
    for path in _files(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())
