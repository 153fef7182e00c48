"""Finds what a process holds in a state: its tree, and under a name each box of a tensor or array."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.dtypes import DTYPES
from gcore_ckpt.format.tree import Leaf, Node, State, StatePath, describe, encode
from gcore_ckpt.ranks.shards import Shard, Shards
from gcore_ckpt.ranks.tensors import as_shard, is_megatron
from gcore_ckpt.saving.plan import HeldBox

NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NUMPY_NAMES = {np.dtype(name): name for name, dtype in DTYPES.items() if dtype.in_numpy}


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The part of a state that a process holds.

    Attributes:
        tree: The encoded state.
        boxes: Its boxes of tensors and arrays; views of the same memory are one box.
        data: The memory of each box, of the box's shape.
    """

    tree: Node
    boxes: tuple[HeldBox, ...]
    data: tuple[torch.Tensor | NumpyArray, ...]


def collect(state: State, rank: int = 0) -> Holdings:
    """Find what this process, `rank` of its group, holds in `state`; nothing is copied.

    Raises:
        TypeError, ValueError: The state cannot be saved, with the path of the offending leaf.
    """
    leaves = _Leaves()
    tree = encode(state, leaves.add, rank)
    return Holdings(tree=tree, boxes=tuple(leaves.boxes), data=tuple(leaves.data))


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in `DTYPES`.

    Raises:
        TypeError: It cannot be saved.
    """
    if dtype not in _TORCH_NAMES:
        raise TypeError(_dtype_message(dtype, _TORCH_NAMES.values()))
    return _TORCH_NAMES[dtype]


class _Leaves:
    """Collects boxes under names that are unique unless their owner chose them.

    A name that an owner chose is never given to a tensor that has none.
    """

    def __init__(self) -> None:
        self.boxes: list[HeldBox] = []
        self.data: list[torch.Tensor | NumpyArray] = []
        self._names: set[str] = set()
        self._name_of_view: dict[tuple[object, ...], str] = {}
        self._chosen: set[str] = set()

    def add(self, leaf: object, path: StatePath) -> Leaf | None:
        """Encode a tensor or an array; None for anything else."""
        if isinstance(leaf, np.ndarray):
            return Leaf(node={"array": self._add_array(cast("NumpyArray", leaf), path)})
        if is_megatron(leaf, "ShardedObject"):
            return self._add_megatron_object(leaf, path)
        if isinstance(leaf, Shards):
            name = self._new_name(path)
            for part in leaf.parts:
                self._add_shard(replace(_inside(part, path), name=name), path)
            return Leaf(node={"tensor": name})
        try:
            shard = as_shard(leaf)
        except ValueError as error:
            raise ValueError(f"{describe(path)} {error}") from None
        if shard is None:
            return None
        if shard.name is not None:
            if shard.name in self._names:
                raise ValueError(
                    f"{describe(path)} is a shard of the name {shard.name!r}, which another tensor of this state has "
                    "by its place; expected another name"
                )
            self._chosen.add(shard.name)
        return Leaf(node={"tensor": self._add_shard(shard, path)}, key=shard.name)

    def _add_shard(self, shard: Shard, path: StatePath) -> str:
        tensor = shard.tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{describe(path)} is a {type(tensor).__name__}; expected a torch.Tensor, Parameter, "
                            "DTensor or Shard")  # fmt: skip
        if tensor.layout is not torch.strided or tensor.is_meta:
            found = f"layout {tensor.layout} on device {tensor.device}"
            raise TypeError(f"{describe(path)} has {found}; expected a dense tensor that holds data")
        try:
            dtype = torch_dtype_name(tensor.dtype)
        except TypeError as error:
            raise TypeError(f"{describe(path)} {error}") from None
        shape = tuple(shard.global_shape)
        view: tuple[object, ...] | None = None
        if tensor.numel():
            memory = tensor.data_ptr(), tensor.device, tensor.stride(), tensor.is_conj(), tensor.is_neg()
            view = ("tensor", dtype, shape, shard.box, *memory)
        return self._add(view, HeldBox(name=shard.name or "", dtype=dtype, shape=shape, box=shard.box), tensor, path)

    def _add_array(self, array: NumpyArray, path: StatePath) -> str:
        if type(array) not in (np.ndarray, np.memmap):
            raise TypeError(f"{describe(path)} is a {type(array).__name__}; expected a plain numpy.ndarray")
        dtype = _NUMPY_NAMES.get(array.dtype)
        if dtype is None:
            raise TypeError(f"{describe(path)} {_dtype_message(array.dtype, _NUMPY_NAMES.values())}")
        view = ("array", dtype, array.shape, array.__array_interface__["data"][0], array.strides)
        box = HeldBox(name="", dtype=dtype, shape=array.shape, box=Box.whole(array.shape))
        return self._add(view if array.size else None, box, array, path)

    def _add(
        self, view: tuple[object, ...] | None, held: HeldBox, data: torch.Tensor | NumpyArray, path: StatePath
    ) -> str:
        name = held.name or self._name_of_view.get(view or (), "")
        if not name:
            name = self._new_name(path)
            if view is not None:
                self._name_of_view[view] = name
        elif not held.name:
            return name
        # A rank that holds no element of a sharded tensor says nothing of it; a tensor without elements has one holder.
        if held.box.size or not Box.whole(held.shape).size:
            box = held.box if held.box.size else Box.whole(held.shape)
            self.boxes.append(HeldBox(name=name, dtype=held.dtype, shape=held.shape, box=box))
            self.data.append(data if held.box.size else data.reshape(held.shape))
        return name

    def _add_megatron_object(self, leaf: Any, path: StatePath) -> Leaf:
        """Encode a small value of Megatron's under the key that it has in all processes."""
        return Leaf(node=encode(leaf.data, self.add, path=(*path, "data")), key=leaf.unique_key)

    def _new_name(self, path: StatePath) -> str:
        # UTF-8 cannot hold the lone surrogates that a Python str may, and safetensors is UTF-8.
        plain = ".".join(map(str, path)) or "state"
        if not plain.isascii():
            plain = plain.encode("utf-8", "backslashreplace").decode()
        name, count = plain, 1
        # {"a.b": x, "a": {"b": y}}, the name of a shard, and safetensors' own name
        while name in self._names or name in self._chosen or name == "__metadata__":
            count += 1
            name = f"{plain}#{count}"
        self._names.add(name)
        return name


def _inside(part: Shard, path: StatePath) -> Shard:
    try:
        as_shard(part)
    except ValueError as error:
        raise ValueError(f"{describe(path)} {error}") from None
    return part


def _dtype_message(dtype: object, accepted: Iterable[str]) -> str:
    return f"has dtype {dtype}; expected one of {', '.join(accepted)}"
