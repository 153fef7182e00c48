"""What ranks of the tests of divided weights do: they write a model that they hold in shards."""

from pathlib import Path

import torch
from memory_growth import PRIVATE, RESIDENT, growing
from rank import Rank, mesh
from torch.distributed.tensor import DTensor, Shard

from gcore_rollout import divide_weights, write_part
from gcore_rollout.weight_sync.layout import Layout

MB = 1_000_000


def write_shards(
    rank: Rank, path: str, num_tensors: int, num_rows: int, size: int
) -> tuple[Layout, int, float, float]:
    """Write tensors [ROWS, 250] of float32, sharded by rows; return the layout, its bytes, and memory in MB.

    The memory is what this rank takes beyond its shards: the peak of memory of its own, and of all that is mapped.
    """
    rows = num_rows // size
    shards = [torch.full((rows, 250), 10.0 * i + rank.number) for i in range(num_tensors)]
    whole = (DTensor.from_local(shard, mesh((size,)), [Shard(0)]) for shard in shards)
    named = ((f"w{i}", tensor.full_tensor()) for i, tensor in enumerate(whole))
    with growing(PRIVATE) as private, growing(RESIDENT) as resident:
        part = divide_weights(named, rank=rank.number, num_ranks=size)
        layout, size_bytes = write_part(part, Path(path))
    return layout, size_bytes, private[0] / MB, resident[0] / MB
