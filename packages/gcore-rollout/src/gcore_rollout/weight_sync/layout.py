"""Layouts of weights: names, data types and shapes, places of tensors in a flat buffer, and the parts of ranks."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch

from gcore_rollout.weight_sync.digests import dtype_name
from gcore_rollout.weight_sync.staging import stage_each

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT_BYTES = 64
_LAYER = re.compile(r".*?\.\d+\.")


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

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, buffer: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the tensor whose bytes start at this place of a flat uint8 buffer, without a copy."""
        return buffer[start : start + self.nbytes].view(self.dtype).view(self.shape)

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
    _check_names(layout.keys(), expected.keys())
    for name, spec in layout.items():
        if spec != expected[name]:
            raise ValueError(f"weight {name!r} is {spec}; expected {expected[name]}")


def _check_names(names: Set[str], expected: Set[str], match: str = "match") -> None:
    unknown = sorted(names - expected)
    missing = sorted(expected - names)
    if unknown or missing:
        raise ValueError(
            f"weights do not {match}: unknown names {unknown[:3]}, missing names {missing[:3]}"
        )


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
    new: Mapping[str, torch.Tensor] | Layout,
    *,
    optional: frozenset[str],
) -> None:
    """Refuse unknown and missing names and other shapes by a `ValueError`; ``optional`` names may be left out."""
    _check_names(new.keys() - optional, shapes.keys() - optional, "match the model")
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
        weights: if they have a ``layout``, all are checked by it, and not kept in memory together.
        at_once: check all before the first is yielded, so that all are in memory together; otherwise one by one.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
    if at_once or hasattr(weights, "layout"):
        layout, weights = with_layout(weights)
        check_shapes(shapes, layout, optional=_tied_names(current, layout.keys()))
        yield from weights
        return
    names: set[str] = set()
    for name, tensor in weights:
        names.add(name)
        shape = {n: shapes[n] for n in shapes.keys() & {name}}
        check_shapes(shape, {name: tensor}, optional=frozenset())
        yield name, tensor
    _check_names(names, shapes.keys() - _tied_names(current, names), "match the model")


def with_layout(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> tuple[Layout, Iterable[tuple[str, torch.Tensor]]]:
    """Return the layout of weights, and the weights; those that have no ``layout`` are read, and kept in memory."""
    layout: Layout | None = getattr(weights, "layout", None)
    if layout is not None:
        return layout, weights
    tensors = dict(weights)
    return layout_of(tensors), tensors.items()


def _tied_names(current: Mapping[str, torch.Tensor], names: Set[str]) -> frozenset[str]:
    """Return the other names of tensors that have one of these names."""
    pointers = {current[name].data_ptr() for name in names & current.keys()}
    tied: set[str] = set()
    for name, tensor in current.items():
        if name not in names and tensor.data_ptr() in pointers:
            tied.add(name)
    return frozenset(tied)


def group_into_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], size_bytes: int, *, whole_layers: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in buckets of at most this size; a larger tensor is one of its own.

    With ``whole_layers`` a bucket ends with a layer, by which it may be larger.
    """
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    layer = ""
    for name, tensor in weights:
        may_end = not whole_layers or layer_of(name) != layer
        if bucket and may_end and size + tensor.nbytes > size_bytes:
            yield bucket
            bucket = {}
            size = 0
        bucket[name] = tensor
        size += tensor.nbytes
        layer = layer_of(name)
    if bucket:
        yield bucket


def layer_of(name: str) -> str:
    """Return the start of a tensor's name that all tensors of its layer share: up to the first number."""
    numbered = _LAYER.match(name)
    return numbered[0] if numbered else name


def divide_weights(
    weights: Iterable[tuple[str, torch.Tensor]], *, rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that all ranks have one at a time, those that other ranks send on the meta device.

    The rank with the fewest bytes so far sends the next layer: all ranks iterate over the same tensors in the same
    order, and so divide them alike. Engines that take the ranks' parts one after the other get whole layers.
    """
    sent_bytes = [0] * num_ranks
    sender = 0
    layer: str | None = None
    for name, tensor in weights:
        if layer_of(name) != layer:
            layer = layer_of(name)
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
        for name, tensor in stage_each(weights):
            start = packing.place(name, tensor)
            if not tensor.is_meta and tensor.nbytes:
                flat = tensor.detach().contiguous().view(-1)
                data = flat.view(torch.uint8).numpy().data
                while data:
                    written = os.pwrite(file.fileno(), data, start)
                    data = data[written:]
                    start += written
    return packing.layout, packing.size_bytes
