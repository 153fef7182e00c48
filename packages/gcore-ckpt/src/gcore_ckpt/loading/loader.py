"""Turns an open step into a state: a fresh one, or a template whose memory is filled, from any saved sharding."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from gcore_ckpt.format.boxes import DTYPES, Box, block_count
from gcore_ckpt.format.stored import StoredShard
from gcore_ckpt.format.tree import State, StatePath, View
from gcore_ckpt.handles import LoadReport
from gcore_ckpt.loading.matching import Matcher, ReadRequest, prune_tree, view_in
from gcore_ckpt.loading.reader import StepReader, adjacent_runs, is_small, pieces, scratch
from gcore_ckpt.ranks.group import RankGroup
from gcore_ckpt.ranks.shards import TORCH_DTYPES
from gcore_ckpt.threads import Workers

_copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_THREADS = 8
_SCRATCH_BYTES = 4 << 20
_BATCH_BYTES = 4 << 20

_SizedRead: TypeAlias = tuple[int, Callable[[], None]]  # the bytes that a call reads, and the call


def load_step(
    reader: StepReader,
    group: RankGroup,
    template: State,
    *,
    only: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    mmap: bool = False,
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
    held_elsewhere: Collection[str] = (),
    report: LoadReport | None = None,
    check: Callable[[], None] = lambda: None,
) -> State:
    """Load from an open step, see `Checkpointer.load`; `check` is called before each read and may raise.

    `held_elsewhere` is what the ranks have agreed on by `find_held_elsewhere`.
    """
    report = report or LoadReport()
    start_s = time.perf_counter()
    saved = reader.index.tree
    matcher = Matcher(reader, group, torch.device(device), mmap=mmap, held_elsewhere=held_elsewhere)
    if template is None:
        if only is not None:
            saved = prune_tree(saved, only, reader.where)
        state = matcher.decode_node(saved)
    else:
        state = matcher.match(template, saved, ())
        if strict:
            matcher.check_strict()
        report.missing = _join_paths(matcher.missing())
        report.unused = _join_paths(matcher.unused)
    reads = _plan_reads(reader, matcher.requests)
    report.size_bytes = sum(size_bytes for size_bytes, _ in reads)
    matched_s = time.perf_counter()

    def advance(count: int) -> None:
        check()
        if progress is not None and count:
            progress(count, report.size_bytes)

    with Workers(_THREADS) as workers:
        workers.run(_batches(reads, advance))
    with torch.no_grad():
        for target, source in matcher.copies:
            target.copy_(source)
    report.match_s = matched_s - start_s
    report.read_s = time.perf_counter() - matched_s
    return state


def _join_paths(paths: Sequence[StatePath]) -> list[str]:
    return [".".join(map(str, path)) for path in paths]


def _plan_reads(reader: StepReader, requests: Iterable[ReadRequest]) -> list[_SizedRead]:
    """Return the reads that fill requests, of only the blocks that are needed."""
    reads: list[_SizedRead] = []
    small: dict[torch.dtype, list[tuple[str, StoredShard]]] = {}
    targets: dict[torch.dtype, list[torch.Tensor]] = {}
    for request in requests:
        tensor = reader.index.tensors[request.name]
        shard = tensor.shards[0]
        if len(tensor.shards) == 1 and is_small(shard) and _is_copied(shard, tensor.dtype, request):
            dtype = request.target.dtype
            small.setdefault(dtype, []).append((request.name, shard))
            targets.setdefault(dtype, []).append(request.target)
        else:
            reads.extend(_reads(reader, request))
    for dtype, shards in small.items():
        for size_bytes, run in adjacent_runs(shards):
            run_shards = [shards[i] for i in run]
            run_targets = [targets[dtype][i] for i in run]
            read = partial(_read_small, reader, run_shards, run_targets, size_bytes)
            reads.append((size_bytes, read))
    return reads


def _is_copied(shard: StoredShard, dtype: str, request: ReadRequest) -> bool:
    """Return whether a request is for a whole shard and for memory that torch copies it to as it is."""
    target = request.target
    return (
        shard.box == request.box
        and target.is_cpu
        and target.dtype == TORCH_DTYPES[dtype]
        and not (target.is_conj() or target.is_neg() or target.is_inference())
    )


@torch.no_grad()
def _read_small(
    reader: StepReader,
    shards: Sequence[tuple[str, StoredShard]],
    targets: list[torch.Tensor],
    size_bytes: int,
) -> None:
    """Read small shards that are adjacent, of one type, and copy them to their tensors by one call."""
    buffer = np.empty(size_bytes, np.uint8)
    reader.read_adjacent(shards, buffer.data)
    flat = torch.from_numpy(buffer).view(targets[0].dtype)
    _copy_each(targets, _unflatten_dense_tensors(flat, targets))


def read_box(
    reader: StepReader, name: str, box: Box, workers: Workers, dtype: str | None = None
) -> torch.Tensor:
    """Return the bytes of a box of a stored tensor, as elements of `dtype` or else of its own type."""
    dtype = dtype or reader.index.tensors[name].dtype
    data = torch.empty(box.size * DTYPES[dtype].size_bytes, dtype=torch.uint8)
    if box.size:
        request = ReadRequest(name, box, data.view(TORCH_DTYPES[dtype]).view(box.shape))
        workers.run(_batches(_plan_reads(reader, [request]), lambda _: None))
    return data


def read_whole(
    reader: StepReader, name: str, view: View | None, workers: Workers, dtype: str | None = None
) -> torch.Tensor:
    """Return the bytes of a stored tensor, or of a view in its memory, as `read_box` does."""
    stored = reader.index.tensors[name]
    data = read_box(reader, name, Box.of_shape(stored.shape), workers, dtype)
    if view is None:
        return data
    # Not contiguous(): a dimension of one element may have any stride.
    tensor = view_in(data.view(TORCH_DTYPES[dtype or stored.dtype]), view)
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _batches(
    reads: Iterable[_SizedRead], advance: Callable[[int], None]
) -> Iterator[Callable[[], None]]:
    """Group small reads: passing one to a thread costs as much as reading a few kilobytes."""
    batch: list[_SizedRead] = []
    size_bytes = 0
    for read in reads:
        batch.append(read)
        size_bytes += read[0]
        if size_bytes >= _BATCH_BYTES:
            yield partial(_run_all, batch, advance)
            batch = []
            size_bytes = 0
    yield partial(_run_all, batch, advance)


def _run_all(reads: Sequence[_SizedRead], advance: Callable[[int], None]) -> None:
    for size_bytes, read in reads:
        advance(0)
        read()
        advance(size_bytes)


def _reads(reader: StepReader, request: ReadRequest) -> Iterator[_SizedRead]:
    tensor = reader.index.tensors[request.name]
    for shard in tensor.shards:
        common = shard.box.intersect(request.box)
        if common is None:
            continue
        inside = common.relative_to(shard.box)
        with torch.no_grad():
            target = request.target.detach()[common.relative_to(request.box).slices()]
        itemsize = tensor.itemsize
        first, last = (element * itemsize for element in inside.flat_span(shard.box.shape))
        as_stored = (
            target.dtype == TORCH_DTYPES[tensor.dtype]
            and target.device.type == "cpu"
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        )
        if as_stored and inside.is_flat_in(shard.box.shape):
            # Not reshape(-1): a dimension of one element may have any stride, which torch views as no other type.
            memory = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
            for start, stop in pieces(shard, first, last):
                part = memory[start - first : stop - first]
                yield stop - start, partial(reader.read, request.name, shard, start, part)
            continue
        for start, stop in pieces(shard, first, last, _SCRATCH_BYTES):
            parts: list[tuple[Box, torch.Tensor]] = []
            size_bytes = 0
            for box in inside.parts_in_span(shard.box.shape, start // itemsize, stop // itemsize):
                parts.append((box, target[box.relative_to(inside).slices()]))
                size_bytes += box.size * itemsize
            if parts:
                read = partial(_read_strided, reader, request.name, shard, (start, stop), parts)
                yield size_bytes, read


@torch.no_grad()
def _read_strided(
    reader: StepReader,
    name: str,
    shard: StoredShard,
    span: tuple[int, int],
    parts: Sequence[tuple[Box, torch.Tensor]],
) -> None:
    """Read whole blocks that cover a span of bytes of a shard, and copy the boxes in it to their targets."""
    tensor = reader.index.tensors[name]
    block = shard.block_bytes
    start = span[0] // block * block
    stop = min(block_count(span[1], block) * block, shard.size_bytes)
    memory = scratch(stop - start)
    reader.read(name, shard, start, memory)
    flat = np.frombuffer(memory[span[0] - start : span[1] - start], np.uint8)
    data = torch.from_numpy(flat).view(TORCH_DTYPES[tensor.dtype])
    strides = [math.prod(shard.box.shape[dim + 1 :]) for dim in range(len(shard.box.shape))]
    for box, target in parts:
        offset = box.flat_span(shard.box.shape)[0] - span[0] // tensor.itemsize
        target.copy_(data.as_strided(box.shape, strides, offset))
