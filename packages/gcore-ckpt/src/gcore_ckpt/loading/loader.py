"""Turns an open step into a state: a fresh one, or a template whose memory is filled, from any saved sharding."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from gcore_ckpt.format.boxes import DTYPES, Box
from gcore_ckpt.format.index import StoredShard
from gcore_ckpt.format.tree import State, StatePath, View
from gcore_ckpt.handles import LoadReport
from gcore_ckpt.loading.matching import Matcher, Request, pruned, view_in
from gcore_ckpt.loading.reader import StepReader, pieces
from gcore_ckpt.ranks.group import Group
from gcore_ckpt.ranks.shards import TORCH_DTYPES
from gcore_ckpt.threads import Workers

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
    workers.run(_batches((read for request in requests for read in _reads(reader, request)), advance))


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
