"""Layouts of weights: names, data types and shapes, places of tensors in a flat buffer, and the parts of ranks."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
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
    """The places of tensors that follow each other in a flat uint8 buffer; `unpack` finds them again.

    ``whole`` is a buffer of a fixed size; without one, `place` alone works, or a subclass has `buffer`.
    """

    def __init__(self, whole: torch.Tensor | None = None) -> None:
        self.layout: dict[str, TensorSpec] = {}
        self.size_bytes = 0
        self._whole = whole

    def place(self, name: str, tensor: torch.Tensor) -> int:
        """Return the place of the next tensor, which may be on the meta device."""
        start = align(self.size_bytes)
        self.size_bytes = start + tensor.nbytes
        self.layout[name] = TensorSpec.of(tensor)
        return start

    def buffer(self, size_bytes: int = 0) -> torch.Tensor:
        """Return the buffer, which has at least so many bytes."""
        assert self._whole is not None
        assert size_bytes <= self._whole.numel()
        return self._whole

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the next tensor to its place."""
        start = self.place(name, tensor)
        self.layout[name].view(self.buffer(self.size_bytes), start).copy_(tensor.detach())

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a buffer of a fixed size has space for one more tensor."""
        return align(self.size_bytes) + tensor.nbytes <= self.buffer().numel()


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


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    new: Mapping[str, torch.Tensor],
    *,
    optional: frozenset[str],
) -> None:
    """Refuse unknown and missing names and other shapes by a `ValueError`; ``optional`` names may be left out."""
    unknown = sorted(new.keys() - shapes.keys() - optional)
    missing = sorted(shapes.keys() - new.keys() - optional)
    if unknown or missing:
        raise ValueError(
            f"weights do not match the model: unknown names {unknown[:3]}, missing names {missing[:3]}"
        )
    for name, tensor in new.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"shape of weight {name!r} is {tuple(tensor.shape)}; expected {shapes[name]}"
            )


def iterate_checked(
    current: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    at_once: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that match the engine's current ones, by `check_shapes`; of tied tensors any one will do.

    Args:
        at_once: check all before the first is yielded, so that all are in memory together; otherwise one by one.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
    names: set[str] = set()
    unchecked: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        names.add(name)
        if at_once:
            unchecked[name] = tensor
        else:
            check_shapes(
                {n: shapes[n] for n in shapes.keys() & {name}}, {name: tensor}, optional=frozenset()
            )
            yield name, tensor
    pointers = {current[name].data_ptr() for name in names & current.keys()}
    tied = frozenset(
        name
        for name, tensor in current.items()
        if name not in names and tensor.data_ptr() in pointers
    )
    unchecked_shapes = {
        name: shape for name, shape in shapes.items() if at_once or name not in names
    }
    check_shapes(unchecked_shapes, unchecked, optional=tied)
    yield from unchecked.items()


def group_into_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], size_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in buckets of at most this size; a larger tensor is one of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > size_bytes:
            yield bucket
            bucket = {}
            size = 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def divide_weights(
    weights: Iterable[tuple[str, torch.Tensor]], *, rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that all ranks have one at a time, those that other ranks send on the meta device.

    The rank with the fewest bytes so far sends the next tensor: all ranks iterate over the same tensors in the same
    order, and so divide them alike.
    """
    sent_bytes = [0] * num_ranks
    for name, tensor in weights:
        sender = min(range(num_ranks), key=sent_bytes.__getitem__)
        sent_bytes[sender] += tensor.nbytes
        if sender != rank:
            tensor = tensor.to("meta")
        yield name, tensor


def write_part(weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> tuple[Layout, int]:
    """Write the tensors that are not on the meta device to a file, each to its place in the layout of all.

    Returns:
        The layout, and the size of the file in bytes once all ranks have written.
    """
    packing = Packing()
    with path.open("r+b", buffering=0) as file:
        for name, tensor in weights:
            start = packing.place(name, tensor)
            if not tensor.is_meta and tensor.nbytes:
                flat = tensor.detach().cpu().contiguous().view(-1)
                data = flat.view(torch.uint8).numpy().data
                while data:
                    written = os.pwrite(file.fileno(), data, start)
                    data = data[written:]
                    start += written
    return packing.layout, packing.size_bytes
