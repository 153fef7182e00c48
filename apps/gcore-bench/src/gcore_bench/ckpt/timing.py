"""Seconds of saves and loads, from a settled start."""

import ctypes
import gc
import os
import time
from collections.abc import Callable

import psutil

from gcore_bench.ckpt.contender import Contender
from gcore_bench.ckpt.files import drop_cache, sync_paths
from gcore_bench.ckpt.state import State


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def settle() -> None:
    """Let nothing of what came before fall into what is measured next.

    Freed memory goes back to the system: without that, a load after the first would find its pages made.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def save_once(contender: Contender, step: int, state: State) -> None:
    """The first save, which makes buffers and processes, and is not measured."""
    contender.save(step, state).wait()
    sync_paths(*contender.unsynced(step))


def save_seconds(
    contender: Contender, step: int, state: State, *, rank: int = 0, meet: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Seconds until the caller may go on, and until the save survives a power cut; ranks ``meet`` around it."""
    if rank == 0:
        drop_cache(contender.root)
        os.sync()
    settle()
    meet()
    start_s = time.perf_counter()
    pending = contender.save(step, state)
    stall_s = time.perf_counter() - start_s
    pending.wait()
    meet()
    if rank == 0:
        sync_paths(*contender.unsynced(step))
    return {"stall": stall_s, "durable": time.perf_counter() - start_s}


def resident_bytes() -> int:
    """Of this process; what it shares with others is shared out among them."""
    return psutil.Process().memory_full_info().pss
