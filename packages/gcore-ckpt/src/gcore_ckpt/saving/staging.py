"""Copies live memory into host memory, the only part of a save that its caller waits for."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from gcore_ckpt.errors import CheckpointWriteError
from gcore_ckpt.format.boxes import DTYPES, Box, FileLayout, HeldBox
from gcore_ckpt.ranks.shards import PLAIN_TENSORS, TORCH_DTYPES, Holdings, NumpyArray
from gcore_ckpt.saving.host_memory import allocate, allocate_pinned
from gcore_ckpt.threads import Workers

Staging: TypeAlias = Literal["full", "chunked"]
Working: TypeAlias = Callable[[], AbstractContextManager[None]]

CHUNK_BYTES = 128 << 20
"""Size of each of the two host buffers of chunked staging."""

_JOB_BYTES = 16 << 20
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_device, _ndim = map(attrgetter, ("device", "ndim"))
_Copy: TypeAlias = tuple[NumpyArray, NumpyArray]


class Arena:
    """A block of page-aligned host memory that grows when it must, kept from save to save, pinned for CUDA."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._bytes: NumpyArray = np.empty(0, np.uint8)
        self._pinned = False

    def reserve(self, size_bytes: int, *, pinned: bool) -> NumpyArray:
        """Return at least `size_bytes` of memory; memory returned by an earlier call must no longer be in use."""
        if len(self._bytes) < size_bytes or (pinned and not self._pinned):
            self._pinned = self._pinned or pinned
            self._bytes = np.empty(0, np.uint8)  # the old memory goes before the new comes
            try:
                if self._pinned:
                    self._bytes = allocate_pinned(size_bytes, self._workers)
                else:
                    self._bytes = allocate(size_bytes)
            except (OSError, RuntimeError, MemoryError) as error:
                raise CheckpointWriteError(
                    f"a save needs {size_bytes} bytes of host memory to copy what this rank writes, and gets none "
                    f"({error}); expected that much, or staging='chunked', which takes {2 * CHUNK_BYTES}"
                ) from error
        return self._bytes


@dataclass(frozen=True)
class StagedFile:
    """A data file in page-aligned host memory, without its header; `release` gives the memory back after the write."""

    layout: FileLayout
    data: memoryview
    release: Callable[[], None]


class Stager:
    """Host memory for the saves in flight, and the copies into it.

    `"full"` holds each of `max_in_flight` saves whole, so that a save returns after one copy. `"chunked"` holds two
    pieces of `CHUNK_BYTES`, so that a save returns when all but the last two pieces are written.
    """

    def __init__(self, staging: Staging, max_in_flight: int, workers: Workers) -> None:
        self.max_file_bytes = CHUNK_BYTES if staging == "chunked" else None
        self._workers = workers
        self._arenas: SimpleQueue[Arena] = SimpleQueue()
        for _ in range(max_in_flight if staging == "full" else 2):
            self._arenas.put(Arena(workers))

    def stage(
        self, files: Sequence[FileLayout], holdings: Holdings, working: Working
    ) -> Iterator[StagedFile]:
        """Copy the boxes of each file, in order; wait where no memory is free."""
        if self.max_file_bytes is not None:
            for file in files:
                yield from self._stage_together([file], holdings, working)
        elif files:
            yield from self._stage_together(files, holdings, working)

    def _stage_together(
        self, files: Sequence[FileLayout], holdings: Holdings, working: Working
    ) -> Iterator[StagedFile]:
        """Copy files into one arena, and yield them once all are there: writing would slow the copies down."""
        starts = [0]
        for file in files:
            starts.append(-(-(starts[-1] + file.size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
        arena = self._arenas.get()
        num_unreleased = len(files)

        def release() -> None:
            nonlocal num_unreleased
            num_unreleased -= 1
            if not num_unreleased:
                self._arenas.put(arena)

        yielded = 0
        try:
            on_cuda = any(device.type == "cuda" for device in holdings.devices)
            with working():
                memory = arena.reserve(starts[-1], pinned=on_cuda)
            pieces: list[NumpyArray] = []
            for start, file in zip(starts, files, strict=False):
                piece = memory[start : start + file.size_bytes]
                with working():
                    self._copy(file, piece, holdings)
                pieces.append(piece)
            for file, piece in zip(files, pieces, strict=True):
                yielded += 1
                yield StagedFile(file, piece.data, release)
        finally:
            for _ in files[yielded:]:
                release()

    @torch.no_grad()
    def _copy(self, file: FileLayout, piece: NumpyArray, holdings: Holdings) -> None:
        copies: list[_Copy] = []
        joint: list[Callable[[], None]] = []
        streams: set[torch.cuda.Stream] = set()
        try:
            for run in file.runs:
                sources = [holdings.data[file.numbers[i]] for i in run]
                device = _device_of_all(sources, file, run, holdings)
                if device is not None:
                    target = _view_as_dtype(piece, file, run)
                    job = partial(_copy_joined, target, cast("list[torch.Tensor]", sources))
                    if device.type == "cpu":
                        joint.append(job)
                        continue
                    if device.type == "cuda":
                        streams.add(torch.cuda.current_stream(device))
                    job()
                    continue
                for i, source in zip(run, sources, strict=True):
                    box = file.boxes[i]
                    memory_box = holdings.boxes[file.numbers[i]].box
                    slices = box.box.relative_to(memory_box).slices()
                    if isinstance(source, torch.Tensor) and source.device.type != "cpu":
                        if source.is_cuda:
                            streams.add(torch.cuda.current_stream(source.device))
                        typed = _view_as_dtype(piece, file, range(i, i + 1)).view(box.box.shape)
                        typed.copy_(source[slices], non_blocking=True)
                    else:
                        target = piece[file.offsets[i] : file.offsets[i + 1]]
                        copies.append(_as_plain_arrays(target, source, slices, box))
            self._workers.run([*joint, *_in_jobs(copies)])
        finally:
            # After an error, too: the memory may be used again, or unmapped.
            for stream in streams:
                stream.synchronize()


def _device_of_all(
    sources: Sequence[torch.Tensor | NumpyArray], file: FileLayout, run: range, holdings: Holdings
) -> torch.device | None:
    """Return the device of several tensors that are placed whole; None if they are to be copied one by one."""
    if (
        len(run) == 1
        or not {*map(type, sources)}.issubset(PLAIN_TENSORS)
        or file.boxes[run.start].dtype == "complex32"
    ):
        return None  # torch warns of operations on complex32
    if [holdings.boxes[file.numbers[i]] for i in run] != [file.boxes[i] for i in run]:
        return None
    devices = holdings.devices
    if len(devices) > 1:
        devices = {*map(_device, cast("list[torch.Tensor]", sources))}
    return next(iter(devices)) if len(devices) == 1 else None


def _view_as_dtype(piece: NumpyArray, file: FileLayout, run: range) -> torch.Tensor:
    """Return the memory of boxes of one element type, as elements of that type."""
    target = torch.from_numpy(piece[file.offsets[run.start] : file.offsets[run.stop]])
    return target.view(TORCH_DTYPES[file.boxes[run.start].dtype])


@torch.no_grad()
def _copy_joined(target: torch.Tensor, sources: list[torch.Tensor]) -> None:
    """Copy small tensors of one type by one call: concatenated on their device."""
    if sources[0].device != target.device:  # as bytes, since devices do not join all types
        parts = [
            source.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for source in sources
        ]
        target.view(torch.uint8).copy_(torch.cat(parts), non_blocking=True)
    elif {*map(_ndim, sources)} == {1}:
        torch.cat(sources, out=target)
    else:
        target.copy_(_flatten_dense_tensors(sources))


def _as_plain_arrays(
    target: NumpyArray, source: torch.Tensor | NumpyArray, slices: tuple[slice, ...], box: HeldBox
) -> _Copy:
    """Return both sides as numpy arrays of one type and shape, which numpy copies without the GIL."""
    if isinstance(source, torch.Tensor):
        source = source.detach().resolve_conj().resolve_neg()
        size_bytes = DTYPES[box.dtype].size_bytes
        if size_bytes in _AS_INTEGERS:
            source = source.view(_AS_INTEGERS[size_bytes])
        source = source.numpy()
    array = source[(..., *slices)]  # a view of a scalar, too
    return target.view(array.dtype).reshape(box.box.shape), array


def _in_jobs(copies: Sequence[_Copy]) -> Iterator[Callable[[], None]]:
    """Return jobs of about the same size: large copies cut in pieces, small ones many together."""
    job: list[_Copy] = []
    size_bytes = 0
    for target, source in copies:
        for box in Box.of_shape(target.shape).split(_JOB_BYTES // target.itemsize):
            if box.shape == target.shape:
                job.append((target, source))
            else:
                job.append((target[box.slices()], source[box.slices()]))
            size_bytes += box.size * target.itemsize
            if size_bytes >= _JOB_BYTES:
                yield partial(_copy_all, job)
                job = []
                size_bytes = 0
    yield partial(_copy_all, job)


def _copy_all(copies: Sequence[_Copy]) -> None:
    for target, source in copies:
        np.copyto(target, source)
