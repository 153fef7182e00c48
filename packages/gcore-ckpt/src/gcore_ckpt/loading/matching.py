"""Matches a tree that was saved with a template, or makes a fresh state of it: what is to be read, and to where."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from gcore_ckpt.errors import CheckpointMismatchError
from gcore_ckpt.format import tree, validation
from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.stored import StoredTensor
from gcore_ckpt.format.tree import ArrayKind, Node, PerRank, State, StatePath, View, describe
from gcore_ckpt.loading.reader import StepReader
from gcore_ckpt.ranks.group import RankGroup, exchange
from gcore_ckpt.ranks.shards import (
    PLAIN_TENSORS,
    TORCH_DTYPES,
    WRAPPER,
    NumpyArray,
    Shard,
    Shards,
    as_shard,
    is_dtensor,
    is_megatron,
    is_wrapper,
    parts_of_wrapper,
    shards_of_fsdp1,
)
from gcore_ckpt.stateful import ObjectState, fill_template, like_sequence
from gcore_ckpt.storage.local import LocalFiles

_NAMED = 5


class ReadRequest(NamedTuple):
    """A box of a stored tensor, and memory of its shape, of any dtype, device and strides, to put it in."""

    name: str
    box: Box
    target: torch.Tensor


def find_held_elsewhere(group: RankGroup, template: State) -> list[str]:
    """Return the paths at which one rank's template has an empty dict and another rank's has content (all ranks)."""
    if group.size == 1:
        return []

    def merge(paths: list[list[str]]) -> list[list[str]]:
        return [sorted(set().union(*paths))] * len(paths)

    empty_here: list[str] = []
    filled_here: set[str] = set()

    def find_empty_dicts() -> list[str]:
        for path, value in _parts(template, ()):
            if isinstance(value, dict) and not value:
                empty_here.append(describe(path))
            else:
                filled_here.add(describe(path))
        return empty_here

    empty = exchange(group, find_empty_dicts, merge)
    if not empty:
        return []
    return exchange(group, lambda: sorted(filled_here.intersection(empty)), merge)


def _parts(template: State, path: StatePath) -> Iterator[tuple[StatePath, State]]:
    """Yield the parts of a template with their paths, without its plain tensors."""
    yield path, template
    fields: Mapping[Any, State] = {}
    if isinstance(template, dict):
        fields = cast("dict[str | int, State]", template)
    elif isinstance(template, list | tuple):
        fields = dict(enumerate(cast("Sequence[State]", template)))
    elif is_dataclass(template) and not isinstance(template, type):
        fields = tree.fields_of_dataclass(template)
    for key, value in fields.items():
        if type(value) not in PLAIN_TENSORS:
            yield from _parts(value, (*path, key))


class Matcher:
    """Builds the state of one open step on one rank, and collects the reads that fill its tensors.

    Args:
        reader: The open step.
        group: The ranks that load it.
        device: Where new tensors are made.
        mmap: Whether new tensors are views of files, where they can be.
        held_elsewhere: Empty dicts of the template that another rank's has more in, from `find_held_elsewhere`.
    """

    def __init__(
        self,
        reader: StepReader,
        group: RankGroup,
        device: torch.device,
        *,
        mmap: bool,
        held_elsewhere: Collection[str],
    ) -> None:
        self.requests: list[ReadRequest] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Targets and sources of copies, to be made after all requests."""
        self._reader = reader
        self._group = group
        self._device = device
        self._mmap = mmap
        self._held_elsewhere = held_elsewhere
        self._unfilled: list[CheckpointMismatchError] = []
        self._fresh: dict[tuple[ArrayKind, str], object] = {}
        self._filled: list[torch.Tensor] = []
        self._missing: list[tuple[StatePath, tuple[object, ...] | None]] = []
        self.unused: list[StatePath] = []
        """Paths that were saved and that the template does not name; the outermost where it names nothing of a part."""

    def missing(self) -> list[StatePath]:
        """Return the paths of the template that were not saved, and so not filled."""
        if not self._missing:
            return []
        filled = {*map(_memory, self._filled)}
        return [path for path, memory in self._missing if memory not in filled]

    def check_strict(self) -> None:
        """Raise `CheckpointMismatchError` if part of the template was not saved, or no rank would fill it."""
        if self._unfilled:
            raise self._unfilled[0]
        missing = list(map(describe, self.missing()))
        if missing:
            more = ""
            if len(missing) > _NAMED:
                more = f" and {len(missing) - _NAMED} more"
            raise CheckpointMismatchError(
                f"{self._reader.where} does not hold {', '.join(missing[:_NAMED])}{more}"
            )

    def decode_node(self, node: Node) -> State:
        """Return a part of the state as it was saved; leaves that shared memory are one and the same object."""
        return self._reader.decode_tree(node, self._new, self._own)

    def _own(self, nodes: Mapping[str, Node]) -> Node:
        if len(nodes) != self._group.size or str(self._group.rank) not in nodes:
            raise CheckpointMismatchError(
                f"{self._reader.where} holds values that each of {len(nodes)} ranks has of its own, and "
                f"{self._group.size} load it; say what they get in the template (PerRank(..., otherwise=...)), "
                "leave them out of it, or name the rest in only="
            )
        return nodes[str(self._group.rank)]

    def _new(
        self, array_kind: ArrayKind, name: str, stored: StoredTensor, view: View | None
    ) -> object:
        if view is not None:
            return view_in(cast("torch.Tensor", self._new("tensor", name, stored, None)), view)
        if (array_kind, name) not in self._fresh:
            tensor: torch.Tensor | None = None
            if self._mmap:
                tensor = self._map_file(stored)
            if tensor is None:
                device: torch.device | str = self._device
                if array_kind == "array":
                    device = "cpu"
                tensor = _empty(stored, device)
                if tensor.numel():
                    box = Box.of_shape(stored.shape)
                    self.requests.append(ReadRequest(name, box, tensor))
            if array_kind == "array":
                self._fresh[array_kind, name] = _as_array(tensor, stored)
            else:
                self._fresh[array_kind, name] = tensor
        return self._fresh[array_kind, name]

    def _map_file(self, stored: StoredTensor) -> torch.Tensor | None:
        """Return the tensor in its file, where it lies whole in one; written to, it becomes memory of its own."""
        files = self._reader.files
        if not isinstance(files, LocalFiles):
            raise ValueError(
                f"mmap is on and {self._reader.where} is no local folder; expected one, or mmap off"
            )
        if len(stored.shards) != 1 or not stored.size_bytes:
            return None
        [shard] = stored.shards
        data = files.map(shard.file, shard.offset_bytes, stored.size_bytes)
        if data is None:
            return None
        tensor = torch.from_numpy(data).view(TORCH_DTYPES[stored.dtype])
        return tensor.view(stored.shape).to(self._device)

    def match(self, template: State, node: Node | None, path: StatePath) -> State:
        """Return the counterpart of a part of the template; `node` is what was saved in its place, or None."""
        match template:
            case dict():
                return self._match_dict(cast("dict[str | int, State]", template), node, path)
            case list() | tuple():
                return self._match_sequence(cast("Sequence[State]", template), node, path)
            case ObjectState():
                return self.match(fill_template(template.state, node), node, path)
            case Enum():
                try:
                    return type(template)(self.decode_node(node))
                except ValueError as error:
                    problem = f"holds no {type(template).__name__} in the checkpoint: {error}"
                    raise self._mismatch(path, problem) from None
            case PerRank():
                return self._match_per_rank(template, node, path)
            case Shards():
                for part in template.parts:
                    self._match_leaf(part, node, path)
                return template
            case _:
                sharded = shards_of_fsdp1(template)
                if sharded is not None:
                    self.match(sharded, node, path)
                    return template
                return self._match_leaf(template, node, path)

    def _match_sequence(
        self, template: Sequence[State], node: Node | None, path: StatePath
    ) -> State:
        nodes = tree.items_of(node)
        if nodes is None or len(nodes) != len(template):
            stored = _kind(node)
            if nodes is not None:
                stored = f"one of {len(nodes)} items"
            problem = f"is a sequence of {len(template)} items in the template, {stored} in the checkpoint"
            raise self._mismatch(path, problem)
        matched: list[State] = []
        for i, (item, child) in enumerate(zip(template, nodes, strict=True)):
            matched.append(self.match(item, child, (*path, i)))
        return like_sequence(template, matched)

    def _match_per_rank(self, template: PerRank, node: Node | None, path: StatePath) -> State:
        nodes = tree.ranks_of(node)
        if nodes is None:
            raise self._mismatch(path, "is PerRank in the template and was not saved as such")
        if template.otherwise is None or len(nodes) == self._group.size:
            return self.match(template.value, self._own(nodes), path)
        if callable(template.otherwise):
            return template.otherwise(self._group.rank, self._group.size)
        return self.match(template.value, nodes.get("0"), path)

    def _match_dict(
        self, template: dict[Any, State], node: Node | None, path: StatePath
    ) -> dict[Any, State]:
        fields = tree.fields_of(node)
        if fields is None and (template or node is not None):
            raise self._mismatch(
                path, f"is a dict in the template, {_kind(node)} in the checkpoint"
            )
        fields = fields or {}
        if not template and not self._stays_empty(fields, node, path):
            return self.decode_node(node or {"dict": {}})
        state: dict[Any, State] = {}
        used: set[str | int | None] = set()
        for key, value in template.items():
            stored_key = key
            if is_megatron(value, "ShardedObject"):
                stored_key = value.unique_key
            child = fields.get(stored_key)
            used |= {stored_key, _own_name(value)}
            if child is None and stored_key not in fields and _own_name(value) is None:
                self._miss(value, (*path, key))
                state[key] = value
            else:
                state[key] = self.match(value, child, (*path, key))
        self.unused += [(*path, key) for key in fields if key not in used]
        return state

    def _stays_empty(
        self, fields: Mapping[str | int, Node], node: Node | None, path: StatePath
    ) -> bool:
        """Return whether an empty dict of the template stays empty, because sharded tensors were saved in its place.

        It is an error, see `check_strict`, unless another rank's template names what is there.
        """
        if self._group.size == 1:
            return False
        is_sharded = False
        for name in tree.references(node):
            tensor = self._reader.index.tensors.get(name)
            if tensor is not None and len(tensor.shards) > 1:
                is_sharded = True
        if not is_sharded:
            return False
        if describe(path) not in self._held_elsewhere:
            problem = (
                f"is an empty dict in the template, and holds sharded tensors under {len(fields)} keys in the "
                "checkpoint; expected the sharded tensors to fill (for an optimizer before its first step, "
                "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict makes them), or None, for which "
                "each rank loads all of them; strict=False leaves it empty"
            )
            self._unfilled.append(self._mismatch(path, problem))
        return True

    def _match_dataclass(self, template: State, node: Node | None, path: StatePath) -> State:
        """Return a dataclass with the fields that were saved, by the template's class; no `__init__` runs."""
        result = copy(template)
        for name, value in self._match_dict(tree.fields_of_dataclass(template), node, path).items():
            object.__setattr__(result, name, value)
        return result

    def _match_wrapper(self, template: Any, node: Node | None, path: StatePath) -> State:
        """Fill the tensors that a tensor is made of."""
        parts = parts_of_wrapper(template)
        matched = self._match_dict(parts, node, path)
        class_name = parts.pop(WRAPPER)
        if matched.pop(WRAPPER) != class_name:
            raise self._mismatch(
                path, f"is a {class_name} in the template, something else in the checkpoint"
            )
        if all(matched[name] is part for name, part in parts.items()):
            return template
        return type(template).__tensor_unflatten__(
            matched, template.__tensor_flatten__()[1], template.shape, template.stride()
        )

    def _miss(self, template: State, path: StatePath) -> None:
        """Record a missing path. `missing` leaves it out if it shares memory with a filled tensor (tied weights)."""
        if isinstance(template, dict) and template:
            for key, value in cast("dict[str | int, State]", template).items():
                self._miss(value, (*path, key))
        else:
            self._missing.append((path, _memory_of(template)))

    def _match_leaf(self, template: State, node: Node | None, path: StatePath) -> State:
        if is_megatron(template, "ShardedObject"):
            return self.decode_node(node)
        if is_wrapper(template):
            return self._match_wrapper(template, node, path)
        try:
            shard = as_shard(template)
            if isinstance(template, np.ndarray):
                shard = _shard_of_array(template)
        except ValueError as error:
            raise self._mismatch(path, str(error)) from None
        if shard is None and is_dataclass(template) and not isinstance(template, type):
            return self._match_dataclass(template, node, path)
        if shard is None:
            return self.decode_node(node)
        with validation.reading(f"{self._reader.where}/index.json: tree"):
            name, view = tree.tensor_of(node)
        if shard.name is not None:
            name = shard.name
        result = template
        if shard.tensor.is_meta:
            shard = replace(shard, tensor=torch.empty_like(shard.tensor, device=self._device))
            result = _materialise(template, shard)
        self._request(name, node, view, shard, path)
        self._filled.append(shard.tensor)
        return result

    def _request(
        self, name: str | None, node: Node, view: View | None, shard: Shard, path: StatePath
    ) -> None:
        stored: StoredTensor | None = None
        if name is not None:
            stored = self._reader.index.tensors.get(name)
        if stored is None or name is None:
            raise self._mismatch(
                path, f"is a tensor in the template, no tensor in the checkpoint (name {name!r})"
            )
        stored_shape = stored.shape_of(view)
        shape = tuple(shard.global_shape)
        if stored_shape != shape:
            raise self._mismatch(
                path, f"has shape {shape} in the template, {stored_shape} in the checkpoint"
            )
        target = shard.tensor
        dtype = TORCH_DTYPES[stored.dtype]
        if dtype != target.dtype and not torch.can_cast(dtype, target.dtype):
            problem = f"has dtype {target.dtype} in the template, to which torch converts no {stored.dtype}"
            raise self._mismatch(path, problem)
        box = shard.box
        if not box.size:
            return
        if view is None:
            self.requests.append(ReadRequest(name, box, target))
        else:
            # What was saved is a view: read the tensor that owns the memory, then copy the slice.
            self.copies.append((target, self.decode_node(node)[box.slices()]))

    def _mismatch(self, path: StatePath, problem: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(f"{self._reader.where}: {describe(path)} {problem}")


def _empty(stored: StoredTensor, device: torch.device | str) -> torch.Tensor:
    if stored.dtype != "complex32":
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], device=device)
    data = torch.empty(
        stored.size_bytes, dtype=torch.uint8, device=device
    )  # torch would warn of complex32
    return data.view(torch.complex32).view(stored.shape)


def view_in(base: torch.Tensor, view: View) -> torch.Tensor:
    """Return a view of a contiguous tensor's memory."""
    return base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)


def _shard_of_array(array: NumpyArray) -> Shard:
    if not array.flags.writeable:
        raise ValueError("is a read-only array; expected one that can be filled")
    return Shard(global_shape=array.shape, offset=(0,) * array.ndim, tensor=torch.from_numpy(array))


def _own_name(template: State) -> str | None:
    if isinstance(template, Shard):
        return template.name
    if is_megatron(template, "ShardedTensor"):
        return template.key
    return None


def _memory_of(template: State) -> tuple[object, ...] | None:
    """Return the memory of a tensor of a template; None for what has none or several."""
    if not isinstance(template, torch.Tensor) or shards_of_fsdp1(template) is not None:
        return None
    if template.is_meta or is_wrapper(template):
        return None
    shard = as_shard(template)
    assert shard is not None
    return _memory(shard.tensor)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride()


def _materialise(template: State, shard: Shard) -> State:
    """Return what stands for a template of meta tensors once it has data."""
    if isinstance(template, torch.Tensor) and is_dtensor(template):
        from gcore_ckpt.ranks.dtensor import dtensor_like

        return dtensor_like(template, shard.tensor)
    if isinstance(template, Shard):
        return shard
    return shard.tensor


def _as_array(tensor: torch.Tensor, stored: StoredTensor) -> object:
    flat: np.ndarray[Any, np.dtype[Any]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(stored.dtype).reshape(stored.shape)


def _kind(node: Node | None) -> str:
    if node is None:
        return "missing"
    if isinstance(node, dict):
        return next(iter(node))
    return type(node).__name__


def prune_tree(node: Node, only: Sequence[str], where: str) -> Node:
    """Return the parts of a tree under dotted paths of dict keys, or under those that match a pattern."""

    def prune(node: Node, path: str, patterns: Sequence[str]) -> list[Node]:
        """Return the pruned node in a list, or an empty list if no pattern matches in it."""
        if any(
            path == name or path.startswith(f"{name}.") or fnmatchcase(path, name)
            for name in patterns
        ):
            return [node]
        fields = tree.fields_of(node) or {}
        items: list[Node] = []
        for key, child in fields.items():
            pruned = prune(child, f"{path}.{key}".lstrip("."), patterns)
            if pruned:
                items.append([key, pruned[0]])
        if not items:
            return []
        return [{"items": items}]

    unknown = [name for name in only if not prune(node, "", [name])]
    if unknown:
        names = [*map(str, tree.fields_of(node) or {})]
        if len(names) > 8:
            names[8:] = ["..."]
        raise CheckpointMismatchError(
            f"{where} holds nothing under {', '.join(map(repr, unknown))}; it holds {', '.join(names)}"
        )
    for pruned in prune(node, "", only):
        return pruned
    return {"dict": {}}
