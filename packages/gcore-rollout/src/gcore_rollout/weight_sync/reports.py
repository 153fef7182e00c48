"""Reports of the weights that engines compute with, and digests to compare them with.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Digest(NamedTuple):
    """64-bit checksums of a tensor; see `weight_sync.digests.digest`."""

    ordered: int
    """Depends on all values and their places."""
    unordered: int
    """Depends on the values alone, 8 bytes at a time."""


Digests = Mapping[str, Mapping[str, Digest]]
"""Digests of one version: for each published name, the digest in each of several data types, by torch's name."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One tensor that an engine computes with.

    Example:
        >>> import asyncio
        >>> engine = HFEngine.from_pretrained("model")
        >>> tensor = asyncio.run(engine.held_weights(["model.norm.weight"])).tensors[0]
        >>> tensor.source, tensor.dtype, tensor.size_bytes
        ('model.norm.weight', 'float32', 512)
        >>> expected = DigestedWeights([("model.norm.weight", torch.ones(128))])
        >>> digests = dict(expected) and expected.digests
        >>> tensor.digest == digests["model.norm.weight"]["float32"]
        True
    """

    name: str
    """Hugging Face name of the parameter."""
    source: str
    """Name of the published tensor that it has to equal: its own name, or the embedding's for a tied head."""
    dtype: str
    """Data type, such as bfloat16."""
    size_bytes: int
    digest: Digest
    seconds: float
    """Time that the digest took."""


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Tensors that an engine computes with, read from its model and not from the update.

    Example:
        >>> import asyncio
        >>> held = asyncio.run(HFEngine.from_pretrained("model").held_weights())
        >>> held.version, sum(tensor.size_bytes for tensor in held.tensors)
        (0, 3282432)
        >>> [tensor.source for tensor in held.tensors if tensor.name == "lm_head.weight"]
        ['model.embed_tokens.weight']
    """

    version: int
    tensors: Sequence[HeldTensor]


async def report_weights(engine: Any, names: Sequence[str] | None = None) -> HeldWeights | None:
    """Digest the tensors of these names (`HeldTensor.name`), or all that can be compared.

    Returns:
        The answer of the engine's method ``held_weights(names)``; None if it has none, or wraps one that has none.
    """
    report = getattr(engine, "held_weights", None)
    if report is None:
        return None
    return await report(names)


async def check_weights(engine: Any, digests: Digests) -> None:
    """Have an engine with a method `check_weights` compare its weights with digests; see `InstrumentedEngine`."""
    if hasattr(engine, "check_weights"):
        await engine.check_weights(digests)


def get_weights_gpu(engine: Any) -> str | None:
    """Return the UUID of the GPU that an engine's weights are on; None: they are on none, or it does not report it."""
    return getattr(engine, "weights_gpu", None)
