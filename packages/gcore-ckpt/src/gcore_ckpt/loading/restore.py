"""Fills tensors from an open step: any sharding, any dtype, any device, from any that was saved."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.data_file import block_count
from gcore_ckpt.format.index import StoredShard, StoredTensor
from gcore_ckpt.loading.reader import StepReader, block_runs
from gcore_ckpt.ranks.shards import TORCH_DTYPES
from gcore_ckpt.threads import Job, Workers

_SCRATCH_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20

_SizedJob: TypeAlias = tuple[int, Job]  # the bytes that a job reads, and the job


class Request(NamedTuple):
    """A box of a stored tensor, and memory of its shape, of any dtype, device and strides, to put it in."""

    name: str
    box: Box
    target: torch.Tensor


def fill(
    reader: StepReader, requests: Sequence[Request], workers: Workers, check: Callable[[], None] = lambda: None
) -> None:
    """Fill every request, reading only the blocks that hold something of it.

    `check` is called by the workers before each read; what it raises ends the filling.

    Raises:
        CorruptCheckpointError: What is stored is not what was saved; targets then hold rubbish.
        CheckpointNotFoundError: The step was deleted meanwhile.
    """
    workers.run(_batches((job for request in requests for job in _jobs(reader, request)), check))


def _batches(jobs: Iterable[_SizedJob], check: Callable[[], None]) -> Iterator[Job]:
    """Group small jobs: passing a job to a thread costs as much as reading a few kilobytes."""
    batch: list[Job] = []
    size_bytes = 0
    for job_bytes, job in jobs:
        batch.append(job)
        size_bytes += job_bytes
        if size_bytes >= _BATCH_BYTES:
            yield lambda batch=batch: _run_all(batch, check)
            batch, size_bytes = [], 0
    if batch:
        yield lambda: _run_all(batch, check)


def _run_all(jobs: Sequence[Job], check: Callable[[], None]) -> None:
    for job in jobs:
        check()
        job()


def _jobs(reader: StepReader, request: Request) -> Iterator[_SizedJob]:
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
            yield from _direct_jobs(reader, request.name, tensor, shard, inside, target)
            continue
        for part in inside.split(_SCRATCH_BYTES // tensor.itemsize):
            piece = target[part.relative_to(inside).slices()]
            args = reader, request.name, tensor, shard, part, piece
            yield part.size * tensor.itemsize, lambda args=args: _read_strided(*args)


def _direct_jobs(
    reader: StepReader, name: str, tensor: StoredTensor, shard: StoredShard, inside: Box, target: torch.Tensor
) -> Iterator[_SizedJob]:
    """Read adjacent elements into place; the blocks at both ends are read separately where they hold more than that."""
    # Not reshape(-1): a dimension of one element may have any stride, which torch views as no other type.
    memory = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
    first, last = (element * tensor.itemsize for element in inside.flat_span(shard.box.shape))
    shard_bytes = shard.box.size * tensor.itemsize
    block = shard.block_bytes
    first_whole, end_whole = -(-first // block), last // block
    if last == shard_bytes:
        end_whole = block_count(shard_bytes, block)

    def whole(start: int, end: int) -> None:
        end_bytes = min(end * block, shard_bytes)
        reader.read_blocks(name, shard, start, memory[start * block - first : end_bytes - first])

    def partial(number: int) -> None:
        start, end = number * block, min((number + 1) * block, shard_bytes)
        scratch = np.empty(end - start, np.uint8).data
        reader.read_blocks(name, shard, number, scratch)
        begin, stop = max(start, first), min(end, last)
        memory[begin - first : stop - first] = scratch[begin - start : stop - start]

    if first % block:
        yield min(block, shard_bytes), lambda: partial(first_whole - 1)
    for start, end in block_runs(shard, first_whole, end_whole):
        yield min((end - start) * block, shard_bytes), lambda start=start, end=end: whole(start, end)
    if end_whole >= first_whole and end_whole * block < last:
        yield min(block, shard_bytes), lambda: partial(end_whole)


@torch.no_grad()
def _read_strided(
    reader: StepReader, name: str, tensor: StoredTensor, shard: StoredShard, part: Box, target: torch.Tensor
) -> None:
    """Read the blocks from the first to the last element of a box, and copy the box out of them."""
    block, itemsize = shard.block_bytes, tensor.itemsize
    first, last = part.flat_span(shard.box.shape)
    first_block, end_block = first * itemsize // block, block_count(last * itemsize, block)
    start_bytes = first_block * block
    end_bytes = min(end_block * block, shard.box.size * itemsize)
    scratch = np.empty(end_bytes - start_bytes, np.uint8)
    for start, end in block_runs(shard, first_block, end_block):
        memory = scratch[start * block - start_bytes : min(end * block, end_bytes) - start_bytes]
        reader.read_blocks(name, shard, start, memory.data)
    elements = torch.from_numpy(scratch[first * itemsize - start_bytes : last * itemsize - start_bytes])
    strides = [math.prod(shard.box.shape[dim + 1 :]) for dim in range(len(shard.box.shape))]
    stored = elements.view(TORCH_DTYPES[tensor.dtype]).as_strided(part.shape, strides)
    target.copy_(stored)
