"""Weights of a model in host memory while an engine sleeps, or between two calls of a part of it."""

import mmap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes to whose multiples each tensor's place is rounded up."""


@dataclass(eq=False)
class HostWeights:
    """Moves parameters and buffers of modules from a device to host memory and back.

    The host memory is one block, which is kept for the next time: its pages are taken once, and pinned once where the
    device is CUDA, exactly as many as are needed (torch's own pinned memory takes up to twice that). Weights that have
    not changed since are not copied again: offloading then takes no time.
    """

    modules: Sequence[torch.nn.Module]
    """Tensors that several of them share are moved once."""
    device: torch.device
    """Where they are when they are not in host memory."""
    _version: int | None = field(default=None, init=False)
    _block: "HostBlock | None" = field(default=None, init=False)
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list[tuple[torch.Tensor, torch.Tensor]], init=False
    )
    _are_away: bool = field(default=False, init=False)
    _dropped: dict[torch.nn.Parameter, torch.Size] = field(
        default_factory=dict[torch.nn.Parameter, torch.Size], init=False
    )

    @torch.no_grad()
    def offload(self, version: int) -> None:
        """Free the device's memory. While they are in host memory, tensors have their values there.

        Args:
            version: of the weights; those of the same version as the last time are not copied.
        """
        if version != self._version:
            self._version = None
            tensors = self._list_tensors()
            needed = HostBlock.size_of(tensors)
            if self._block is None or len(self._block) != needed:
                # Free it before as much is taken again.
                self._copies = []
                self._block = None
                self._block = HostBlock(needed, is_pinned=self.device.type == "cuda")
            self._copies = list(zip(tensors, self._block.split(tensors), strict=True))
            for tensor, copy in self._copies:
                copy.copy_(tensor.data, non_blocking=True)
            self._synchronize()
            self._version = version
        for tensor, copy in self._copies:
            tensor.data = copy
        self._are_away = True

    @torch.no_grad()
    def onload(self) -> None:
        """Copy the tensors back to the device, if they have left it; parameters that were dropped get memory again."""
        for parameter, shape in self._dropped.items():
            parameter.data = parameter.data.new_empty(shape)
        self._dropped = {}
        if self._are_away:
            for tensor, copy in self._copies:
                tensor.data = copy.to(self.device, non_blocking=True, copy=True)
        self._are_away = False
        # An update on another stream may follow.
        self._synchronize()

    def drop(self) -> None:
        """Free the memory of the parameters, and their values, which an update sets after `onload`."""
        self._dropped = {}
        for module in self.modules:
            self._dropped |= {parameter: parameter.shape for parameter in module.parameters()}
        for parameter in self._dropped:
            parameter.data = parameter.data.new_empty(0)

    def _list_tensors(self) -> list[torch.Tensor]:
        by_id: dict[int, torch.Tensor] = {}
        for module in self.modules:
            for tensor in chain(module.parameters(), module.buffers()):
                by_id.setdefault(id(tensor), tensor)
        return list(by_id.values())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class HostBlock:
    """Host memory in huge pages where the system has them; pinned pages are unregistered before they are freed.

    If CUDA cannot pin it, copies still work but are slower.
    """

    def __init__(self, size_bytes: int, *, is_pinned: bool = False) -> None:
        self._pages = mmap.mmap(-1, max(1, size_bytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._size = size_bytes
        self._is_pinned = is_pinned and _pin(self._bytes)

    @staticmethod
    def size_of(tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of a block for these tensors."""
        return sum(_padded_bytes(tensor) for tensor in tensors)

    def __len__(self) -> int:
        return self._size

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            _cudart().cudaHostUnregister(self._bytes.data_ptr())

    def split(self, like: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield a piece of the block for each tensor, of its shape and type."""
        start = 0
        for tensor in like:
            piece = self._bytes[start : start + tensor.nbytes]
            yield piece.view(tensor.dtype).view(tensor.shape)
            start += _padded_bytes(tensor)


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pin(block: torch.Tensor) -> bool:
    """Register memory with CUDA for fast copies, or warn if that fails."""
    device = torch.cuda.current_device()

    def register() -> int:
        torch.cuda.set_device(device)
        return int(_cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))

    # CUDA keeps an error for the thread that made it, where torch would raise it at the next kernel.
    with ThreadPoolExecutor(1) as other_thread:
        error = other_thread.submit(register).result()
    if error:
        # Python shows the same warning once.
        warnings.warn(
            f"CUDA cannot pin host memory (cudaHostRegister: error {error}): copies of weights are slower; expected a "
            "limit of locked memory (ulimit -l) above their size",
            RuntimeWarning,
            stacklevel=2,
        )
    return not error


def _cudart() -> Any:
    return torch.cuda.cudart()
