"""Collects states of plain tensors and arrays, the common case, in a microsecond or two for each leaf.

Whatever takes more thought (sharded tensors, memory that is shared, names that collide, values that are refused) is
left to `gcore_ckpt.ranks.shards.collect`, which returns the same for the states that are collected here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch

from gcore_ckpt.format.boxes import DTYPES, Box, HeldBox
from gcore_ckpt.format.tree import (
    MAX_DEPTH,
    NUMPY_SCALARS,
    Leaf,
    Node,
    PerRank,
    State,
    StatePath,
    encode,
    encode_numpy_scalar,
)
from gcore_ckpt.ranks.shards import NUMPY_NAMES, TORCH_NAMES, Holdings, NumpyArray

_NAMES: dict[object, str] = {**TORCH_NAMES, **NUMPY_NAMES}
_TAGS = {torch.Tensor: "tensor", torch.nn.Parameter: "tensor", np.ndarray: "array"}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_kind_of_tensor = attrgetter("dtype", "shape", "device")
_kind_of_array = attrgetter("dtype", "shape")
_new: Callable[[tuple[Any, ...]], HeldBox] = partial(
    tuple.__new__, HeldBox
)  # in half the time of HeldBox(...)


class _NotPlainError(Exception):
    """The state, or a part of it, is to be collected with more care."""


def collect_plain(
    state: State, rank: int = 0, last_boxes: Sequence[HeldBox] = ()
) -> Holdings | None:
    """Return what `collect` returns, if the state is plain; None for any other, or one that is refused.

    Boxes that are equal to those of the last save, `last_boxes`, are the same objects, so that none is made.
    """
    names: list[str] = []
    data: list[torch.Tensor | NumpyArray] = []

    def encode_value(value: State, path: str, depth: int) -> Node:
        tag = _TAGS.get(type(value))
        if tag is not None:
            names.append(path)
            data.append(value)
            return {tag: path}
        prefix = f"{path}." if depth else ""
        if depth == MAX_DEPTH:
            raise _NotPlainError
        if isinstance(value, dict):
            fields = cast("dict[Any, State]", value)
            kinds = {*map(type, fields)}
            if kinds <= {str}:
                if not "".join(fields).isascii():
                    raise _NotPlainError
                if {*map(type, fields.values())} <= _TENSORS:
                    paths = [prefix + key for key in fields] if depth else [*fields]
                    names.extend(paths)
                    data.extend(fields.values())
                    return {
                        "dict": {
                            key: {"tensor": name} for key, name in zip(fields, paths, strict=True)
                        }
                    }
                return {
                    "dict": {
                        key: encode_value(child, prefix + key, depth + 1)
                        for key, child in fields.items()
                    }
                }
            if kinds <= {str, int} and all(type(key) is int or key.isascii() for key in fields):
                items = fields.items()
                return {
                    "items": [
                        [_small(key), encode_value(child, f"{prefix}{key}", depth + 1)]
                        for key, child in items
                    ]
                }
            raise _NotPlainError
        if isinstance(value, list | tuple):
            items = enumerate(cast("Sequence[State]", value))
            nodes = [encode_value(item, f"{prefix}{i}", depth + 1) for i, item in items]
            return nodes if isinstance(value, list) else {"tuple": nodes}
        if isinstance(value, PerRank):
            return {
                "per_rank": {
                    str(rank): encode_value(value.value, f"{prefix}rank {rank}", depth + 1)
                }
            }
        return _small(value)

    try:
        tree = encode_value(state, "state", 0)
        return _holdings(tree, names, data, last_boxes)
    except (_NotPlainError, RuntimeError):  # a nested tensor has no shape, a sparse one no address
        return None


def _small(value: State) -> Node:
    try:
        return encode(value, _encode_leaf).node
    except (TypeError, ValueError) as error:
        raise _NotPlainError from error


def _encode_leaf(leaf: object, _: StatePath) -> Leaf:
    if isinstance(leaf, np.generic) and leaf.dtype.kind in NUMPY_SCALARS:
        return Leaf(node=encode_numpy_scalar(leaf))
    raise _NotPlainError  # such as `Shards` without parts, which `encode` would take for any dataclass


def _holdings(
    tree: Node,
    names: Sequence[str],
    data: Sequence[torch.Tensor | NumpyArray],
    last_boxes: Sequence[HeldBox],
) -> Holdings | None:
    """Return the holdings; None if a name is not unique, a type is none of ours, or two share memory."""
    if len({*names}) < len(names) or "__metadata__" in names or "" in names:
        return None
    layouts = [
        _kind_of_tensor(value) if type(value) in _TENSORS else _kind_of_array(value)
        for value in data
    ]
    types: dict[tuple[Any, ...], tuple[str, tuple[int, ...], Box]] = {}
    devices: set[torch.device] = set()
    for layout in {*layouts}:
        dtype, shape, *on = layout
        if dtype not in _NAMES or any(device.type == "meta" for device in on):
            return None
        types[layout] = _NAMES[dtype], tuple(shape), Box.of_shape(shape)
        devices.update(on)
    sizes = {
        layout: box.size * DTYPES[dtype].size_bytes for layout, (dtype, _, box) in types.items()
    }
    if _overlap(data, [sizes[layout] for layout in layouts]):
        return None
    fields = [(name, *types[layout]) for name, layout in zip(names, layouts, strict=True)]
    boxes = (*map(_reuse_or_new, last_boxes, fields), *map(_new, fields[len(last_boxes) :]))
    return Holdings(tree, boxes, tuple(data), frozenset(devices))


def _reuse_or_new(last_box: HeldBox, fields: tuple[Any, ...]) -> HeldBox:
    return last_box if last_box == fields else _new(fields)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the last."""
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize


def _overlap(data: Sequence[torch.Tensor | NumpyArray], sizes: Sequence[int]) -> bool:
    """Return whether two of them, of these sizes where they are contiguous, share memory."""
    starts: list[int] = []
    extents: list[int] = []
    for value, size_bytes in zip(data, sizes, strict=True):
        if isinstance(value, torch.Tensor):
            starts.append(value.data_ptr())
            extents.append(size_bytes if value.is_contiguous() else _extent_bytes(value))
        else:
            start, end = np.lib.array_utils.byte_bounds(value)
            starts.append(start)
            extents.append(end - start if value.size else 0)
    order = np.argsort(starts)
    ordered = np.array(starts, np.int64)[order]
    return bool((ordered[1:] < ordered[:-1] + np.array(extents, np.int64)[order][:-1]).any())
