"""What goes into an engine and what comes out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from gcore_rollout.errors import RequestError

FinishReason = Literal["stop", "length", "repetition", "abort"]
"""An end-of-sequence token was sampled; max_tokens were; the last tokens repeat a pattern; `Engine.abort` cut it."""


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """Ends a sample whose last tokens are one pattern ``min_count`` times in a row; as vLLM's parameter of this name.

    Like ``max_tokens`` it cuts off what the policy would have gone on with.
    """

    max_pattern_size: int
    """Longest pattern looked for, in tokens."""
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_pattern_size <= self.max_pattern_size:
            raise RequestError(
                f"min_pattern_size is {self.min_pattern_size} and max_pattern_size is {self.max_pattern_size}: "
                "1 <= min_pattern_size <= max_pattern_size is needed"
            )
        if self.min_count < 2:
            raise RequestError(f"min_count is {self.min_count}: at least 2 is needed")


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
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: at least 1 is needed")
        if not self.temperature >= 0:
            raise RequestError(f"temperature is {self.temperature}: 0 (greedy) or more is needed")


@dataclass(frozen=True, kw_only=True)
class AnyRequest(ABC):
    """One prompt of which ``n`` samples are to be made, of whatever kind."""

    request_id: str
    n: int = 1
    seed: int = 0
    """With the sample's index it fixes the random numbers, whatever else is in the batch."""
    indices: tuple[int, ...] | None = None
    """Which of the ``n`` samples are wanted; None: all."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RequestError(f"request {self.request_id!r} asks for n={self.n} samples: at least 1 is needed")
        wanted = self.sample_indices
        if not wanted or len(set(wanted)) < len(wanted) or not 0 <= min(wanted) <= max(wanted) < self.n:
            raise RequestError(
                f"request {self.request_id!r} has indices {wanted}: one or more of 0 to {self.n - 1} are needed, "
                "each once"
            )

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """The samples that are wanted."""
        return tuple(range(self.n)) if self.indices is None else self.indices

    @property
    @abstractmethod
    def work_per_sample(self) -> int:
        """Steps of the model that a sample takes at most."""

    @abstractmethod
    def aborted(self, index: int) -> Any:
        """A sample that nothing was done for."""

    def part(self, indices: Sequence[int]) -> Self:
        """The request for some of its samples."""
        return replace(self, indices=tuple(indices))

    def going_on(self, begun: "Sequence[AnySample]") -> Self:  # noqa: ARG002 - where nothing can go on, all starts anew
        """The request with more samples that were begun."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class AnySample:
    """What an engine makes, of whatever kind."""

    request_id: str
    index: int
    """Which of the request's ``n`` samples this is."""
    finish_reason: str

    @property
    def work(self) -> int:
        """How much was made, in units that are alike in cost: tokens; of other kinds, samples."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Request(AnyRequest):
    """One prompt to be completed ``n`` times."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    begun: "tuple[Completion, ...]" = ()
    """Samples that were aborted, to go on behind the tokens that they have: ``max_tokens`` counts these, and the new
    completion repeats them, with their log-probs and versions. The request's other samples start anew."""
    images: tuple[bytes, ...] = ()
    """Encoded image files (PNG, JPEG, ...) in the order of their places in the prompt, where the model's image token
    stands once for each merged patch of an image (see `images.VisionProcessor.expand`)."""

    @property
    def work_per_sample(self) -> int:
        """Tokens that a sample has at most."""
        return self.sampling.max_tokens

    def aborted(self, index: int) -> "Completion":
        """A sample that nothing was done for beyond what had been begun."""
        for begun in self.begun:
            if begun.index == index:
                return begun
        return Completion(
            request_id=self.request_id,
            index=index,
            token_ids=np.zeros(0, np.int64),
            log_probs=np.zeros(0, np.float32),
            weight_versions=np.zeros(0, np.int32),
            finish_reason="abort",
        )

    def part(self, indices: Sequence[int]) -> Self:
        """See `AnyRequest.part`."""
        return replace(self, indices=tuple(indices), begun=tuple(c for c in self.begun if c.index in indices))

    def going_on(self, begun: Sequence[AnySample]) -> Self:
        """See `AnyRequest.going_on`."""
        more = [c for c in begun if isinstance(c, Completion)]
        return replace(self, begun=tuple({c.index: c for c in (*self.begun, *more)}.values()))

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError(f"request {self.request_id!r} has an empty prompt")
        super().__post_init__()
        for begun in self.begun:
            self._check_begun(begun)
        indices = [begun.index for begun in self.begun]
        if len(set(indices)) < len(indices):
            raise RequestError(f"request {self.request_id!r} has begun samples {indices}: each index may come once")

    def _check_begun(self, begun: "Completion") -> None:
        name = f"request {self.request_id!r} has a begun sample"
        if begun.request_id != self.request_id:
            raise RequestError(f"{name} of request {begun.request_id!r}: only its own can go on")
        if begun.index not in self.sample_indices:
            raise RequestError(f"{name} {begun.index}: one of those wanted, {self.sample_indices}, is needed")
        if begun.finish_reason != "abort":
            raise RequestError(f"{name} {begun.index} with finish reason {begun.finish_reason!r}: 'abort' is needed")
        shapes = [begun.token_ids.shape, begun.log_probs.shape, begun.weight_versions.shape]
        if shapes != [(begun.token_ids.size,)] * 3:
            raise RequestError(
                f"{name} {begun.index} whose token_ids, log_probs and weight_versions have shapes {shapes}: "
                "one shape [T] is needed"
            )
        if begun.token_ids.size >= self.sampling.max_tokens:
            raise RequestError(
                f"{name} {begun.index} of {begun.token_ids.size} tokens: "
                f"fewer than max_tokens={self.sampling.max_tokens} are needed to go on"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion(AnySample):
    """One sampled answer. Arrays have shape [T], T the number of sampled tokens, end-of-sequence included."""

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    """log p(token) under the distribution it was drawn from (temperature applied; greedy: temperature 1)."""
    weight_versions: NDArray[np.int32]
    """Version of the weights that made each token."""
    finish_reason: FinishReason

    @property
    def work(self) -> int:
        """Tokens."""
        return self.token_ids.size


RequestT = TypeVar("RequestT", bound=AnyRequest, default=Request)
RequestT_contra = TypeVar("RequestT_contra", bound=AnyRequest, default=Request, contravariant=True)
SampleT = TypeVar("SampleT", bound=AnySample, default=Completion)
SampleT_co = TypeVar("SampleT_co", bound=AnySample, default=Completion, covariant=True)
