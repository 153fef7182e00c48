"""What goes into an engine and what comes out."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RequestError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    There is no top-p or top-k: truncation would make the sampled distribution differ from the policy whose gradient
    the trainer takes, and every importance ratio with it.
    """

    max_tokens: int
    """Longest completion, in tokens, end-of-sequence included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: at least 1 is needed")
        if not self.temperature >= 0:
            raise RequestError(f"temperature is {self.temperature}: 0 (greedy) or more is needed")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be completed ``n`` times."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    seed: int = 0
    """With the sample's index it fixes the random numbers, whatever else is in the batch."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError(f"request {self.request_id!r} has an empty prompt")
        if self.n < 1:
            raise RequestError(f"request {self.request_id!r} asks for n={self.n} completions: at least 1 is needed")


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One sampled answer. Arrays have shape [T], T the number of sampled tokens, end-of-sequence included."""

    request_id: str
    index: int
    """Which of the request's ``n`` samples this is."""
    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    """log p(token) under the distribution it was drawn from (temperature applied; greedy: temperature 1)."""
    weight_versions: NDArray[np.int32]
    """Version of the weights that made each token."""
    finish_reason: FinishReason
