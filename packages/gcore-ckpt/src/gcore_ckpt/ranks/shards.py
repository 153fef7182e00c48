"""The boxes of global tensors that a process holds in a state, whatever library the tensors are of.

A plain tensor is whole on every rank that has it; a `DTensor` (FSDP2, tensor parallel), Megatron's `ShardedTensor` and
the explicit `Shard` are one box of a larger tensor.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from gcore_ckpt.format.boxes import DTYPES, Box, HeldBox
from gcore_ckpt.format.tree import (
    NUMPY_SCALARS,
    Leaf,
    Node,
    State,
    StatePath,
    View,
    describe,
    encode,
    encode_numpy_scalar,
)

NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that are no subclass with a meaning of its own."""

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
WRAPPER = "__class__"
"""Key of the class of a tensor that is made of several, next to these."""
TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMPY_NAMES = {np.dtype(name): name for name, dtype in DTYPES.items() if dtype.in_numpy}


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The box of a global tensor that this process holds.

    Attributes:
        global_shape: Shape of the global tensor.
        offset: First index of the box in each dimension; its extents are those of `tensor`.
        tensor: The data of the box.
        name: Name of the global tensor, the same in all processes. None: its path in the state.

    Example:
        >>> rows = torch.arange(8.0)
        >>> first = Shard(global_shape=(8,), offset=(0,), tensor=rows[:6])
        >>> last = Shard(global_shape=(8,), offset=(6,), tensor=rows[6:])
        >>> with Checkpointer("rows") as checkpointer:  # of one rank; two ranks would save one of them each
        ...     checkpointer.save(1, {"rows": Shards([first, last])}).wait()
        >>> template = {"rows": Shard(global_shape=(8,), offset=(5,), tensor=torch.zeros(2))}
        >>> Checkpointer("rows").load(template)["rows"].tensor
        tensor([5., 6.])
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    name: str | None = None

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class Shards:
    """The boxes of one global tensor that this process holds, where they are several, or none.

    Attributes:
        parts: The boxes, without names of their own: the tensor's name is its path in the state.

    Example:
        >>> rows = torch.arange(4.0)
        >>> parts = [Shard(global_shape=(4,), offset=(i,), tensor=rows[i : i + 2]) for i in (0, 2)]
        >>> with Checkpointer("sharded") as checkpointer:
        ...     checkpointer.save(1, {"rows": Shards(parts)}).wait()
        >>> Checkpointer("sharded").load()["rows"]
        tensor([0., 1., 2., 3.])
    """

    parts: Sequence[Shard]


def as_shard(leaf: object) -> Shard | None:
    """Return the part of a global tensor that `leaf` holds; None if it is no tensor."""
    if isinstance(leaf, Shard):
        if not leaf.box.inside(leaf.global_shape):
            raise ValueError(
                f"is a Shard of shape {tuple(leaf.tensor.shape)} at {tuple(leaf.offset)}, "
                f"which is not inside the global shape {tuple(leaf.global_shape)}"
            )
        if is_dtensor(leaf.tensor):
            raise ValueError(
                "is a Shard that holds a DTensor; expected a plain tensor (the DTensor may stand alone)"
            )
        return leaf
    if isinstance(leaf, torch.Tensor):
        shape = tuple(leaf.shape)
        if not is_dtensor(leaf):
            return Shard(global_shape=shape, offset=(0,) * leaf.ndim, tensor=leaf)
        from gcore_ckpt.ranks.dtensor import local_box

        offset, local = local_box(leaf)
        return Shard(global_shape=shape, offset=offset, tensor=local)
    if is_megatron(leaf, "ShardedTensor"):
        return _shard_of_megatron(leaf)
    return None


def shards_of_fsdp1(leaf: Any) -> Shards | None:
    """Return this rank's parts of torch's `ShardedTensor`, which FSDP1's state dicts contain; else None."""
    leaf_type = type(leaf)
    if leaf_type.__name__ != "ShardedTensor" or not leaf_type.__module__.startswith(
        "torch.distributed._shard"
    ):
        return None
    global_shape = tuple(leaf.metadata().size)
    parts: list[Shard] = []
    for part in leaf.local_shards():
        offset = tuple(part.metadata.shard_offsets)
        parts.append(Shard(global_shape=global_shape, offset=offset, tensor=part.tensor))
    return Shards(parts)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether this is a `DTensor`, without importing its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return (
        type(tensor) is not torch.Tensor
        and module is not None
        and isinstance(tensor, module.DTensor)
    )


def is_wrapper(leaf: object) -> bool:
    """Return whether this is a tensor of several others, such as a quantized one of torchao."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) in PLAIN_TENSORS or leaf.is_nested:
        return False
    return hasattr(leaf, "__tensor_flatten__") and not is_dtensor(leaf)


def parts_of_wrapper(tensor: Any) -> dict[Any, State]:
    """Return the inner tensors of a wrapper by name (`__tensor_flatten__`), and the name of its class."""
    tensor_type = type(tensor)
    names, _ = tensor.__tensor_flatten__()
    parts: dict[Any, State] = {}
    for name in names:
        parts[name] = getattr(tensor, name)
    parts[WRAPPER] = f"{tensor_type.__module__}.{tensor_type.__qualname__}"
    return parts


def is_megatron(leaf: object, name: str) -> bool:
    """Return whether `leaf` is a sharded object of Megatron-Core, by its class name: nothing is imported."""
    leaf_type = type(leaf)
    return leaf_type.__name__ == name and leaf_type.__module__.startswith(
        "megatron.core.dist_checkpointing"
    )


def _shard_of_megatron(leaf: Any) -> Shard:
    if leaf.data is None:
        raise ValueError(f"is the Megatron ShardedTensor {leaf.key!r} without data")
    if leaf.flattened_range is not None:
        raise ValueError(
            f"is the Megatron ShardedTensor {leaf.key!r} with a flattened range; use a regular sharding"
        )
    local = leaf.data.view((1,) * leaf.prepend_axis_num + tuple(leaf.local_shape))
    return Shard(
        global_shape=tuple(leaf.global_shape),
        offset=tuple(leaf.global_offset),
        tensor=local,
        name=leaf.key,
    )


class Holdings(NamedTuple):
    """The part of a state that a process holds: views of the same memory are one box, `data` has each box's memory."""

    tree: Node
    boxes: tuple[HeldBox, ...]
    data: tuple[torch.Tensor | NumpyArray, ...]
    devices: frozenset[torch.device]
    """All that the tensors are on."""
    declared: frozenset[str] = frozenset()
    """Names of the tensors whose type says what each rank holds: `DTensor`, `Shard` and the like."""


def collect(state: State, rank: int = 0) -> Holdings:
    """Find what this process, `rank` of its group, holds in `state`; nothing is copied."""
    leaves = _Leaves()
    tree = encode(state, leaves.add, rank).node
    views = leaves.tie_views()
    boxes: list[HeldBox] = []
    data: list[torch.Tensor | NumpyArray] = []
    devices: set[torch.device] = set()
    for number, (box, value) in enumerate(zip(leaves.boxes, leaves.data, strict=True)):
        if number in views:
            continue
        boxes.append(box)
        data.append(value)
        if isinstance(value, torch.Tensor):
            devices.add(value.device)
    return Holdings(tree, tuple(boxes), tuple(data), frozenset(devices), frozenset(leaves.declared))


class _Leaves:
    """Collects boxes under names that are unique, unless their owner chose them; such a name no other tensor gets."""

    def __init__(self) -> None:
        self.boxes: list[HeldBox] = []
        self.data: list[torch.Tensor | NumpyArray] = []
        self.declared: set[str] = set()
        """Names of tensors that are not plain."""
        self._nodes: dict[str, list[dict[str, Any]]] = {}
        """Nodes of plain tensors, by name."""
        self._names: set[str] = set()
        self._name_of_view: dict[tuple[HeldBox, tuple[object, ...]], str] = {}
        self._chosen: set[str] = set()

    def add(self, leaf: object, path: StatePath) -> Leaf | None:
        """Encode a tensor or an array; None for anything else."""
        if type(leaf) in PLAIN_TENSORS:
            return self._add_tensor(leaf, path)
        sharded = shards_of_fsdp1(leaf)
        if sharded is not None:
            leaf = sharded
        if isinstance(leaf, np.ndarray):
            return Leaf(node={"array": self._add_array(cast("NumpyArray", leaf), path)})
        if isinstance(leaf, np.generic) and leaf.dtype.kind in NUMPY_SCALARS:
            return Leaf(node=encode_numpy_scalar(leaf))
        if is_wrapper(leaf):
            return encode(parts_of_wrapper(leaf), self.add, path=path)
        if is_megatron(leaf, "ShardedObject"):
            # A small value, under the key that it has in all processes.
            value: Any = leaf
            encoded = encode(value.data, self.add, path=(*path, "data"))
            return Leaf(node=encoded.node, key=value.unique_key)
        if isinstance(leaf, Shards):
            name = self._new_name(path)
            self.declared.add(name)
            for part in leaf.parts:
                _shard_at(part, path)
                self._add_shard(replace(part, name=name), path)
            return Leaf(node={"tensor": name})
        return self._add_tensor(leaf, path)

    def _add_tensor(self, leaf: object, path: StatePath) -> Leaf | None:
        shard = _shard_at(leaf, path)
        if shard is None:
            return None
        if shard.name is not None:
            if shard.name in self._names:
                raise ValueError(
                    f"{describe(path)} is a shard of the name {shard.name!r}, which another tensor of this state has "
                    "by its place; expected another name"
                )
            self._chosen.add(shard.name)
        name = self._add_shard(shard, path)
        node: dict[str, Any] = {"tensor": name}
        if leaf is shard.tensor:
            self._nodes.setdefault(name, []).append(node)
        else:
            self.declared.add(name)
        return Leaf(node=node, key=shard.name)

    def tie_views(self) -> set[int]:
        """Encode tensors in the memory of another, contiguous tensor as views of it; return the numbers of their boxes.

        What shares only some of its memory with others is stored by itself.
        """
        spans: list[tuple[tuple[object, ...], int, int, int]] = []
        for number, (box, data) in enumerate(zip(self.boxes, self.data, strict=True)):
            if box.name in self._nodes and box.box.size and isinstance(data, torch.Tensor):
                start = data.data_ptr()
                size_bytes = View(data.shape, data.stride(), 0).stop * data.itemsize
                memory_kind = str(data.device), box.dtype, data.is_conj(), data.is_neg()
                spans.append((memory_kind, start, start + size_bytes, number))
        # The widest first, of those that start together.
        spans.sort(key=lambda span: (span[0], span[1], -span[2]))
        views: set[int] = set()
        base: tuple[tuple[object, ...], int, int, int] = (), 0, 0, -1
        for span in spans:
            memory_kind, start, stop, number = span
            tensor = cast("torch.Tensor", self.data[number])
            if memory_kind != base[0] or stop > base[2]:
                if tensor.is_contiguous():
                    base = span
            elif (start - base[1]) % tensor.itemsize == 0:
                views.add(number)
                base_name = self.boxes[base[3]].name
                offset = (start - base[1]) // tensor.itemsize
                for node in self._nodes[self.boxes[number].name]:
                    del node["tensor"]
                    node["view"] = [base_name, [*tensor.shape], [*tensor.stride()], offset]
        return views

    def _add_shard(self, shard: Shard, path: StatePath) -> str:
        tensor = shard.tensor
        if type(tensor) not in PLAIN_TENSORS:
            expected = "expected a torch.Tensor, Parameter, DTensor or Shard"
            raise TypeError(f"{describe(path)} is a {type(tensor).__name__}; {expected}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            problem = f"layout {tensor.layout} on device {tensor.device}"
            raise TypeError(
                f"{describe(path)} has {problem}; expected a dense tensor that holds data"
            )
        dtype = _dtype_name(tensor.dtype, TORCH_NAMES, path)
        held_box = HeldBox(
            name=shard.name or "", dtype=dtype, shape=tuple(shard.global_shape), box=shard.box
        )
        memory = (
            tensor.data_ptr(),
            tensor.device,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return self._add(held_box, memory, tensor, path)

    def _add_array(self, array: NumpyArray, path: StatePath) -> str:
        if type(array) not in (np.ndarray, np.memmap):
            raise TypeError(
                f"{describe(path)} is a {type(array).__name__}; expected a plain numpy.ndarray"
            )
        dtype = _dtype_name(array.dtype, NUMPY_NAMES, path)
        held_box = HeldBox(name="", dtype=dtype, shape=array.shape, box=Box.of_shape(array.shape))
        return self._add(
            held_box, (array.__array_interface__["data"][0], array.strides), array, path
        )

    def _add(
        self,
        held_box: HeldBox,
        memory: tuple[object, ...],
        data: torch.Tensor | NumpyArray,
        path: StatePath,
    ) -> str:
        name = held_box.name
        if not name:
            view = held_box, memory
            if held_box.box.size and view in self._name_of_view:
                return self._name_of_view[view]
            name = self._name_of_view[view] = self._new_name(path)
        # A rank that holds no element of a sharded tensor says nothing of it; a tensor without elements has one holder.
        if held_box.box.size:
            self.boxes.append(held_box._replace(name=name))
            self.data.append(data)
        elif 0 in held_box.shape:
            full_box = Box.of_shape(held_box.shape)
            self.boxes.append(held_box._replace(name=name, box=full_box))
            self.data.append(data.reshape(held_box.shape))
        return name

    def _new_name(self, path: StatePath) -> str:
        # UTF-8 cannot hold the lone surrogates that a Python str may, and safetensors is UTF-8.
        plain = ".".join(map(str, path)) or "state"
        if not plain.isascii():
            plain = plain.encode("utf-8", "backslashreplace").decode()
        name = plain
        count = 1
        # {"a.b": x, "a": {"b": y}}, the name of a shard, and safetensors' own name
        while name in self._names or name in self._chosen or name == "__metadata__":
            count += 1
            name = f"{plain}#{count}"
        self._names.add(name)
        return name


def _shard_at(leaf: object, path: StatePath) -> Shard | None:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        raise TypeError(
            f"{describe(path)} is a nested tensor; expected a dense one, such as its values and offsets"
        )
    try:
        return as_shard(leaf)
    except ValueError as error:
        raise ValueError(f"{describe(path)} {error}") from None


def _dtype_name(dtype: object, names: dict[Any, str], path: StatePath) -> str:
    if dtype not in names:
        raise TypeError(
            f"{describe(path)} has dtype {dtype}; expected one of {', '.join(names.values())}"
        )
    return names[dtype]
