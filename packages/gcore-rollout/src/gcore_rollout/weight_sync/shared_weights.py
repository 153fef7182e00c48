"""Named tensors in memory that engine processes map: written once, read by any number of them."""

import asyncio
import mmap
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from gcore_rollout.errors import RolloutError
from gcore_rollout.weight_sync.report import Digests, digests_of

_ALIGNMENT_BYTES = 64
_MAX_MAPPINGS = 2


@dataclass(frozen=True)
class WeightSlot:
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + prod(self.shape) * self.dtype.itemsize

    def view(self, mapping: mmap.mmap) -> torch.Tensor:
        """The tensor in place, which keeps the mapping alive."""
        count = prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            # A reader's mapping is not writable: who writes all the same is to fail, not to change the weights.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            flat = torch.frombuffer(mapping, dtype=self.dtype, count=count, offset=self.offset_bytes)
        return flat.view(self.shape)


@dataclass(frozen=True)
class WeightsLayout:
    """Where all tensors lie."""

    slots: tuple[WeightSlot, ...]

    @property
    def size_bytes(self) -> int:
        return max((slot.end_bytes for slot in self.slots), default=0)


class _Memory:
    """Anonymous shared memory, which is the kernel's to free when its last user is gone."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("gcore-weights")
        self.readers: set[asyncio.Future[None]] = set()
        self._capacity_bytes = 0
        self._mapping: mmap.mmap | None = None

    def mapped(self, size_bytes: int) -> mmap.mmap:
        """A mapping of at least so much; the present one if that will do."""
        if self._mapping is None or size_bytes > self._capacity_bytes:
            # Twice as much as was there: what is not written to takes no memory, and mapping again does take time.
            self._capacity_bytes = max(size_bytes, 2 * self._capacity_bytes, mmap.PAGESIZE)
            os.ftruncate(self.fd, self._capacity_bytes)
            self._mapping = mmap.mmap(self.fd, self._capacity_bytes)
        return self._mapping

    def close(self) -> None:
        os.close(self.fd)


class SharedWeights:
    """One model's weights in anonymous shared memory, written once for any number of engines.

    Iterating yields (name, tensor) views of the memory, so it can be given to `update_weights` of any engine. An
    `EngineProcess` does not iterate: it maps the same memory, and an engine that can computes with the weights where
    they lie. New weights are then written to a second memory, and the ones after these to the first.

    Weights are complete before an engine takes the first of them, so that a sender which fails half-way leaves every
    engine with its old ones. Linux only.
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []
        self._present: tuple[_Memory, WeightsLayout] | None = None
        self._digests: Digests = {}
        self._num_writes = 0
        self._is_closed = False

    @property
    def layout(self) -> WeightsLayout:
        """Where the tensors lie.

        Raises:
            RolloutError: nothing has been written, or not to its end.
        """
        return self._whole()[1]

    @property
    def is_whole(self) -> bool:
        """Whether there are weights."""
        return self._present is not None

    @property
    def digests(self) -> Digests:
        """Those that the weights came with; empty if there were none."""
        return self._digests

    @property
    def num_writes(self) -> int:
        """How often `write` has been called: tells whether the weights are still those seen before."""
        return self._num_writes

    def fileno(self) -> int:
        """The file descriptor of the memory that holds the weights; another write may make it another."""
        return self._whole()[0].fd

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights in, where nobody reads: what engines use stays as it is.

        An iterable that makes them one by one is never asked for two at a time.

        Raises:
            RolloutError: the memory was closed.
        """
        if self._is_closed:
            raise RolloutError("the shared weights are closed")
        self._present = None
        memory = self._unread_memory()
        self._num_writes += 1
        slots: list[WeightSlot] = []
        end = 0
        for name, tensor in weights:
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            slot = WeightSlot(name, tensor.dtype, tuple(tensor.shape), offset)
            end = slot.end_bytes
            slot.view(memory.mapped(end)).copy_(tensor.detach())
            slots.append(slot)
        memory.mapped(end)
        self._present = (memory, WeightsLayout(tuple(slots)))
        self._digests = dict(digests_of(weights))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory, layout = self._whole()
        for slot in layout.slots:
            yield slot.name, slot.view(memory.mapped(slot.end_bytes))

    @contextmanager
    def reading(self) -> Generator[None]:
        """Nothing is written over the present weights while this is held."""
        reader = asyncio.get_running_loop().create_future()
        self.read_until(reader)
        try:
            yield
        finally:
            reader.set_result(None)

    def read_until(self, reader: "asyncio.Future[None]") -> None:
        """Nothing is written over the present weights until this future is done."""
        readers = self._whole()[0].readers
        readers.add(reader)
        reader.add_done_callback(readers.discard)

    def close(self) -> None:
        """Give the memory back, once the last engine that reads it has done so. Idempotent."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._present = None
        self._is_closed = True

    def _whole(self) -> tuple[_Memory, WeightsLayout]:
        if self._present is None:
            raise RolloutError("there are no weights: nothing was written, writing failed, or the memory was closed")
        return self._present

    def _unread_memory(self) -> _Memory:
        """One to write to: kept from earlier writes, or a new one; no other that is unread is kept."""
        first, *others = [memory for memory in self._memories if not memory.readers] or [_Memory()]
        for memory in others:
            memory.close()
        self._memories = [first, *(memory for memory in self._memories if memory.readers)]
        return first


class SharedWeightsReader:
    """The other side: another process's weights, mapped here.

    Mappings are kept for the next time: making one anew costs a quarter of the time that copying out of it does.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def read(self, fd: int, layout: WeightsLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the memory, not to be written to; the descriptor is closed at once."""
        try:
            inode = os.fstat(fd).st_ino
            mapping = self._mappings.pop(inode, None)
            if mapping is None or layout.size_bytes > len(mapping):
                mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        # The last used last; what only this mapping keeps of a sender that is gone is freed.
        self._mappings[inode] = mapping
        while len(self._mappings) > _MAX_MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return ((slot.name, slot.view(mapping)) for slot in layout.slots)
