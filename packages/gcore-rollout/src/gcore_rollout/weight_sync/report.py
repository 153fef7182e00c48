"""What an engine reports about the weights that it computes with, and who asks for it. Torch is not needed here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Digest(NamedTuple):
    """64-bit checksums of a tensor; made by `weight_digests.digest`."""

    ordered: int
    """Depends on every value and on its place."""
    unordered: int
    """Depends on the values alone, taken 8 bytes at a time."""


Digests = Mapping[str, Mapping[str, Digest]]
"""Of one version: for each published name, the digest of the tensor in each of several data types, by torch's name."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One tensor that an engine computes with."""

    name: str
    """Hugging Face name of the parameter."""
    source: str
    """Name of the published tensor that it has to equal: its own name, or the embedding's for a tied head."""
    dtype: str
    """Such as bfloat16."""
    size_bytes: int
    digest: Digest
    seconds: float
    """Time that the digest took."""


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Tensors that an engine computes with, read from its model and not from what it was sent."""

    version: int
    tensors: Sequence[HeldTensor]


@runtime_checkable
class ReportsWeights(Protocol):
    """An engine that can report the weights that it computes with."""

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        """Digest the tensors of these names (`HeldTensor.name`), or all that can be compared.

        Returns:
            None if the engine behind this one cannot report its weights.
        """
        ...


@runtime_checkable
class ChecksWeights(Protocol):
    """An engine that compares the weights that it has with those of the trainer."""

    async def check_weights(self, digests: Digests) -> None:
        """Compare every tensor with the trainer's, at the engine's present version.

        Args:
            digests: of the trainer's weights.

        Raises:
            WrongWeightsError: a tensor differs.
        """
        ...


@runtime_checkable
class HasDigests(Protocol):
    """Weights that come with the digests that the trainer made of them."""

    @property
    def digests(self) -> Digests:
        """Of the tensors that have been iterated over; empty if none were made."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


async def report_weights(engine: Any, names: Sequence[str] | None = None) -> HeldWeights | None:
    """What an engine reports; None if it cannot."""
    return await engine.held_weights(names) if isinstance(engine, ReportsWeights) else None


async def check_weights(engine: Any, digests: Digests) -> None:
    """Have an engine compare its weights with these, if it can.

    Raises:
        WrongWeightsError: a tensor differs.
    """
    if isinstance(engine, ChecksWeights):
        await engine.check_weights(digests)


def digests_of(weights: Any) -> Digests:
    """The digests that come with weights; empty if there are none."""
    return weights.digests if isinstance(weights, HasDigests) else {}


def all_digests(weights: Iterable[tuple[str, Any]]) -> Digests:
    """Digests of all tensors, of which none is copied; empty if the weights come without."""
    for _ in weights:
        pass
    return digests_of(weights)
