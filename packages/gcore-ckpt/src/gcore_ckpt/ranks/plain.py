"""Collects states of plain tensors and arrays, the common case, in a microsecond or two for each leaf.

Whatever takes more thought (sharded tensors, memory that is shared, names that collide, values that are refused) is
left to `gcore_ckpt.ranks.shards.collect`, which returns the same for the states that are collected here.
"""

from collections.abc import Sequence
from itertools import zip_longest
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
from gcore_ckpt.ranks.shards import TORCH_DTYPES, Holdings, NumpyArray

_NAMES: dict[object, str] = {
    **{dtype: name for name, dtype in TORCH_DTYPES.items()},
    **{np.dtype(name): name for name, dtype in DTYPES.items() if dtype.in_numpy},
}
_TAGS = {torch.Tensor: "tensor", torch.nn.Parameter: "tensor", np.ndarray: "array"}
_kind_of_tensor = attrgetter("dtype", "shape", "layout", "is_meta", "is_nested")
_kind_of_array = attrgetter("dtype", "shape")


class _NotPlainError(Exception):
    """The state, or a part of it, is to be collected with more care."""


def collect_plain(state: State, rank: int = 0, known: Sequence[HeldBox] = ()) -> Holdings | None:
    """Return what `collect` returns, if the state is plain; None for any other, or one that is refused.

    Boxes that are equal to those of the last save, `known`, are the same objects, so that none is made.
    """
    names: list[str] = []
    data: list[torch.Tensor | NumpyArray] = []

    def encoded(value: State, path: str, depth: int) -> Node:
        if (tag := _TAGS.get(type(value))) is not None:
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
                return {"dict": {key: encoded(child, prefix + key, depth + 1) for key, child in fields.items()}}
            if kinds <= {str, int} and all(type(key) is int or key.isascii() for key in fields):
                items = fields.items()
                return {"items": [[_small(key), encoded(child, f"{prefix}{key}", depth + 1)] for key, child in items]}
            raise _NotPlainError
        if isinstance(value, list | tuple):
            items = enumerate(cast("Sequence[State]", value))
            nodes = [encoded(item, f"{prefix}{i}", depth + 1) for i, item in items]
            return nodes if isinstance(value, list) else {"tuple": nodes}
        if isinstance(value, PerRank):
            return {"per_rank": {str(rank): encoded(value.value, f"{prefix}rank {rank}", depth + 1)}}
        return _small(value)

    try:
        tree = encoded(state, "state", 0)
        boxes = _boxes(names, data, known)
    except (_NotPlainError, RuntimeError):  # a nested tensor has no shape
        return None
    return None if boxes is None else Holdings(tree, boxes, tuple(data))


def _small(value: State) -> Node:
    try:
        return encode(value, _encode_leaf).node
    except (TypeError, ValueError) as error:
        raise _NotPlainError from error


def _encode_leaf(leaf: object, _: StatePath) -> Leaf:
    if isinstance(leaf, np.generic) and leaf.dtype.kind in NUMPY_SCALARS:
        return Leaf(node=encode_numpy_scalar(leaf))
    raise _NotPlainError  # such as `Shards` without parts, which `encode` would take for any dataclass


def _boxes(
    names: Sequence[str], data: Sequence[torch.Tensor | NumpyArray], known: Sequence[HeldBox]
) -> tuple[HeldBox, ...] | None:
    """Return the boxes; None if a name is not unique, a type is none of ours, or two share memory."""
    if len({*names}) < len(names) or "__metadata__" in names or "" in names:
        return None
    types: dict[tuple[Any, ...], tuple[str, tuple[int, ...], Box]] = {}
    boxes: list[HeldBox] = []
    starts, sizes = list[int](), list[int]()  # of memory
    for name, value, before in zip_longest(names, data, known[: len(names)]):
        if isinstance(value, torch.Tensor):
            kind = _kind_of_tensor(value)
            starts.append(value.data_ptr())
            sizes.append(value.nbytes if value.is_contiguous() else _extent_bytes(value))
        else:
            kind = _kind_of_array(value)
            start, end = np.lib.array_utils.byte_bounds(value)
            starts.append(start)
            sizes.append(end - start if value.size else 0)
        if (found := types.get(kind)) is None:
            if kind[0] not in _NAMES or kind[2:] not in ((), (torch.strided, False, False)):
                return None
            found = types[kind] = _NAMES[kind[0]], tuple(kind[1]), Box.whole(kind[1])
        if before is not None and before.name == name and before[1:] == found:
            boxes.append(before)
        else:
            boxes.append(HeldBox(name, *found))
    return None if _overlap(np.array(starts, np.int64), np.array(sizes, np.int64)) else tuple(boxes)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _overlap(starts: NumpyArray, sizes: NumpyArray) -> bool:
    order = starts.argsort()
    starts = starts[order]
    return bool((starts[1:] < starts[:-1] + sizes[order][:-1]).any())
