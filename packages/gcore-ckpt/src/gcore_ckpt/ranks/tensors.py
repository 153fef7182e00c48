"""The box of a global tensor that a tensor of any library stands for.

A plain tensor is whole on every rank that has it; a `DTensor` (FSDP2, tensor parallel), Megatron's `ShardedTensor` and
the explicit `Shard` are one box of a larger tensor.
"""

import sys
from typing import Any

import torch

from gcore_ckpt.ranks.shards import Shard


def as_shard(leaf: object) -> Shard | None:
    """Return what `leaf` holds of a global tensor; None if it is no tensor.

    Raises:
        ValueError: It cannot be a part of one: a box outside the global shape, a pending sum, no data.
    """
    if isinstance(leaf, Shard):
        if not leaf.box.inside(leaf.global_shape):
            raise ValueError(
                f"is a Shard of shape {tuple(leaf.tensor.shape)} at {tuple(leaf.offset)}, "
                f"which is not inside the global shape {tuple(leaf.global_shape)}"
            )
        if is_dtensor(leaf.tensor):
            raise ValueError("is a Shard that holds a DTensor; expected a plain tensor (the DTensor may stand alone)")
        return leaf
    if isinstance(leaf, torch.Tensor):
        if is_dtensor(leaf):
            from gcore_ckpt.ranks.dtensor import shard_of_dtensor

            return shard_of_dtensor(leaf)
        return Shard(global_shape=tuple(leaf.shape), offset=(0,) * leaf.ndim, tensor=leaf)
    if is_megatron(leaf, "ShardedTensor"):
        return _of_megatron(leaf)
    return None


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether this is a `DTensor`, without importing its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return type(tensor) is not torch.Tensor and module is not None and isinstance(tensor, module.DTensor)


def is_megatron(leaf: object, name: str) -> bool:
    """Return whether `leaf` is a sharded object of Megatron-Core, by its class name: nothing is imported."""
    kind = type(leaf)
    return kind.__name__ == name and kind.__module__.startswith("megatron.core.dist_checkpointing")


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
