"""Updates by low-rank adapters alone: the matrices A and B are sent, and merged into the receiver's frozen weights.

W = W0 + scaling B A (arXiv 2106.09685, section 4.1), where scaling is alpha / rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

A_OF, B_OF = ".lora_A.default.weight", ".lora_B.default.weight"
"""Suffixes that peft adds to a layer's name for its A [rank, in] and its B [out, rank]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterWeights:
    """All adapters of a model at one version."""

    base_version: int
    """Version of the frozen weights with which they were trained."""
    version: int
    scaling: float
    """alpha / rank."""
    tensors: Mapping[str, torch.Tensor]
    """By peft's names: a layer's Hugging Face name followed by `A_OF` or `B_OF`."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors to be sent."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def layers(self) -> frozenset[str]:
        """Hugging Face names of the layers that have one."""
        return frozenset(name.removesuffix(A_OF).removesuffix(B_OF) for name in self.tensors)


def check_adapters(base: Mapping[str, torch.Tensor], adapters: AdapterWeights) -> None:
    """Refuse adapters that these weights cannot be merged with.

    Raises:
        ValueError: a name that is not peft's, an A without its B or the reverse, an unknown layer, or another shape.
    """
    for name in adapters.tensors:
        if not name.endswith((A_OF, B_OF)):
            raise ValueError(f"{name!r} is no name of an adapter; expected one that ends in {A_OF} or {B_OF}")
    for layer in sorted(adapters.layers):
        a, b = adapters.tensors.get(layer + A_OF), adapters.tensors.get(layer + B_OF)
        if a is None or b is None:
            raise ValueError(f"the adapter of {layer!r} has no {'A' if a is None else 'B'}; expected both")
        if f"{layer}.weight" not in base:
            raise ValueError(f"there is an adapter of {layer!r}, and no weight of that layer")
        shape = tuple(base[f"{layer}.weight"].shape)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != shape:
            raise ValueError(
                f"the adapter of {layer!r} has A {list(a.shape)} and B {list(b.shape)}; expected "
                f"[rank, {shape[-1]}] and [{shape[0]}, rank]"
            )


def merged(base: Mapping[str, torch.Tensor], adapters: AdapterWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face names and merged weights, one at a time.

    The arithmetic is in float32 at least, and is rounded to the data type of the weights once, at the end, as in a
    trainer that merges before it exports.

    Args:
        base: the frozen weights, which are left as they are.
        adapters: those that passed `check_adapters`.
    """
    layers = adapters.layers
    for name, tensor in base.items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            a, b = (adapters.tensors[layer + end].to(tensor.device, wide) for end in (A_OF, B_OF))
            yield name, (tensor.to(wide) + adapters.scaling * (b @ a)).to(tensor.dtype)
        else:
            yield name, tensor
