"""What a process holds of a global tensor, whichever library says so.

A plain tensor is whole on every rank that has it; a `DTensor` (FSDP2, tensor parallel), Megatron's `ShardedTensor` and
the explicit `Shard` are a box of one.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]  # FSDP2 over tensor parallelism has no other mark
    _StridedShardOffsetMode,  # pyright: ignore[reportPrivateUsage]
)

from gcore_ckpt.boxes import Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The box of a global tensor that this process holds.

    Attributes:
        global_shape: Shape of the global tensor.
        offset: First index of the box in each dimension; its extents are those of `tensor`.
        tensor: The data of the box.
        name: Name of the global tensor, the same in all processes. None: its path in the state.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    name: str | None = None

    @property
    def box(self) -> Box:
        """The box that is held."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))

    def with_tensor(self, tensor: torch.Tensor) -> "Shard":
        """The same box with other data."""
        return Shard(global_shape=self.global_shape, offset=self.offset, tensor=tensor, name=self.name)


def as_shard(leaf: object) -> Shard | None:
    """What `leaf` holds of a global tensor; None if it is no tensor.

    Raises:
        ValueError: It cannot be a part of one: a box outside the global shape, a pending sum, no data.
    """
    if isinstance(leaf, Shard):
        shard = leaf
        if not shard.box.inside(shard.global_shape):
            raise ValueError(
                f"is a Shard of shape {tuple(shard.tensor.shape)} at {tuple(shard.offset)}, "
                f"which is not inside the global shape {tuple(shard.global_shape)}"
            )
        if isinstance(shard.tensor, DTensor):
            raise ValueError("is a Shard that holds a DTensor; expected a plain tensor (the DTensor may stand alone)")
        return shard
    if isinstance(leaf, DTensor):
        return _of_dtensor(leaf)
    if isinstance(leaf, torch.Tensor):
        return Shard(global_shape=tuple(leaf.shape), offset=(0,) * leaf.ndim, tensor=leaf)
    if is_megatron(leaf, "ShardedTensor"):
        return _of_megatron(leaf)
    return None


def is_megatron(leaf: object, name: str) -> bool:
    """Whether `leaf` is one of Megatron-Core's marks in a sharded state dict; told by name, so nothing is imported."""
    kind = type(leaf)
    return kind.__name__ == name and kind.__module__.startswith("megatron.core.dist_checkpointing")


@torch.no_grad()
def _of_dtensor(tensor: DTensor) -> Shard:
    local = tensor.to_local()
    box = _box_of_dtensor(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    if box.shape != tuple(local.shape):
        raise ValueError(f"is a DTensor of {tuple(local.shape)} local elements, expected {box.shape} by its placements")
    return Shard(global_shape=tuple(tensor.shape), offset=box.start, tensor=local)


@cache
def _box_of_dtensor(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"is a DTensor with placements {placements}; a pending sum cannot be saved or loaded")
    extent, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    if not start and shape:  # this rank is outside the mesh
        return Box((0,), (0,))
    strided = {placement.dim for placement in placements if isinstance(placement, _StridedShard)}
    for dim in strided:
        if not _are_adjacent(shape[dim], dim, mesh, placements):
            raise ValueError(
                f"is a DTensor of shape {shape} with placements {placements}, which gives this rank indices of "
                f"dimension {dim} that are not adjacent; expected an even sharding"
            )
    return Box(tuple(start), tuple(extent))


def _are_adjacent(size: int, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Whether this rank's indices of a dimension of `size`, sharded more than once, have no gaps between them."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    indices = list(range(size))
    for rank, num_chunks, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            _, offsets = placement.local_shard_size_and_offset(
                len(indices), num_chunks, rank, _StridedShardOffsetMode.ALL
            )
            indices = [indices[offset] for offset in cast("list[int]", offsets)]
        elif placement.is_shard(dim):
            chunk = -(-len(indices) // num_chunks)
            indices = indices[rank * chunk : (rank + 1) * chunk]
    return not indices or indices == list(range(indices[0], indices[0] + len(indices)))


def _of_megatron(leaf: Any) -> Shard:
    data = leaf.data
    if data is None:
        raise ValueError(f"is the Megatron ShardedTensor {leaf.key!r} without data")
    if leaf.flattened_range is not None:
        raise ValueError(f"is the Megatron ShardedTensor {leaf.key!r} with a flattened range; use a regular sharding")
    box_shape = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    return Shard(
        global_shape=tuple(leaf.global_shape),
        offset=tuple(leaf.global_offset),
        tensor=data.view(box_shape),
        name=leaf.key,
    )
