"""The box of a global tensor that a `DTensor` holds; imported only where there is one."""

from functools import cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, placement_types
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]  # FSDP2 over tensor parallelism has no other mark
)

from gcore_ckpt.format.boxes import Box

_offset_mode: Any = getattr(placement_types, "_StridedShardOffsetMode", None)
_ALL_OFFSETS: Any = False if _offset_mode is None else _offset_mode.ALL
"""Argument that asks for the offsets of all elements of a strided shard; torch 2.11 takes ``return_first_offset``."""


@torch.no_grad()
def local_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the first index and the data of the box of the global tensor that this rank holds."""
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    if (
        tensor.device_mesh.get_coordinate() is None
    ):  # this rank is outside the mesh, and holds nothing
        empty = (0,) * max(1, tensor.ndim)
        return empty, local.new_empty(empty)
    box = _box_of_dtensor(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    if box.shape != tuple(local.shape):
        raise ValueError(
            f"is a DTensor of {tuple(local.shape)} local elements; expected {box.shape} by its placements"
        )
    return box.start, local


@cache
def _box_of_dtensor(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Box:
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"is a DTensor with placements {placements}; a pending sum cannot be saved or loaded"
        )
    extent, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    strided = {placement.dim for placement in placements if isinstance(placement, _StridedShard)}
    for dim in strided:
        if not _are_adjacent(shape[dim], dim, mesh, placements):
            raise ValueError(
                f"is a DTensor of shape {shape} with placements {placements}, which gives this rank indices of "
                f"dimension {dim} that are not adjacent; expected an even sharding"
            )
    return Box(tuple(start), tuple(extent))


def _are_adjacent(size: int, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Return whether this rank's indices of a dimension of `size`, sharded more than once, are contiguous."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    indices = list(range(size))
    for rank, num_chunks, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            _, offsets = placement.local_shard_size_and_offset(
                len(indices), num_chunks, rank, _ALL_OFFSETS
            )
            indices = [indices[offset] for offset in cast("list[int]", offsets)]
        elif placement.is_shard(dim):
            chunk = -(-len(indices) // num_chunks)
            indices = indices[rank * chunk : (rank + 1) * chunk]
    return not indices or indices == list(range(indices[0], indices[0] + len(indices)))


def dtensor_like(template: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` placed like `template`, of this rank's `local` data."""
    assert isinstance(template, DTensor)
    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )
