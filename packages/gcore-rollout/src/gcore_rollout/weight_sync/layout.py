"""Layouts of weights: names, data types and shapes, and the places of tensors in a flat buffer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from gcore_rollout.weight_sync.digests import dtype_name

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

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, buffer: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the tensor whose bytes start at this place of a flat uint8 buffer, without a copy."""
        end = start + self.numel * self.dtype.itemsize
        return buffer[start:end].view(self.dtype).view(self.shape)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


Layout = Mapping[str, TensorSpec]


def layout_of(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in weights.items()}


def align(end_bytes: int) -> int:
    """Return the place in a buffer at which the next tensor starts."""
    return -(-end_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Packing:
    """The places of tensors that follow each other in a flat uint8 buffer; `unpack` finds them again."""

    def __init__(self) -> None:
        self.layout: dict[str, TensorSpec] = {}
        self.size_bytes = 0

    def place(self, name: str, tensor: torch.Tensor) -> int:
        """Return the place of the next tensor, which may be on the meta device."""
        start = align(self.size_bytes)
        self.size_bytes = start + tensor.nbytes
        self.layout[name] = TensorSpec.of(tensor)
        return start


def unpack(buffer: torch.Tensor, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and views of the tensors in a buffer of this layout."""
    end = 0
    for name, spec in layout.items():
        start = align(end)
        tensor = spec.view(buffer, start)
        end = start + tensor.nbytes
        yield name, tensor


def check_layout(layout: Layout, expected: Layout) -> None:
    """Refuse weights of another layout by a `ValueError`: unknown or missing names, another shape or data type."""
    unknown = sorted(layout.keys() - expected.keys())
    missing = sorted(expected.keys() - layout.keys())
    if unknown or missing:
        raise ValueError(
            f"weights do not match: unknown names {unknown[:3]}, missing names {missing[:3]}"
        )
    for name, spec in layout.items():
        if spec != expected[name]:
            raise ValueError(f"weight {name!r} is {spec}; expected {expected[name]}")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits of a contiguous tensor as integers, shape [N], in which NaN equals itself and -0.0 is not 0.0."""
    if tensor.dtype.itemsize not in _INTEGERS:
        raise ValueError(
            f"{tensor.dtype} has elements of {tensor.dtype.itemsize} bytes; expected 8 or fewer"
        )
    return tensor.detach().view(-1).view(_INTEGERS[tensor.dtype.itemsize])


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
