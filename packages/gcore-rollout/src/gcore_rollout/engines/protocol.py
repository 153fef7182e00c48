"""The protocol of all generation engines."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gcore_rollout.engines.types import RequestT_contra, SampleT_co

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started."""

    prompt_tokens: int
    """Prompt tokens computed. A prompt shared by the samples of one request counts once; the partial completion that a
    sample continues counts as its prompt."""
    completion_tokens: int
    """Tokens sampled here."""
    num_running: int
    num_waiting: int
    weight_version: int


class Engine(Protocol[RequestT_contra, SampleT_co]):
    """Generates completions of prompts, or other samples, and takes new weights meanwhile."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 for the initial ones."""
        ...

    def generate(self, requests: Sequence[RequestT_contra]) -> AsyncIterator[SampleT_co]:
        """Yield every sample of every request, each as soon as it is finished.

        Closing the iterator early abandons unfinished samples.

        Raises:
            RequestError: a prompt does not fit the model.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests now, or all: `generate` yields their samples with the tokens sampled so far.

        Every sample still comes exactly once: with finish reason "abort" if it is cut short, and then without tokens
        if it had not started. A later request continues those in its ``prefixes``. Unknown ids are ignored.
        """
        ...

    async def pause(self) -> None:
        """Stop between two steps: no token is sampled until `resume`, and running samples keep their state. Idempotent.

        Every other method works meanwhile; after `update_weights`, samples continue with the new weights.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        ...

    async def sleep(self) -> None:
        """Free the memory of keys and values and, on a GPU, move the weights to the host's memory. Idempotent.

        Raises:
            RolloutError: samples are running or waiting: `abort` them, or let them finish.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again; calls of `generate` made since `sleep` start, unless paused. Idempotent."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """Replace the weights in memory; tokens sampled afterwards carry ``version``.

        Args:
            weights: Hugging Face parameter names and full tensors; a tied head may be left out.
            version: larger than the current one.

        Raises:
            RolloutError: the engine is asleep.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Free the engine. Idempotent."""
        ...


@runtime_checkable
class TakesWeightsInPlace(Protocol):
    """An engine that can compute with tensors which the caller owns."""

    async def update_weights_in_place(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> bool:
        """Update the weights as `Engine.update_weights`, copying only tensors on another device or of another type.

        Returns:
            Whether the tensors are in use from now on: they must not change until the next update is done.
        """
        ...


@runtime_checkable
class KeptWeights(Protocol):
    """Weights that any number of readers can iterate over, also later: `SharedWeights`, `WeightReferences`."""

    @property
    def is_whole(self) -> bool:
        """True if there are weights."""
        ...

    @property
    def num_writes(self) -> int:
        """Number of times that the weights have been written: two equal numbers mean the same weights."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Prevent writes over the current weights while this is held."""
        ...

    def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]: ...
