"""Host memory for offloaded tensors: pinned if the device is CUDA, and exactly as large as needed."""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gcore_trainer.errors import TrainerError

_ALIGNMENT = 64
"""Bytes to whose multiples each tensor's place is rounded up."""


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's shard of a tensor that may be sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def first_row(parameter: torch.Tensor) -> int:
    """Return the first row of this rank's shard of a parameter.

    FSDP gives each rank along the mesh's last dimension equally many rows, and the last ranks the rest.
    """
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    num_rows = parameter.shape[0]
    return min(mesh.get_local_rank(-1) * -(-num_rows // mesh.size(-1)), num_rows)


class _Pages(mmap.mmap):
    """Anonymous memory that is unregistered with CUDA, if it was registered, before it is unmapped."""

    pinned_at: int = 0

    def pin(self, address: int) -> None:
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, len(self), 0))
        if error:
            raise TrainerError(
                f"CUDA cannot pin {len(self) / 2**30:.1f} GiB of host memory (cudaHostRegister: error {error}); "
                "expected that much free memory, and a limit of locked memory (ulimit -l) above it"
            )
        self.pinned_at = address

    def __del__(self) -> None:
        if self.pinned_at:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self.pinned_at)


class OffloadArena:
    """One block of host memory, given out in pieces.

    torch's own pinned memory is rounded up to a power of two, and is kept for its process: 18 GB would take 32. Here
    pages of exactly the size are registered with CUDA, and are unregistered when no tensor uses the block any more.

    Args:
        size_bytes: sum of `piece_bytes` of the pieces.
        device: where the tensors come from; pages are pinned if it is CUDA.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        memory = _Pages(-1, max(1, size_bytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0
        if device.type == "cuda":
            memory.pin(self._bytes.data_ptr())

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a piece as a tensor of zeros, unless it was written to before `reset`."""
        size = torch.Size(shape)
        size_bytes = dtype.itemsize * size.numel()
        start = self._used
        self._used += piece_bytes(size_bytes)
        return self._bytes[start : start + size_bytes].view(dtype).view(size)

    def reset(self) -> None:
        """Give out the same memory again."""
        self._used = 0


def piece_bytes(size_bytes: int) -> int:
    """Return the bytes of an `OffloadArena` that a piece takes."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class Sleeper:
    """Moves tensors between device and host memory in place, so that references to them stay valid.

    The memory of a tensor is freed by resizing its storage to 0 bytes, as FSDP does. Views and `DTensor` shards of it
    stay valid, and hold nothing until `wake`.

    Parameters and an optimizer's states sleep apart, by a sleeper each. With the states go the gradients, which are not
    kept: they are 0 after `wake`, since every update starts from there. Those of Megatron-Core are views of its
    buffers, as its parameters are.

    Args:
        module: the model, whose parameters sleep; what FSDP has gathered of it is given back first.
        states: returns the tensors by group and name that sleep in their place: an optimizer's. Those that are
            parameters themselves, or views of these, do not.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        states: Callable[[], Mapping[str, Mapping[str, torch.Tensor]]] | None = None,
    ) -> None:
        self._module = module
        self._states = states
        self._arena: OffloadArena | None = None
        self._device = torch.device("cpu")
        self._moved: dict[torch.UntypedStorage, torch.Tensor | int] = {}
        self.is_asleep = False
        """Whether the tensors hold nothing."""

    def check_awake(self) -> None:
        """Raise `TrainerError` if the tensors hold nothing."""
        if self.is_asleep:
            raise TrainerError(
                "the trainer is asleep, and its tensors hold nothing; expected a call of wake() before"
            )

    @torch.no_grad()
    def sleep(self) -> None:
        """Move the tensors to host memory, which is kept for the next time."""
        if self.is_asleep:
            return
        for module in self._module.modules():
            # A forward pass without a backward one leaves some parameters whole.
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors: list[torch.Tensor] = list(self._module.parameters())
        device = self._device = local(tensors[0]).device
        stored = _storages(tensors, device)
        self._moved = {}
        if self._states is not None:
            for group in self._states().values():
                tensors.extend(group.values())
            stored = _storages(tensors, device)[len(stored) :]
            for storage in _storages(chain.from_iterable(map(_gradients, tensors)), device):
                self._moved[storage] = storage.nbytes()
        size_bytes = sum(piece_bytes(storage.nbytes()) for storage in stored)
        if self._arena is None or self._arena.size_bytes < size_bytes:
            self._arena = None
            self._arena = OffloadArena(size_bytes, device)
        self._arena.reset()
        for storage in stored:
            copy = self._moved[storage] = self._arena.take((storage.nbytes(),), torch.uint8)
            copy.copy_(bytes_of(storage, device), non_blocking=True)
        _synchronize(device)
        # Before the first is freed: after an interrupt, `wake` brings all of them back.
        self.is_asleep = True
        for storage in self._moved:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _return_free_memory()

    @torch.no_grad()
    def wake(self) -> None:
        """Move the tensors back."""
        if not self.is_asleep:
            return
        for storage, copy in self._moved.items():
            if isinstance(copy, int):
                storage.resize_(copy)
                bytes_of(storage, self._device).zero_()
            else:
                storage.resize_(copy.numel())
                bytes_of(storage, self._device).copy_(copy, non_blocking=True)
        # The host memory may be written to again.
        _synchronize(self._device)
        self._moved = {}
        self.is_asleep = False

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a view of a sleeping tensor in host memory, valid until `wake`; None if it does not sleep."""
        shard = local(tensor)
        copy = self._moved.get(shard.untyped_storage())
        if not isinstance(copy, torch.Tensor):
            return None
        view = torch.empty_like(tensor, device="cpu", requires_grad=False)
        start = int(copy.storage_offset()) // shard.itemsize + int(shard.storage_offset())
        local(view).set_(copy.untyped_storage(), start, shard.shape, shard.stride())
        return view


def _gradients(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a parameter: torch's, and Megatron-Core's ``main_grad``."""
    gradients = [getattr(tensor, "main_grad", None)]
    if tensor.is_leaf:
        gradients.insert(0, tensor.grad)
    return [gradient for gradient in gradients if gradient is not None]


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the memory of tensors on a device, each once. A mapped file cannot be resized, and takes none."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in map(local, tensors):
        storage = tensor.untyped_storage()
        if tensor.device == device and storage.nbytes() and storage.resizable():
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a flat view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _return_free_memory() -> None:
    """Return the free pages of the C heap to the system, where its C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
