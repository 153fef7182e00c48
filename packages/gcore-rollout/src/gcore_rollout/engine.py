"""The one interface behind which every generation engine stands."""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gcore_rollout.types import RequestT_contra, SampleT_co

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started."""

    prompt_tokens: int
    """Prompt tokens computed; a prompt shared by the samples of one request counts once. What a sample that goes on
    had begun counts as its prompt."""
    completion_tokens: int
    """Tokens sampled here."""
    num_running: int
    num_waiting: int
    weight_version: int


class Engine(Protocol[RequestT_contra, SampleT_co]):
    """Generates completions of prompts, or other samples, and takes new weights while it does."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 for those the engine was made with."""
        ...

    def generate(self, requests: Sequence[RequestT_contra]) -> AsyncIterator[SampleT_co]:
        """Yield every sample of every request, each as soon as it is finished.

        Closing the iterator early abandons what has not finished.

        Raises:
            RequestError: a prompt does not fit the model.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests now, or all: their samples come out of `generate` with the tokens that they have.

        Every sample still comes exactly once: with finish reason "abort" if it is cut short, and then without tokens
        if it had not started. A later request goes on from those in its ``begun``. Unknown ids are ignored.
        """
        ...

    async def pause(self) -> None:
        """Stop between two steps: no token is sampled until `resume`, and what runs keeps its place. Idempotent.

        Every other method works meanwhile; after `update_weights`, samples go on with the new weights.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        ...

    async def sleep(self) -> None:
        """Free the memory of keys and values and, on a GPU, of the weights, which move to the host's. Idempotent.

        Raises:
            RolloutError: samples are running or waiting: `abort` them, or let them finish.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again; calls of `generate` made since `sleep` start, unless paused. Idempotent."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """Replace the weights in memory; tokens sampled afterwards carry ``version``.

        Args:
            weights: Hugging Face parameter names and full tensors; a tied head may be left out.
            version: larger than the present one.

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
    """An engine that can compute with tensors which somebody else keeps for it."""

    async def update_weights_in_place(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> bool:
        """`Engine.update_weights` that copies only what lies on another device, or has another type.

        Returns:
            Whether the tensors are in use from now on: they must not change until the next update is done.
        """
        ...
