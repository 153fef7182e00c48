"""Named tensors in shared memory, written once and read by any number of engine processes."""

import asyncio
import mmap
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

import torch

from gcore_rollout.engines.protocol import Digests
from gcore_rollout.errors import RolloutError
from gcore_rollout.weight_sync.checked import digests_of
from gcore_rollout.weight_sync.layout import TensorSpec, aligned

_MAX_MAPPINGS = 2

WeightsLayout = tuple[tuple[str, TensorSpec, int], ...]
"""Name, spec and offset in bytes of each tensor."""


def _view(mapping: mmap.mmap, spec: TensorSpec, offset: int) -> torch.Tensor:
    """Return a view of a tensor, which keeps the mapping alive."""
    if spec.numel == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    with warnings.catch_warnings():
        # A reader's mapping is not writable: a write must fail and not change the weights.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapping, dtype=spec.dtype, count=spec.numel, offset=offset).view(spec.shape)


class _Memory:
    """Anonymous shared memory, which the kernel frees with its last user."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("gcore-weights")
        self.readers: set[asyncio.Future[None]] = set()
        self._capacity_bytes = 0
        self._mapping: mmap.mmap | None = None

    def mapped(self, size_bytes: int) -> mmap.mmap:
        """Return a mapping of at least ``size_bytes``; the current one if it is large enough."""
        if self._mapping is None or size_bytes > self._capacity_bytes:
            # Twice as much as before: unwritten pages take no memory, and mapping again takes time.
            self._capacity_bytes = max(size_bytes, 2 * self._capacity_bytes, mmap.PAGESIZE)
            os.ftruncate(self.fd, self._capacity_bytes)
            self._mapping = mmap.mmap(self.fd, self._capacity_bytes)
        return self._mapping


class SharedWeights:
    """One model's weights in anonymous shared memory, written once for any number of engines.

    Iterating yields (name, tensor) views of the memory, so it can be given to `update_weights` of any engine. An
    `EngineProcess` does not iterate: it maps the same memory, and an engine that can do so uses the weights in place.
    New weights are then written to a second memory, and the ones after these to the first.

    Weights are complete before an engine takes the first of them, so that a sender which fails half-way leaves every
    engine with its old ones. Linux only.

    Attributes:
        digests: Digests that the weights came with; empty if there were none.
        num_writes: Number of calls of `write`: two equal numbers mean the same weights.
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []
        self._present: tuple[_Memory, WeightsLayout] | None = None
        self.digests: Digests = {}
        self.num_writes = 0
        self._is_closed = False

    @property
    def layout(self) -> WeightsLayout:
        """The places of the tensors; a `RolloutError` if nothing has been written, or not completely."""
        return self._whole()[1]

    @property
    def is_whole(self) -> bool:
        """True if there are weights."""
        return self._present is not None

    def fileno(self) -> int:
        """The file descriptor of the memory that holds the weights; another write may make it another."""
        return self._whole()[0].fd

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights, one at a time, to memory without readers, so that the weights in use stay as they are."""
        if self._is_closed:
            raise RolloutError("the shared weights are closed")
        self._present = None
        # Memory of an earlier write, or new; other memories without readers are freed.
        memory, *others = [memory for memory in self._memories if not memory.readers] or [_Memory()]
        for other in others:
            os.close(other.fd)
        self._memories = [memory, *(memory for memory in self._memories if memory.readers)]
        self.num_writes += 1
        slots: list[tuple[str, TensorSpec, int]] = []
        end = 0
        for name, tensor in weights:
            spec, offset = TensorSpec.of(tensor), aligned(end)
            end = offset + spec.size_bytes
            _view(memory.mapped(end), spec, offset).copy_(tensor.detach())
            slots.append((name, spec, offset))
        memory.mapped(end)
        self._present = memory, tuple(slots)
        self.digests = dict(digests_of(weights))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory, layout = self._whole()
        for name, spec, offset in layout:
            yield name, _view(memory.mapped(offset + spec.size_bytes), spec, offset)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Prevent writes over the current weights inside the block."""
        reader = asyncio.get_running_loop().create_future()
        self.read_until(reader)
        try:
            yield
        finally:
            reader.set_result(None)

    def read_until(self, reader: "asyncio.Future[None]") -> None:
        """Prevent writes over the current weights until this future is done."""
        readers = self._whole()[0].readers
        readers.add(reader)
        reader.add_done_callback(readers.discard)

    def close(self) -> None:
        """Free the memory, once the last engine that reads it has released it. Idempotent."""
        for memory in self._memories:
            os.close(memory.fd)
        self._memories.clear()
        self._present = None
        self._is_closed = True

    def _whole(self) -> tuple[_Memory, WeightsLayout]:
        if self._present is None:
            raise RolloutError("there are no weights: nothing was written, writing failed, or the memory was closed")
        return self._present


class SharedWeightsReader:
    """Reader of another process's weights.

    Mappings are kept for the next update: making one takes a quarter of the time of copying from it.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def read(self, fd: int, layout: WeightsLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Return read-only views of the memory; the descriptor is closed at once."""
        size_bytes = max((offset + spec.size_bytes for _, spec, offset in layout), default=0)
        try:
            inode = os.fstat(fd).st_ino
            mapping = self._mappings.pop(inode, None)
            if mapping is None or size_bytes > len(mapping):
                mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        # Least recently used first; dropping a mapping frees memory of a sender that has ended.
        self._mappings[inode] = mapping
        while len(self._mappings) > _MAX_MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return ((name, _view(mapping, spec, offset)) for name, spec, offset in layout)
