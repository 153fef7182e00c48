"""Turns an open step into a state: a fresh one, or a template whose memory is filled, from any saved sharding."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from gcore_ckpt.format.boxes import DTYPES, SMALL_BYTES, Box
from gcore_ckpt.format.stored import StoredShard
from gcore_ckpt.format.tree import State, StatePath, View
from gcore_ckpt.handles import LoadReport
from gcore_ckpt.loading.matching import Matcher, Request, pruned, view_in
from gcore_ckpt.loading.reader import NamedShard, StepReader, pieces, runs
from gcore_ckpt.ranks.group import Group
from gcore_ckpt.ranks.shards import TORCH_DTYPES
from gcore_ckpt.threads import Workers

_copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_THREADS = 8
_SCRATCH_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20

_SizedRead: TypeAlias = tuple[int, Callable[[], None]]  # the bytes that a call reads, and the call


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of `Checkpointer.load`."""

    only: Sequence[str] | None = None
    device: str | torch.device = "cpu"
    mmap: bool = False
    strict: bool = True
    progress: Callable[[int, int], None] | None = None


def load_step(
    reader: StepReader,
    group: Group,
    template: State,
    options: LoadOptions,
    report: LoadReport,
    check: Callable[[], None] = lambda: None,
) -> State:
    """Load from an open step, as `Checkpointer.load` says; `check` is called before each read and may raise."""
    start_s, saved = time.perf_counter(), reader.index.tree
    matcher = Matcher(reader, group, torch.device(options.device), mmap=options.mmap)
    if template is None:
        state = matcher.decoded(saved if options.only is None else pruned(saved, options.only, reader.where))
    else:
        state = matcher.match(template, saved, ())
        if options.strict:
            matcher.check_missing()
        report.missing, report.unused = map(_dotted, (matcher.missing(), matcher.unused))
    total_bytes = sum(reader.index.tensors[name].itemsize * box.size for name, box, _ in matcher.requests)
    matched_s = time.perf_counter()

    def advance(count: int) -> None:
        check()
        if options.progress is not None and count:
            options.progress(count, total_bytes)

    with Workers(_THREADS) as workers:
        fill(reader, matcher.requests, workers, advance)
    with torch.no_grad():
        for target, source in matcher.copies:
            target.copy_(source)
    report.size_bytes, report.match_s, report.read_s = total_bytes, matched_s - start_s, time.perf_counter() - matched_s
    return state


def _dotted(paths: Sequence[StatePath]) -> list[str]:
    return [".".join(map(str, path)) for path in paths]


def fill(
    reader: StepReader,
    requests: Sequence[Request],
    workers: Workers,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill every request, reading only the blocks that hold something of it.

    ``advance`` is called with 0 before each read, which it may prevent by an error, and with the bytes after it.
    """
    small: dict[torch.dtype, list[NamedShard]] = {}
    others: list[Request] = []
    for request in requests:
        if (shard := _small_shard(reader, request)) is None:
            others.append(request)
        else:
            small.setdefault(request.target.dtype, []).append(NamedShard(request.name, shard, request.target))
    joint = (_joint_read(reader, run) for shards in small.values() for run in runs(shards))
    workers.run(_batches(chain(joint, (read for request in others for read in _reads(reader, request))), advance))


def _small_shard(reader: StepReader, request: Request) -> StoredShard | None:
    """Return the one small shard that a request is for, if it is to be copied as it is; None for any other request."""
    dtype, _, shards = reader.index.tensors[request.name]
    shard, target = shards[0], request.target
    if len(shards) != 1 or shard.size_bytes >= SMALL_BYTES or shard.box != request.box:
        return None
    if (
        not target.is_cpu
        or target.dtype != TORCH_DTYPES[dtype]
        or type(target) not in (torch.Tensor, torch.nn.Parameter)
    ):
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
    flat = torch.from_numpy(buffer).view(targets[0].dtype)
    _copy_each(targets, _unflatten_dense_tensors(flat, targets))


def read_box(reader: StepReader, name: str, box: Box, workers: Workers, dtype: str | None = None) -> torch.Tensor:
    """Return the bytes of a box of a stored tensor, as elements of `dtype` or else of its own type."""
    dtype = dtype or reader.index.tensors[name].dtype
    data = torch.empty(box.size * DTYPES[dtype].size_bytes, dtype=torch.uint8)
    if box.size:
        fill(reader, [Request(name, box, data.view(TORCH_DTYPES[dtype]).view(box.shape))], workers)
    return data


def read_whole(
    reader: StepReader, name: str, view: View | None, workers: Workers, dtype: str | None = None
) -> torch.Tensor:
    """Return the bytes of a stored tensor, or of a view in its memory, as `read_box` does."""
    stored = reader.index.tensors[name]
    data = read_box(reader, name, Box.whole(stored.shape), workers, dtype)
    if view is None:
        return data
    # Not contiguous(): a dimension of one element may have any stride.
    tensor = view_in(data.view(TORCH_DTYPES[dtype or stored.dtype]), view)
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _batches(reads: Iterable[_SizedRead], advance: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Group small reads: passing one to a thread costs as much as reading a few kilobytes."""
    batch: list[_SizedRead] = []
    size_bytes = 0
    for read in reads:
        batch.append(read)
        size_bytes += read[0]
        if size_bytes >= _BATCH_BYTES:
            yield partial(_run_all, batch, advance)
            batch, size_bytes = [], 0
    yield partial(_run_all, batch, advance)


def _run_all(reads: Sequence[_SizedRead], advance: Callable[[int], None]) -> None:
    for size_bytes, read in reads:
        advance(0)
        read()
        advance(size_bytes)


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
