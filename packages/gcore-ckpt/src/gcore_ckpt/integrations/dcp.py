"""`torch.distributed.checkpoint` on steps of this package: `save`, `async_save` and `load` write and read them.

    dcp.save(state, storage_writer=StorageWriter("checkpoints", step=10))
    dcp.load(state, storage_reader=StorageReader("checkpoints"))

Tensors are written by the ranks that DCP's plan names. Values that are no tensors must be those that a state may hold,
and the same on all ranks, as in `Checkpointer.save`: nothing is pickled to a file. A step is nested as the state was,
so that `gcore_ckpt.load` and the commands read it like any other; DCP makes strings of integer keys.
"""

import io
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.futures import Future

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import CheckpointMismatchError
from gcore_ckpt.format import tree
from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.nested import NestedState
from gcore_ckpt.format.stored import StoredTensor
from gcore_ckpt.format.tree import Node, State, StatePath
from gcore_ckpt.loading.loader import load_step
from gcore_ckpt.loading.reader import Step, StepReader, find_step, open_step
from gcore_ckpt.ranks.group import RankGroup
from gcore_ckpt.ranks.shards import TORCH_DTYPES, Shard, Shards
from gcore_ckpt.storage.local import open_storage

_Path: TypeAlias = str | os.PathLike[str]


class _NumberedSteps:
    """A step that the `checkpoint_id` of a call of DCP may name."""

    _step: Any

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise ValueError(f"checkpoint_id is {checkpoint_id!r}; expected the number of a step")
        self._step = int(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return str(checkpoint_id).isdecimal()


class StorageWriter(_NumberedSteps, storage.StorageWriter):
    """Writes what `torch.distributed.checkpoint` saves as a step, committed when `save` returns.

    Args:
        checkpoints: The folder or URL; or a `Checkpointer`, for its options, which is left open. It saves with the
            process group that DCP saves with.
        step: Number of the step. Otherwise it is the `checkpoint_id` of each call of `save`.
    """

    def __init__(self, checkpoints: _Path | Checkpointer, *, step: int | None = None) -> None:
        self._checkpoints = checkpoints
        self._step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None:
            raise ValueError(
                "step is None; expected a number, as step= or as the checkpoint_id of the save"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Save this rank's part and wait until the step is committed."""
        state = _state_of(plan, planner)
        assert self._step is not None
        if isinstance(self._checkpoints, Checkpointer):
            self._checkpoints.save(self._step, state).wait()
        else:
            with Checkpointer(self._checkpoints) as checkpointer:
                checkpointer.save(self._step, state)
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Do nothing: the step is committed."""


class StorageReader(_NumberedSteps, storage.StorageReader):
    """Reads a committed step for `torch.distributed.checkpoint`, whichever way it was saved.

    Args:
        path: The folder or URL of the checkpoints.
        step: Number of the step; `"latest"` is the highest committed one. A `checkpoint_id` of `load` replaces it.
    """

    def __init__(self, path: _Path, *, step: Step = "latest") -> None:
        self._storage = open_storage(path)
        self._step = step
        self._found: int | None = None
        self._group = RankGroup()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._found = find_step(self._storage, self._step)
        with open_step(self._storage, self._found) as reader:
            described: dict[str, Any] = {}
            paths: dict[str, StatePath] = {}
            for path, node in _leaves(reader.index.tree):
                described[_name(path)] = _describe(reader, node)
                paths[_name(path)] = path
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._group = RankGroup()
        if dist.is_available() and dist.is_initialized():
            self._group.rank = kwargs.get("rank", 0)
            self._group.size = dist.get_world_size()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same step, which a save at the same time can prevent."""
        steps = [plan.storage_data for plan in plans]
        if len(set(steps)) > 1:
            raise CheckpointMismatchError(
                f"the latest steps of {self._storage} are {steps} on the ranks; give a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with open_step(self._storage, self._found) as reader:
            nodes = {_name(path): node for path, node in _leaves(reader.index.tree)}
            values: list[ReadItem] = []
            value_nodes: list[Node] = []
            targets: list[tuple[ReadItem, torch.Tensor]] = []
            target_nodes: list[Node] = []
            parts: list[Shard] = []
            for item in plan.items:
                node = nodes[item.storage_index.fqn]
                if _is_tensor(node):
                    target = planner.resolve_tensor(item)
                    targets.append((item, target))
                    target_nodes.append(node)
                    parts.append(_part(node, reader, item, target))
                else:
                    values.append(item)
                    value_nodes.append(node)
            loaded = self._load_nodes(reader, value_nodes, None)
            for item, value in zip(values, loaded, strict=True):
                stream = io.BytesIO()
                torch.save(value, stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            self._load_nodes(reader, target_nodes, parts)
            for item, target in targets:
                planner.commit_tensor(item, target)
        return _done(None)

    def _load_nodes(
        self, reader: StepReader, nodes: list[Node], template: list[Shard] | None
    ) -> list[State]:
        """Return the values of nodes of the step's tree, with the tensors and arrays in them, or fill a template."""
        part = replace(reader, index=replace(reader.index, tree=nodes))
        return load_step(part, self._group, template)


def _state_of(plan: SavePlan, planner: SavePlanner) -> State:
    """Return what this rank saves: the parts of tensors that the plan assigns to it, and all values."""
    if not isinstance(planner, DefaultSavePlanner):
        raise TypeError(
            f"planner is a {type(planner).__qualname__}; expected a DefaultSavePlanner or a class of it"
        )
    parts: defaultdict[str, list[Shard]] = defaultdict(list)
    for item in plan.items:
        if item.tensor_data is not None:
            parts[item.index.fqn].append(_shard(item, planner))
    paths: dict[str, StatePath] = plan.planner_data or {}
    state = NestedState()
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor) or name in parts:
            value = Shards(parts[name])
        state.put(paths.get(name, (name,)), value)
    return state.state()


def _shard(item: WriteItem, planner: SavePlanner) -> Shard:
    data = item.tensor_data
    assert data is not None
    tensor = cast("torch.Tensor", planner.resolve_data(item))
    return Shard(global_shape=tuple(data.size), offset=tuple(data.chunk.offsets), tensor=tensor)


def _leaves(node: Node, path: StatePath = ()) -> Iterator[tuple[StatePath, Node]]:
    """Return the entries of a state in DCP, by path. Lists and tuples of values are one entry."""
    fields = tree.fields_of(node)
    items = _items_to_flatten(node)
    if fields is not None:
        for key, child in fields.items():
            yield from _leaves(child, (*path, str(key)))
    elif items is not None:
        for number, child in enumerate(items):
            yield from _leaves(child, (*path, number))
    else:
        yield path, node


def _items_to_flatten(node: Node) -> list[Node] | None:
    """Return the items of a list that holds tensors or dicts, itself or in its lists; None for any other node."""
    if not isinstance(node, list):
        return None
    items = cast("list[Node]", node)
    for item in items:
        if _is_tensor(item) or tree.fields_of(item) is not None or _items_to_flatten(item):
            return items
    return None


def _is_tensor(node: Node) -> bool:
    return tree.view_of(node) is not None or (tree.name_of(node) is not None and "tensor" in node)


def _name(path: StatePath) -> str:
    return ".".join(map(str, path))


def _describe(reader: StepReader, node: Node) -> TensorStorageMetadata | BytesStorageMetadata:
    if not _is_tensor(node):
        return BytesStorageMetadata()
    stored, shape = _find_stored(reader, node)
    boxes = [Box.of_shape(shape)]
    if shape == stored.shape:
        boxes = [shard.box for shard in stored.shards]
    chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(
        TensorProperties(TORCH_DTYPES[stored.dtype]), torch.Size(shape), chunks
    )


def _find_stored(reader: StepReader, node: Node) -> tuple[StoredTensor, tuple[int, ...]]:
    """Return the stored tensor that a node refers to, and the shape of the node, which may be a view."""
    name, view = tree.tensor_of(node)
    stored = reader.index.tensors[cast("str", name)]
    return stored, stored.shape_of(view)


def _part(node: Node, reader: StepReader, item: ReadItem, target: torch.Tensor) -> Shard:
    """Return the part of a tensor that an item reads, in the memory that it is read to."""
    chunk = cast("torch.Size", item.storage_index.offset)
    start = tuple(first + offset for first, offset in zip(chunk, item.storage_offsets, strict=True))
    return Shard(global_shape=_find_stored(reader, node)[1], offset=start, tensor=target.detach())


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
