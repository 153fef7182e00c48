"""Named tensors in memory that other processes open in place: shared memory, or a GPU's by CUDA IPC."""

import asyncio
import mmap
import os
import pickle
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gcore_rollout.engines.protocol import Digests
from gcore_rollout.errors import RolloutError
from gcore_rollout.weight_sync.checked import digests_of
from gcore_rollout.weight_sync.layout import Layout, PackedTensors, unpacked

_MAX_MAPPINGS = 2
_DEVICE_ARGUMENT = 6
"""Index of the argument of `rebuild_cuda_tensor` that is the sender's number of the device."""


class _Memory(PackedTensors):
    """Anonymous shared memory, which the kernel frees with its last user; a view keeps its mapping alive."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("gcore-weights")
        self.readers: set[asyncio.Future[None]] = set()
        self._mapping = torch.empty(0, dtype=torch.uint8)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        if not self._mapping.numel() or size_bytes > self._mapping.numel():
            # Twice as much as before: unwritten pages take no memory, and mapping again takes time.
            capacity_bytes = max(size_bytes, 2 * self._mapping.numel(), mmap.PAGESIZE)
            os.ftruncate(self.fd, capacity_bytes)
            self._mapping = torch.frombuffer(mmap.mmap(self.fd, capacity_bytes), dtype=torch.uint8)
        return self._mapping


class SharedWeights:
    """One model's weights in anonymous shared memory, written once for any number of engines.

    Iterating yields (name, tensor) views of the memory, so it can be given to `update_weights` of any engine. An
    `EngineProcess` does not iterate: it maps the same memory, and an engine that can do so uses the weights in place.
    New weights are then written to a second memory, and the ones after these to the first. Weights are complete before
    an engine takes the first of them, so that a sender which fails half-way leaves every engine with its old ones.
    Linux only.
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []
        self._present: _Memory | None = None
        self._is_closed = False
        self.digests: Digests = {}
        """Digests that the weights came with; empty if there were none."""
        self.num_writes = 0
        """Number of calls of `write`: two equal numbers mean the same weights."""

    @property
    def layout(self) -> Layout:
        """The specs of the tensors, in order; a `RolloutError` if nothing has been written, or not completely."""
        return self._whole().layout

    @property
    def is_whole(self) -> bool:
        """True if there are weights."""
        return self._present is not None

    def fileno(self) -> int:
        """The file descriptor of the memory that holds the weights; another write may make it another."""
        return self._whole().fd

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
        memory.layout, memory.size_bytes = {}, 0
        memory.buffer(0)
        for name, tensor in weights:
            memory.add(name, tensor)
        self._present = memory
        self.digests = dict(digests_of(weights))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory = self._whole()
        return unpacked(memory.buffer(0), memory.layout)

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
        readers = self._whole().readers
        readers.add(reader)
        reader.add_done_callback(readers.discard)

    def close(self) -> None:
        """Free the memory, once the last engine that reads it has released it. Idempotent."""
        for memory in self._memories:
            os.close(memory.fd)
        self._memories.clear()
        self._present = None
        self._is_closed = True

    def _whole(self) -> _Memory:
        if self._present is None:
            raise RolloutError("there are no weights: nothing was written, writing failed, or the memory was closed")
        return self._present


class SharedWeightsReader:
    """Reader of another process's weights. It keeps mappings for later updates: making one takes time."""

    def __init__(self) -> None:
        self._mappings: dict[int, torch.Tensor] = {}

    def read(self, fd: int, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Return read-only views of the memory; the descriptor is closed at once."""
        try:
            now = os.fstat(fd)
            mapping = self._mappings.pop(now.st_ino, None)
            if mapping is None or mapping.numel() < now.st_size:
                with warnings.catch_warnings():
                    # A write must fail and not change the weights.
                    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                    mapping = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
        finally:
            os.close(fd)
        # Least recently used first; dropping a mapping frees memory of a sender that has ended.
        self._mappings[now.st_ino] = mapping
        while len(self._mappings) > _MAX_MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return unpacked(mapping, layout)


class SharedCudaWeights:
    """The side that has the weights: Hugging Face names and full tensors on a CUDA device; `ValueError` for others.

    It waits for pending computations, keeps the weights alive until `close`, and must not write to them before. Call
    `close` only once every receiver has copied the weights and released its views.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in weights]
        for name, tensor in self._tensors:
            if not tensor.is_cuda:
                raise ValueError(f"weight {name!r} is on {tensor.device}; expected a CUDA device")
        for device in {tensor.device for _, tensor in self._tensors}:
            torch.cuda.synchronize(device)

    def handles(self) -> bytes:
        """Return the handles that one receiver opens once; each receiver must trust this process."""
        return pickle.dumps([(name, _uuid(tensor.device), reduce_tensor(tensor)[1]) for name, tensor in self._tensors])

    def close(self) -> None:
        """Release the weights. Idempotent."""
        self._tensors.clear()
        torch.cuda.ipc_collect()


def open_weights(handles: bytes) -> list[tuple[str, torch.Tensor]]:
    """Open the sender's weights: names and views of its memory, which must not be written to.

    Devices are matched by their UUID, because the two processes may number them differently. Copy the needed tensors,
    wait for the copies (``torch.cuda.synchronize``), drop the views, and notify the sender, which must be trusted, as
    with every pickle. `ValueError` if this process does not see the sender's GPU.
    """
    own = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    opened: list[tuple[str, torch.Tensor]] = []
    for name, uuid, arguments in pickle.loads(handles):
        if uuid not in own:
            raise ValueError(f"weight {name!r} is on GPU {uuid}: this process sees {sorted(own)}")
        given: list[Any] = list(arguments)
        given[_DEVICE_ARGUMENT] = own[uuid]
        opened.append((name, rebuild_cuda_tensor(*given)))
    return opened


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
