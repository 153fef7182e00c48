"""Layouts of weights: names, data types, shapes, and places in a flat buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Data type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    @classmethod
    def from_plain(cls, dtype: str, shape: list[int]) -> Self:
        """Return the spec that `plain` returned values of."""
        return cls(dtype=getattr(torch, dtype), shape=tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def plain(self) -> tuple[str, list[int]]:
        """Return values that JSON can hold."""
        return str(self.dtype).removeprefix("torch."), list(self.shape)

    def view(self, buffer: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the tensor whose bytes start at this place of a flat uint8 buffer, without a copy."""
        return buffer[start : start + self.size_bytes].view(self.dtype).view(self.shape)

    def __str__(self) -> str:
        dtype, shape = self.plain()
        return f"{dtype} {shape}"


Layout = Mapping[str, TensorSpec]


def aligned(end_bytes: int) -> int:
    """Return the place in a buffer at which the next tensor starts."""
    return -(-end_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def layout_of(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in weights.items()}


def check_layout(given: Layout, own: Layout) -> None:
    """Refuse weights of another layout by a `ValueError`: unknown or missing names, another shape or data type."""
    unknown, missing = sorted(given.keys() - own.keys()), sorted(own.keys() - given.keys())
    if unknown or missing:
        raise ValueError(f"weights do not match: unknown names {unknown[:3]}, missing names {missing[:3]}")
    for name, spec in given.items():
        if spec != own[name]:
            raise ValueError(f"weight {name!r} is {spec}; expected {own[name]}")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits of a contiguous tensor as integers, shape [N], in which NaN equals itself and -0.0 is not 0.0."""
    if tensor.dtype.itemsize not in _INTEGERS:
        raise ValueError(f"{tensor.dtype} has elements of {tensor.dtype.itemsize} bytes; expected 8 or fewer")
    return tensor.detach().view(-1).view(_INTEGERS[tensor.dtype.itemsize])


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
