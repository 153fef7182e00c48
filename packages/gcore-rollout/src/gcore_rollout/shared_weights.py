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

_ALIGNMENT_BYTES = 64


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


class SharedWeights:
    """One model's weights in anonymous shared memory, which is the kernel's to free when its last user is gone.

    Iterating yields (name, tensor) views of the memory, so it can be given to `update_weights` of any engine. An
    `EngineProcess` does not iterate: it maps the same memory. To feed several of them, write once and hand the same
    object to all.

    Weights are complete in this memory before an engine copies the first of them, so that a sender which fails half-way
    leaves every engine with its old ones. It costs one copy more than a transfer that fills and loads at the same time.

    The memory is kept and written again at the next update. Linux only.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("gcore-weights")
        self._capacity_bytes = 0
        self._mapping: mmap.mmap | None = None
        self._layout: WeightsLayout | None = None
        self._readers: set[asyncio.Future[None]] = set()
        self._num_writes = 0

    @property
    def layout(self) -> WeightsLayout:
        """Where the tensors lie.

        Raises:
            RolloutError: nothing has been written, or not to its end.
        """
        if self._layout is None:
            raise RolloutError("there are no weights: nothing was written, writing failed, or the memory was closed")
        return self._layout

    @property
    def is_whole(self) -> bool:
        """Whether there are weights."""
        return self._layout is not None

    @property
    def num_writes(self) -> int:
        """How often `write` has been called: tells whether the weights are still those seen before."""
        return self._num_writes

    def fileno(self) -> int:
        """The memory's file descriptor."""
        return self._fd

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights in; an iterable that makes them one by one is never asked for two at a time.

        Raises:
            RolloutError: an engine is still copying out of this memory (see `unread`), or it was closed.
        """
        if self._readers:
            raise RolloutError(f"{len(self._readers)} engines are still copying these weights: await unread() first")
        if self._fd < 0:
            raise RolloutError("the shared weights are closed")
        self._layout = None
        self._num_writes += 1
        slots: list[WeightSlot] = []
        end = 0
        for name, tensor in weights:
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            slot = WeightSlot(name, tensor.dtype, tuple(tensor.shape), offset)
            end = slot.end_bytes
            slot.view(self._mapped(end)).copy_(tensor.detach())
            slots.append(slot)
        self._mapped(end)
        self._layout = WeightsLayout(tuple(slots))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in self.layout.slots:
            yield slot.name, slot.view(self._mapped(slot.end_bytes))

    @contextmanager
    def reading(self) -> Generator[None]:
        """Nothing is written while this is held."""
        reader = asyncio.get_running_loop().create_future()
        self.read_until(reader)
        try:
            yield
        finally:
            reader.set_result(None)

    def read_until(self, reader: "asyncio.Future[None]") -> None:
        """Nothing is written until this future is done."""
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def unread(self) -> None:
        """Wait until no engine copies out of this memory."""
        while self._readers:
            await asyncio.wait(self._readers)

    def close(self) -> None:
        """Give the memory back, once the last engine that copies out of it has done so. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._mapping = None
        self._layout = None

    def _mapped(self, size_bytes: int) -> mmap.mmap:
        """A mapping of at least so much; the present one if that will do."""
        if self._mapping is None or size_bytes > self._capacity_bytes:
            # Twice as much as was there: what is not written to takes no memory, and mapping again does take time.
            self._capacity_bytes = max(size_bytes, 2 * self._capacity_bytes, mmap.PAGESIZE)
            os.ftruncate(self._fd, self._capacity_bytes)
            self._mapping = mmap.mmap(self._fd, self._capacity_bytes)
        return self._mapping


class SharedWeightsReader:
    """The other side: another process's weights, mapped here.

    The mapping is kept for the next time, as long as that brings the same memory: making it anew costs a quarter of the
    time that copying out of it does.
    """

    def __init__(self) -> None:
        self._inode = -1
        self._mapping: mmap.mmap | None = None

    def read(self, fd: int, layout: WeightsLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the memory, not to be written to; the descriptor is closed at once."""
        try:
            inode = os.fstat(fd).st_ino
            if self._mapping is None or inode != self._inode or layout.size_bytes > len(self._mapping):
                self._mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
                self._inode = inode
        finally:
            os.close(fd)
        mapping = self._mapping
        return ((slot.name, slot.view(mapping)) for slot in layout.slots)
