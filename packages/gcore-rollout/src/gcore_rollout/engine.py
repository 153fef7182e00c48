"""The one interface behind which every generation engine stands."""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gcore_rollout.types import Completion, Request

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started."""

    prompt_tokens: int
    """Prompt tokens computed; a prompt shared by the samples of one request counts once."""
    completion_tokens: int
    num_running: int
    num_waiting: int
    weight_version: int


class Engine(Protocol):
    """Generates completions, and takes new weights while it does."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 for those the engine was made with."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield every completion of every request, each as soon as it is finished.

        Closing the iterator early abandons what has not finished.

        Raises:
            RequestError: a prompt does not fit the model.
        """
        ...

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """Replace the weights in memory; tokens sampled afterwards carry ``version``.

        Args:
            weights: Hugging Face parameter names and full tensors; a tied head may be left out.
            version: larger than the present one.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Free the engine. Idempotent."""
        ...
