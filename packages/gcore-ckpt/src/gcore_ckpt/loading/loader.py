"""Turns an open step into a state: a fresh one, or a template whose memory is filled, from any saved sharding."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from gcore_ckpt.errors import CheckpointMismatchError
from gcore_ckpt.format import tree
from gcore_ckpt.format.boxes import DTYPES, SMALL_BYTES, Box
from gcore_ckpt.format.index import StoredShard, StoredTensor
from gcore_ckpt.format.tree import ArrayKind, Node, PerRank, State, StatePath, describe
from gcore_ckpt.loading.reader import NamedShard, StepReader, pieces, runs
from gcore_ckpt.ranks.group import Group
from gcore_ckpt.ranks.shards import TORCH_DTYPES, NumpyArray, Shard, Shards, as_shard, is_dtensor, is_megatron
from gcore_ckpt.storage.local import LocalFiles
from gcore_ckpt.threads import Workers

_NAMED = 5
_THREADS = 8
_SCRATCH_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20

_SizedRead: TypeAlias = tuple[int, Callable[[], None]]  # the bytes that a call reads, and the call


def load_step(
    reader: StepReader,
    group: Group,
    template: State,
    *,
    only: Sequence[str] | None,
    device: str | torch.device,
    mmap: bool,
    check: Callable[[], None] = lambda: None,
) -> State:
    """Load from an open step, as `Checkpointer.load` says; `check` is called before each read and may raise."""
    loader = _Loader(reader, group, torch.device(device), mmap=mmap)
    if template is None:
        state = loader.decoded(reader.index.tree if only is None else _pruned(reader.index.tree, only, reader.where))
    else:
        state = loader.match(template, reader.index.tree, ())
        loader.check_missing()
    with Workers(_THREADS) as workers:
        fill(reader, loader.requests, workers, check)
    return state


class _Loader:
    """Makes a state of one open step, as one rank of a group, and collects what its tensors are to be filled with."""

    def __init__(self, reader: StepReader, group: Group, device: torch.device, *, mmap: bool) -> None:
        self.requests: list[Request] = []
        self._reader = reader
        self._group = group
        self._device = device
        self._mmap = mmap
        self._fresh: dict[tuple[ArrayKind, str], object] = {}
        self._filled: set[tuple[object, ...]] = set()
        self._missing: list[tuple[str, tuple[object, ...] | None]] = []

    def check_missing(self) -> None:
        """Raise `CheckpointMismatchError` if the template has what was not saved; nothing was filled."""
        missing = [path for path, memory in self._missing if memory not in self._filled]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise CheckpointMismatchError(f"{self._reader.where} does not hold {', '.join(missing[:_NAMED])}{more}")

    def decoded(self, node: Node) -> State:
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

    def _new(self, kind: ArrayKind, name: str, stored: StoredTensor) -> object:
        if (kind, name) not in self._fresh:
            tensor = self._mapped(stored) if self._mmap else None
            if tensor is None:
                device = self._device if kind == "tensor" else "cpu"
                data = torch.empty(stored.size_bytes, dtype=torch.uint8, device=device)
                tensor = data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)
                if stored.size_bytes:
                    self.requests.append(Request(name, Box.whole(stored.shape), tensor))
            self._fresh[kind, name] = tensor if kind == "tensor" else _as_array(tensor, stored)
        return self._fresh[kind, name]

    def _mapped(self, stored: StoredTensor) -> torch.Tensor | None:
        """Return the tensor in its file, where it lies whole in one; written to, it becomes memory of its own."""
        files = self._reader.files
        if not isinstance(files, LocalFiles):
            raise ValueError(f"mmap is on and {self._reader.where} is no local folder; expected one, or mmap off")
        if len(stored.shards) != 1 or not stored.size_bytes:
            return None
        [shard] = stored.shards
        data = files.map(shard.file, shard.offset_bytes, stored.size_bytes)
        if data is None:
            return None
        return torch.from_numpy(data).view(TORCH_DTYPES[stored.dtype]).view(stored.shape).to(self._device)

    def match(self, template: State, node: Node | None, path: StatePath) -> State:
        """Return the counterpart of a part of the template; `node` is what was saved in its place, or None."""
        match template:
            case dict():
                return self._match_dict(cast("dict[str | int, State]", template), node, path)
            case list() | tuple():
                items = cast("Sequence[State]", template)
                nodes = tree.items_of(node)
                if nodes is None or len(nodes) != len(items):
                    stored = _kind(node) if nodes is None else f"one of {len(nodes)} items"
                    problem = f"is a sequence of {len(items)} items in the template, {stored} in the checkpoint"
                    raise self._mismatch(path, problem)
                found = [self.match(item, n, (*path, i)) for i, (item, n) in enumerate(zip(items, nodes, strict=True))]
                return found if isinstance(template, list) else tuple(found)
            case PerRank():
                nodes = tree.ranks_of(node)
                if nodes is None:
                    raise self._mismatch(path, "is PerRank in the template and was not saved as such")
                if template.otherwise is None or len(nodes) == self._group.size:
                    return self.match(template.value, self._own(nodes), path)
                if callable(template.otherwise):
                    return template.otherwise(self._group.rank, self._group.size)
                return self.match(template.value, nodes.get("0"), path)
            case Shards():
                for part in template.parts:
                    self._match_leaf(part, node, path)
                return template
            case _:
                return self._match_leaf(template, node, path)

    def _match_dict(self, template: dict[str | int, State], node: Node | None, path: StatePath) -> State:
        fields = tree.fields_of(node)
        if fields is None and template:
            raise self._mismatch(path, f"is a dict in the template, {_kind(node)} in the checkpoint")
        state: dict[str | int, State] = {}
        for key, value in template.items():
            stored_key = value.unique_key if is_megatron(value, "ShardedObject") else key
            child = (fields or {}).get(stored_key)
            if child is None and stored_key not in (fields or {}) and _own_name(value) is None:
                self._miss(value, (*path, key))
                state[key] = value
            else:
                state[key] = self.match(value, child, (*path, key))
        return state

    def _miss(self, template: State, path: StatePath) -> None:
        """Note what is missing; a tensor that shares its memory with one that is not (tied weights) is not missed."""
        if isinstance(template, dict) and template:
            for key, value in cast("dict[str | int, State]", template).items():
                self._miss(value, (*path, key))
        else:
            is_tensor = isinstance(template, torch.Tensor) and not template.is_meta
            shard = as_shard(template) if is_tensor else None
            self._missing.append((describe(path), None if shard is None else _memory(shard.tensor)))

    def _match_leaf(self, template: State, node: Node | None, path: StatePath) -> State:
        if is_megatron(template, "ShardedObject"):
            return self.decoded(node)
        try:
            shard = _shard_of_array(template) if isinstance(template, np.ndarray) else as_shard(template)
        except ValueError as error:
            raise self._mismatch(path, str(error)) from None
        if shard is None:
            return self.decoded(node)
        name = shard.name if shard.name is not None else tree.name_of(node)
        result = template
        if shard.tensor.is_meta:
            shard = replace(shard, tensor=torch.empty_like(shard.tensor, device=self._device))
            result = _materialised(template, shard)
        self._request(name, shard.box, tuple(shard.global_shape), shard.tensor, path)
        self._filled.add(_memory(shard.tensor))
        return result

    def _request(
        self, name: str | None, box: Box, shape: tuple[int, ...], target: torch.Tensor, path: StatePath
    ) -> None:
        stored = None if name is None else self._reader.index.tensors.get(name)
        if stored is None or name is None:
            raise self._mismatch(path, f"is a tensor in the template, no tensor in the checkpoint (name {name!r})")
        if stored.shape != shape:
            raise self._mismatch(path, f"has shape {shape} in the template, {stored.shape} in the checkpoint")
        dtype = TORCH_DTYPES[stored.dtype]
        if dtype != target.dtype and not torch.can_cast(dtype, target.dtype):
            found = f"has dtype {target.dtype} in the template, to which torch converts no {stored.dtype}"
            raise self._mismatch(path, found)
        if box.size:
            self.requests.append(Request(name, box, target))

    def _mismatch(self, path: StatePath, problem: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(f"{self._reader.where}: {describe(path)} {problem}")


def _shard_of_array(array: NumpyArray) -> Shard:
    if not array.flags.writeable:
        raise ValueError("is a read-only array; expected one that can be filled")
    return Shard(global_shape=array.shape, offset=(0,) * array.ndim, tensor=torch.from_numpy(array))


def _own_name(template: State) -> str | None:
    if isinstance(template, Shard):
        return template.name
    return template.key if is_megatron(template, "ShardedTensor") else None


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride()


def _materialised(template: State, shard: Shard) -> State:
    """Return what stands for a template of meta tensors once it has data."""
    if isinstance(template, torch.Tensor) and is_dtensor(template):
        from gcore_ckpt.ranks.dtensor import dtensor_like

        return dtensor_like(template, shard.tensor)
    return shard if isinstance(template, Shard) else shard.tensor


def _as_array(tensor: torch.Tensor, stored: StoredTensor) -> object:
    flat: np.ndarray[Any, np.dtype[Any]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(stored.dtype).reshape(stored.shape)


def _kind(node: Node | None) -> str:
    return "missing" if node is None else next(iter(node)) if isinstance(node, dict) else type(node).__name__


def _pruned(node: Node, only: Sequence[str], where: str) -> Node:
    """Return the parts of a tree under dotted paths of dict keys, or under those that match a pattern."""

    def prune(node: Node, path: str, wanted: Sequence[str]) -> list[Node]:
        """Return what is left of a node, in a list; nothing if none of it is wanted."""
        if any(path == name or path.startswith(f"{name}.") or fnmatchcase(path, name) for name in wanted):
            return [node]
        fields = tree.fields_of(node) or {}
        kept = [[key, n] for key, child in fields.items() for n in prune(child, f"{path}.{key}".lstrip("."), wanted)]
        return [{"items": kept}] if kept else []

    pruned = prune(node, "", only)
    unknown = [name for name in only if not prune(node, "", [name])]
    if unknown:
        names = [str(key) for key in tree.fields_of(node) or {}]
        raise CheckpointMismatchError(
            f"{where} holds nothing under {', '.join(map(repr, unknown))}; it holds {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}"
        )
    return pruned[0] if pruned else {"dict": {}}


class Request(NamedTuple):
    """A box of a stored tensor, and memory of its shape, of any dtype, device and strides, to put it in."""

    name: str
    box: Box
    target: torch.Tensor


def fill(
    reader: StepReader, requests: Sequence[Request], workers: Workers, check: Callable[[], None] = lambda: None
) -> None:
    """Fill every request, reading only the blocks that hold something of it."""
    small: dict[torch.dtype, list[NamedShard]] = {}
    others: list[Request] = []
    for request in requests:
        if (shard := _small_shard(reader, request)) is None:
            others.append(request)
        else:
            small.setdefault(request.target.dtype, []).append(NamedShard(request.name, shard, request.target))
    joint = (_joint_read(reader, run) for shards in small.values() for run in runs(shards))
    workers.run(_batches(chain(joint, (read for request in others for read in _reads(reader, request))), check))


def _small_shard(reader: StepReader, request: Request) -> StoredShard | None:
    """Return the one small shard that a request is for, if it is to be copied as it is; None for any other request."""
    dtype, _, shards = reader.index.tensors[request.name]
    shard, target = shards[0], request.target
    if len(shards) != 1 or shard.size_bytes >= SMALL_BYTES or shard.box != request.box:
        return None
    if not target.is_cpu or target.dtype != TORCH_DTYPES[dtype] or type(target) not in (torch.Tensor, torch.nn.Parameter):
        return None
    is_plain = not (target.is_conj() or target.is_neg() or target.is_inference())
    return shard if is_plain else None


def _joint_read(reader: StepReader, run: Sequence[NamedShard]) -> _SizedRead:
    size_bytes = sum(item.shard.size_bytes for item in run)
    return size_bytes, partial(_read_run, reader, run, size_bytes)


@torch.no_grad()
def _read_run(reader: StepReader, run: Sequence[NamedShard], size_bytes: int) -> None:
    """Read small shards of one type that are adjacent in a file, and copy them to their tensors by one call."""
    buffer = np.empty(size_bytes, np.uint8)
    reader.read_run(run, buffer.data)
    targets = [item.target for item in run]
    torch._foreach_copy_(targets, _unflatten_dense_tensors(torch.from_numpy(buffer).view(targets[0].dtype), targets))


def read_box(reader: StepReader, name: str, box: Box, workers: Workers, dtype: str | None = None) -> torch.Tensor:
    """Return the bytes of a box of a stored tensor, as elements of `dtype` or else of its own type."""
    dtype = dtype or reader.index.tensors[name].dtype
    data = torch.empty(box.size * DTYPES[dtype].size_bytes, dtype=torch.uint8)
    if box.size:
        fill(reader, [Request(name, box, data.view(TORCH_DTYPES[dtype]).view(box.shape))], workers)
    return data


def _batches(reads: Iterable[_SizedRead], check: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Group small reads: passing one to a thread costs as much as reading a few kilobytes."""
    batch: list[Callable[[], None]] = []
    size_bytes = 0
    for read_bytes, read in reads:
        batch.append(read)
        size_bytes += read_bytes
        if size_bytes >= _BATCH_BYTES:
            yield partial(_run_all, batch, check)
            batch, size_bytes = [], 0
    yield partial(_run_all, batch, check)


def _run_all(reads: Sequence[Callable[[], None]], check: Callable[[], None]) -> None:
    for read in reads:
        check()
        read()


def _reads(reader: StepReader, request: Request) -> Iterator[_SizedRead]:
    tensor = reader.index.tensors[request.name]
    for shard in tensor.shards:
        common = shard.box.intersect(request.box)
        if common is None:
            continue
        inside = common.relative_to(shard.box)
        with torch.no_grad():
            target = request.target.detach()[common.relative_to(request.box).slices()]
        as_stored = target.dtype == TORCH_DTYPES[tensor.dtype] and target.device.type == "cpu"
        as_stored = as_stored and target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if as_stored and inside.is_flat_in(shard.box.shape):
            # Not reshape(-1): a dimension of one element may have any stride, which torch views as no other type.
            memory = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
            yield from _flat_reads(reader, request.name, shard, inside, memory)
            continue
        for part in inside.split(_SCRATCH_BYTES // tensor.itemsize):
            piece = target[part.relative_to(inside).slices()]
            yield part.size * tensor.itemsize, partial(_read_strided, reader, request.name, shard, part, piece)


def _flat_reads(
    reader: StepReader, name: str, shard: StoredShard, part: Box, memory: memoryview
) -> Iterator[_SizedRead]:
    """Return reads of all bytes from the first to the last element of a part of a shard."""
    itemsize = reader.index.tensors[name].itemsize
    first, last = (element * itemsize for element in part.flat_span(shard.box.shape))
    for start, stop in pieces(shard, first, last):
        yield stop - start, partial(reader.read, name, shard, start, memory[start - first : stop - first])


@torch.no_grad()
def _read_strided(reader: StepReader, name: str, shard: StoredShard, part: Box, target: torch.Tensor) -> None:
    """Read the bytes from the first to the last element of a part of a shard, and copy the part out of them."""
    tensor = reader.index.tensors[name]
    first, last = part.flat_span(shard.box.shape)
    scratch = np.empty((last - first) * tensor.itemsize, np.uint8)
    for _, read in _flat_reads(reader, name, shard, part, scratch.data):
        read()
    strides = [math.prod(shard.box.shape[dim + 1 :]) for dim in range(len(shard.box.shape))]
    stored = torch.from_numpy(scratch).view(TORCH_DTYPES[tensor.dtype]).as_strided(part.shape, strides)
    target.copy_(stored)
