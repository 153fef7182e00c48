"""What ranks of the tests of divided weights do: they write a model that they hold in shards."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from rank import Rank, mesh
from torch.distributed.tensor import DTensor, Shard

from gcore_rollout import divide_weights, write_part
from gcore_rollout.weight_sync.layout import Layout

MB = 1_000_000
_M_MMAP_THRESHOLD = -3


def write_shards(rank: Rank, path: str, num_tensors: int, num_rows: int, size: int) -> tuple[Layout, int, float, float]:
    """Write tensors [ROWS, 250] of float32, sharded by rows; return the layout, its bytes, and memory in MB.

    The memory is what this rank takes beyond its shards: the peak of memory of its own, and of all that is mapped.
    """
    # What is freed goes back to the system at once.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    rows = num_rows // size
    shards = [torch.full((rows, 250), 10.0 * i + rank.number) for i in range(num_tensors)]
    whole = (DTensor.from_local(shard, mesh((size,)), [Shard(0)]) for shard in shards)
    named = ((f"w{i}", tensor.full_tensor()) for i, tensor in enumerate(whole))
    before, peaks, is_over = _memory_mb(), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            peaks[:] = map(max, peaks, _memory_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        part = divide_weights(named, rank=rank.number, num_ranks=size)
        layout, size_bytes = write_part(_noting(part, peaks), Path(path))
    finally:
        is_over.set()
        watcher.join()
    private, resident = (peak - start for peak, start in zip(peaks, before, strict=True))
    return layout, size_bytes, private, resident


def _noting(weights: Iterator[tuple[str, torch.Tensor]], peaks: list[float]) -> Iterator[tuple[str, torch.Tensor]]:
    """Measure while each tensor is there."""
    for name, tensor in weights:
        peaks[:] = map(max, peaks, _memory_mb())
        yield name, tensor


def _memory_mb() -> tuple[float, float]:
    """Memory of this process alone, and all that it has mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, resident = (int(lines[name].split()[0]) * 1024 / MB for name in ("RssAnon", "VmRSS"))
    return anonymous, resident
