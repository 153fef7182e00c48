"""Checks that plain tensors, of which one copy is saved for all ranks, are the same on all ranks that have them."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from gcore_ckpt.format.boxes import digest
from gcore_ckpt.ranks.shards import Holdings, NumpyArray
from gcore_ckpt.threads import Workers

_BLOCK_BYTES = 64 << 10
_NAMED = 5


def digest_plain(holdings: Holdings, workers: Workers) -> dict[str, str]:
    """Return a digest of each plain tensor and array that this rank holds, by name."""
    names: list[str] = []
    jobs: list[partial[str]] = []
    for box, data in zip(holdings.boxes, holdings.data, strict=True):
        if box.name not in holdings.declared:
            names.append(box.name)
            jobs.append(partial(_digest, data))
    return dict(zip(names, workers.run(jobs), strict=True))


def check_same(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise `ValueError` for tensors of which ranks have different digests."""
    first: dict[str, tuple[int, str]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, rank_digests in enumerate(digests):
        for name, value in rank_digests.items():
            first_rank, first_value = first.setdefault(name, (rank, value))
            if value != first_value:
                different.setdefault(name, (first_rank, rank))
    if not different:
        return
    examples = [
        f"{name!r} (ranks {ranks[0]} and {ranks[1]})"
        for name, ranks in list(different.items())[:_NAMED]
    ]
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    raise ValueError(
        f"plain tensors differ from rank to rank, and one copy is saved for all: {', '.join(examples)}{more}; expected "
        "the same on all ranks that have them: wrap what each rank has of its own in PerRank, broadcast what should "
        "be the same, or leave it out of the state on all ranks but one"
    )


@torch.no_grad()
def _digest(data: torch.Tensor | NumpyArray) -> str:
    if isinstance(data, np.ndarray):
        return digest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    flat = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cpu" and flat.numel() > _BLOCK_BYTES:
        flat = _sum_blocks(flat)
    return digest(flat.cpu().numpy().data)


def _sum_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Return the sums of blocks of bytes, computed on the device: far fewer bytes to copy from there."""
    size = flat.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    sums = flat[:size].view(-1, _BLOCK_BYTES).sum(1)
    return torch.cat([sums.view(torch.uint8), flat[size:]])
