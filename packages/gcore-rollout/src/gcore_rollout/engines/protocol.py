"""Engines as their callers see them: requests, samples, and the calls of every engine.

This module does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from gcore_rollout.errors import EngineDiedError, RequestError, RolloutError
from gcore_rollout.prompts import PromptImages

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "repetition", "abort"]
"""An end-of-sequence token was sampled, or a stop string is complete; max_tokens were sampled; the last tokens repeat a
pattern; `Engine.abort` cut it."""
EpisodeEnd = Literal["done", "truncated_turn", "length", "max_turns", "timeout"]
"""The environment or the agent ended it; a turn was cut off before its end, such as at ``max_tokens_per_turn``; the
tokens of the episode were used up; its turns were; its time was."""


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """Ends a sample whose last tokens are one pattern ``min_count`` times in a row; as vLLM's parameter of this name.

    Like ``max_tokens`` it cuts off what the policy would have continued with.

    Example:
        >>> import asyncio
        >>> detection = RepetitionDetection(max_pattern_size=4, min_count=3)
        >>> sampling = SamplingParams(max_tokens=100, temperature=0.0, repetition_detection=detection)
        >>> engine = HFEngine.from_pretrained("model")
        >>> async def main() -> list[str]:
        ...     request = Request(request_id="a", prompt_token_ids=(40,), sampling=sampling)
        ...     return [completion.finish_reason async for completion in engine.generate([request])]
        >>> asyncio.run(main())
        ['repetition']
    """

    max_pattern_size: int
    """Longest pattern looked for, in tokens."""
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_pattern_size <= self.max_pattern_size:
            raise RequestError(
                f"min_pattern_size is {self.min_pattern_size}; expected 1 to max_pattern_size={self.max_pattern_size}"
            )
        if self.min_count < 2:
            raise RequestError(f"min_count is {self.min_count}; expected at least 2")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of the sampling of tokens.

    With ``top_p`` or ``top_k`` the distribution that is sampled from is not the model's. An engine made with
    ``return_sampling_mask`` returns `Completion.kept_ids`, over which the trainer normalises as the engine does.

    Example:
        >>> training = SamplingParams(max_tokens=1024)
        >>> evaluation = SamplingParams(max_tokens=1024, temperature=0.6, top_p=0.95, stop=("</answer>",))
        >>> training.truncates, evaluation.truncates
        (False, True)
        >>> SamplingParams(max_tokens=0)
        Traceback (most recent call last):
            ...
        gcore_rollout.errors.RequestError: max_tokens is 0; expected at least 1
    """

    max_tokens: int
    """Longest completion, in tokens, end-of-sequence included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    """Draw from the fewest most probable tokens with at least this probability together, after the temperature; 1: from
    all."""
    top_k: int = -1
    """Draw from so many most probable tokens; -1 or 0: from all. Applied before ``top_p``."""
    repetition_detection: RepetitionDetection | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a completion with the token that completes one, as an end-of-sequence token does; that token,
    which may have more text after the string, and those before it stay in the completion."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not self.temperature >= 0:
            raise RequestError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; expected a number above 0, at most 1")
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}; expected 1 or more, or -1 for all tokens")
        if isinstance(self.stop, str) or not all(self.stop):
            raise RequestError(f"stop is {self.stop!r}; expected strings that are not empty")

    @property
    def truncates(self) -> bool:
        """True if some tokens are never drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, kw_only=True)
class AnyRequest(ABC):
    """One prompt for which ``n`` samples of any kind are to be made."""

    request_id: str
    n: int = 1
    seed: int = 0
    """Together with the sample's index, determines the random numbers, whatever else is in the batch."""
    indices: tuple[int, ...] | None = None
    """Which of the ``n`` samples are wanted; None: all."""
    session: str = ""
    """Requests of one session share a long prefix, as the turns of a conversation do: the engine that has made the last
    one makes the next one, too, unless others have less to do."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RequestError(f"n of request {self.request_id!r} is {self.n}; expected at least 1")
        indices = self.sample_indices
        if (
            not indices
            or len(set(indices)) < len(indices)
            or not 0 <= min(indices) <= max(indices) < self.n
        ):
            raise RequestError(
                f"indices of request {self.request_id!r} are {indices}; expected one or more of 0 to {self.n - 1}, "
                "each once"
            )

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """Indices of the samples that are wanted."""
        if self.indices is None:
            return tuple(range(self.n))
        return self.indices

    @property
    def continued_indices(self) -> tuple[int, ...]:
        """Indices of the samples of which there is a part already."""
        return ()

    @property
    @abstractmethod
    def work_per_sample(self) -> int:
        """Number of model steps that a sample is expected to take; where that is unknown, the largest."""

    @abstractmethod
    def aborted(self, index: int) -> Any:
        """Return the aborted sample of this index, for which nothing was computed."""

    def part(self, indices: Sequence[int]) -> Self:
        """Return the request for some of its samples."""
        return replace(self, indices=tuple(indices))

    can_continue: ClassVar[bool] = False
    """Whether another engine can continue an aborted sample; otherwise it starts again."""

    def continuing(self, prefixes: "Sequence[AnySample]") -> Self:  # noqa: ARG002 - by default samples start again
        """Return the request with more samples to be continued."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class AnySample:
    """A sample that an engine makes, of any kind.

    Example:
        >>> def count_aborted(samples: Sequence[AnySample]) -> int:
        ...     return sum(sample.finish_reason == "abort" for sample in samples)
        >>> text = Request(request_id="a", prompt_token_ids=(40,), sampling=SamplingParams(max_tokens=3))
        >>> image = ImageRequest(request_id="b", prompt="a cube", sampling=ImageSampling(num_inference_steps=10))
        >>> count_aborted([text.aborted(0), image.aborted(0)])
        2
    """

    request_id: str
    index: int
    """Which of the request's ``n`` samples this is."""
    finish_reason: str

    @property
    def work(self) -> int:
        """Work done, in units of similar cost: tokens, or for other kinds samples."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Request(AnyRequest):
    """One prompt to be completed ``n`` times.

    Example:
        >>> sampling = SamplingParams(max_tokens=64)
        >>> request = Request(request_id="a", prompt_token_ids=(40, 41), n=4, seed=7, sampling=sampling)
        >>> request.part([0, 2]).sample_indices
        (0, 2)
        >>> arrays = {"token_ids": np.array([5]), "log_probs": np.float32([-1]), "weight_versions": np.int32([0])}
        >>> aborted = replace(request.aborted(2), **arrays)
        >>> request.continuing([aborted]).continued_indices
        (2,)
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prefixes: "tuple[Completion, ...]" = ()
    """Aborted samples to be continued after the tokens that they have: ``max_tokens`` counts these, and the new
    completion repeats them, with their log-probs and versions. The request's other samples start from the prompt."""
    images: tuple[bytes, ...] = ()
    """Encoded image files (PNG, JPEG, ...) in the order of their places in the prompt, where the model's image token
    stands once for each feature of an image (see `VisionProcessor.expand`)."""
    image_starts: tuple[int, ...] | None = None
    """First token of each image in the prompt, where other image tokens are text: those that the policy wrote in its
    earlier turns. None: each run of image tokens is an image."""
    expected_tokens: int | None = None
    """Expected length of a completion, for the division of work: no token depends on it. None: unknown."""
    can_continue = True

    @property
    def continued_indices(self) -> tuple[int, ...]:
        return tuple(prefix.index for prefix in self.prefixes if prefix.token_ids.size)

    @property
    def work_per_sample(self) -> int:
        max_tokens = self.sampling.max_tokens
        return min(self.expected_tokens or max_tokens, max_tokens)

    def aborted(self, index: int) -> "Completion":
        """Return the prefix of this index, or an empty completion."""
        for prefix in self.prefixes:
            if prefix.index == index:
                return prefix
        return Completion(
            request_id=self.request_id,
            index=index,
            token_ids=np.zeros(0, np.int64),
            log_probs=np.zeros(0, np.float32),
            weight_versions=np.zeros(0, np.int32),
            finish_reason="abort",
        )

    def part(self, indices: Sequence[int]) -> Self:
        return replace(
            self,
            indices=tuple(indices),
            prefixes=tuple(c for c in self.prefixes if c.index in indices),
        )

    def continuing(self, prefixes: Sequence[AnySample]) -> Self:
        by_index = {prefix.index: prefix for prefix in self.prefixes}
        for prefix in prefixes:
            if isinstance(prefix, Completion):
                by_index[prefix.index] = prefix
        return replace(self, prefixes=tuple(by_index.values()))

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError(
                f"request {self.request_id!r} has an empty prompt; expected at least 1 token"
            )
        if self.expected_tokens is not None and self.expected_tokens < 1:
            fault = f"expected_tokens of request {self.request_id!r} is {self.expected_tokens}"
            raise RequestError(f"{fault}; expected at least 1, or None")
        super().__post_init__()
        max_tokens = self.sampling.max_tokens
        indices = [prefix.index for prefix in self.prefixes]
        for prefix in self.prefixes:
            size = prefix.token_ids.size
            shapes = [prefix.token_ids.shape, prefix.log_probs.shape, prefix.weight_versions.shape]
            if prefix.request_id != self.request_id:
                fault = f"has request_id {prefix.request_id!r}; expected its own"
            elif prefix.index not in self.sample_indices:
                fault = f"has index {prefix.index}; expected a wanted one, {self.sample_indices}"
            elif prefix.finish_reason != "abort":
                fault = f"has finish_reason {prefix.finish_reason!r}; expected 'abort'"
            elif shapes != [(size,)] * 3:
                fault = f"has token_ids, log_probs and weight_versions of shapes {shapes}; expected one shape [T]"
            elif size >= max_tokens:
                fault = f"has {size} tokens; expected fewer than max_tokens={max_tokens}"
            else:
                continue
            raise RequestError(f"a prefix of request {self.request_id!r} {fault}")
        if len(set(indices)) < len(indices):
            raise RequestError(
                f"prefixes of request {self.request_id!r} have indices {indices}; expected each once"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion(AnySample):
    """One answer to a prompt, from the engine to the trainer. Arrays have shape [T], T the number of its tokens.

    An engine fills in what it samples, end-of-sequence included; the score and what belongs to it follow.

    Example:
        >>> completion = Completion(
        ...     request_id="a",
        ...     index=0,
        ...     token_ids=np.array([40, 41, 1]),
        ...     log_probs=np.float32([-0.5, -1.0, -0.1]),
        ...     weight_versions=np.int32([3, 3, 4]),
        ...     finish_reason="stop",
        ... )
        >>> completion.work, completion.is_truncated, completion.sampled_versions.max().item()
        (3, False, 4)
    """

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    """log p(token) under the distribution it was drawn from (temperature applied; greedy: temperature 1)."""
    weight_versions: NDArray[np.int32]
    """Version of the weights that made each token."""
    finish_reason: FinishReason
    routed_experts: NDArray[np.int16] | None = None
    """[P + T - 1, L, K] the K experts of a mixture that prompt and tokens, without the last one, passed through in each
    of L layers with experts, as they were when the next token was sampled; of an episode [P + T, L, K]. -1: unknown.
    None: the engine was not asked for them."""
    kept_counts: NDArray[np.int32] | None = None
    """Tokens among which ``top_k`` and ``top_p`` drew each one; 0: all. None: all, or the engine was not asked."""
    kept_ids: NDArray[np.int32] | None = None
    """[sum of kept_counts] these tokens, those of the first token first."""
    mask: NDArray[np.bool_] | None = None
    """Tokens that the policy sampled, against those of an environment between its turns, which have log-probs of 0 and
    versions of -1; None: it sampled all of them."""
    forks: NDArray[np.int64] | None = None
    """[F, 2] of an episode whose conversations branch: token ``forks[i, 0]`` follows token ``forks[i, 1]``, and not the
    one before it; -1: it follows the prompt; -2: it follows nothing. None: there is one conversation."""
    credit: NDArray[np.float32] | None = None
    """[T] value of each token's turn, if advantages are not made of the score; see `Group.center_credit`."""
    agents: Mapping[str, NDArray[np.int64]] = field(default_factory=dict[str, NDArray[np.int64]])
    """[N, 2] of an episode's agents, by name: where their turns that are trained on start and stop among the tokens. An
    agent that is not named has an empty name."""
    states: Mapping[str, NDArray[np.int64]] = field(default_factory=dict[str, NDArray[np.int64]])
    """[N] for the turns in `agents`, if they have credit: a number that is equal where what the environment said last
    is equal."""
    end: EpisodeEnd | None = None
    """How an episode of several turns ended; None: there is one turn."""
    turns: tuple[str, ...] = ()
    """The turns of an episode as text."""
    prompt_ids: NDArray[np.int64] | None = None
    """[P] tokens before the first turn of an episode, which its environment opened; None: those of the request."""
    images: PromptImages | None = None
    """Images of an episode, and where they start in prompt and response; None: those of the prompt, if it has any."""
    score: float = 0.0
    """The reward's score; 0 before it is scored."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name."""
    answer: str | None = None
    """The answer that the reward found in the text; see `Scored.answer`."""
    feedback: str = ""
    """The reward's text on the response; see `Scored.feedback`."""

    @property
    def work(self) -> int:
        """Number of tokens."""
        return self.token_ids.size

    @property
    def is_truncated(self) -> bool:
        """True if it was cut off before its end."""
        return self.finish_reason != "stop"

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """Versions of the weights that made the tokens which the policy sampled."""
        if self.mask is None:
            return self.weight_versions
        return self.weight_versions[self.mask]

    def scored_turns(self) -> list[tuple[int, int, float, int]]:
        """Return start, stop, credit and state of each turn, if turns have credit."""
        turns: list[tuple[int, int, float, int]] = []
        if self.credit is not None:
            for agent, states in self.states.items():
                spans = self.agents[agent].tolist()
                for (start, stop), state in zip(spans, states.tolist(), strict=True):
                    turns.append((start, stop, float(self.credit[start]), state))
        return turns

    def mean_credit(self) -> dict[str, float]:
        """Return the mean credit of each agent's turns, if they have credit."""
        means: dict[str, float] = {}
        if self.credit is not None:
            for agent, spans in self.agents.items():
                means[agent] = float(self.credit[spans[:, 0]].mean(dtype=np.float64))
        return means

    def state(self) -> dict[str, Any]:
        """Return plain arrays, texts and numbers for a checkpoint, without the texts of an episode's turns."""
        state = {name: value for name, value in vars(self).items() if value is not None}
        del state["turns"]
        if self.images is not None:
            state["images"] = self.images.state()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the completion that `state` gave this state for; older checkpoints have ``truncated`` in it."""
        fields = dict(state)
        if "truncated" in fields:
            fields["finish_reason"] = "length" if fields.pop("truncated") else "stop"
        if "images" in fields:
            fields["images"] = PromptImages.from_state(fields["images"])
        return cls(**fields)


RequestT = TypeVar("RequestT", bound=AnyRequest, default=Request)
RequestT_contra = TypeVar("RequestT_contra", bound=AnyRequest, default=Request, contravariant=True)
SampleT = TypeVar("SampleT", bound=AnySample, default=Completion)
SampleT_co = TypeVar("SampleT_co", bound=AnySample, default=Completion, covariant=True)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started.

    Example:
        >>> def report(stats: EngineStats) -> str:
        ...     return f"{stats.completion_tokens} tokens, {stats.num_running} running, {stats.num_waiting} waiting"
        >>> report(HFEngine.from_pretrained("model").stats())
        '0 tokens, 0 running, 0 waiting'
    """

    prompt_tokens: int
    """Prompt tokens computed. A prompt shared by the samples of one request counts once; the partial completion that a
    sample continues counts as its prompt."""
    completion_tokens: int
    """Tokens sampled here."""
    num_running: int
    num_waiting: int
    weight_version: int
    num_slots: int = 0
    """Most samples that run at once, so that their keys and values fit; 0: the engine does not report it."""


def sample_keys(requests: Sequence[AnyRequest]) -> tuple[tuple[str, int], ...]:
    """Return (request id, index) of every sample of these requests."""
    keys: list[tuple[str, int]] = []
    for request in requests:
        keys += [(request.request_id, index) for index in request.sample_indices]
    return tuple(keys)


class Engine(Protocol[RequestT_contra, SampleT_co]):
    """Generates completions of prompts, or other samples, and takes new weights meanwhile.

    Example:
        >>> import asyncio
        >>> async def complete(engine: Engine, prompt: tuple[int, ...]) -> Completion:
        ...     request = Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3))
        ...     completions = [completion async for completion in engine.generate([request])]
        ...     await engine.close()
        ...     return completions[0]
        >>> asyncio.run(complete(HFEngine.from_pretrained("model"), (40, 41))).work
        3
    """

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

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the memory of keys and values and, on a GPU, move the weights to the host's memory. Idempotent.

        Args:
            keep_weights: False: drop the weights instead of moving them, because `update_weights` brings others before
                the next sample. An engine that sleeps already stays as it is.

        Raises:
            RolloutError: samples are running or waiting: `abort` them, or let them finish.
        """
        ...

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        """Allocate the memory again; calls of `generate` made since `sleep` start, unless paused. Idempotent.

        Where memory is shared with a trainer, ``wake(cache=False)``, `update_weights` and ``wake()`` take the memory
        of keys and values only when the trainer's weights are no longer needed.

        Args:
            weights: allocate the memory of the weights, and bring back those that were kept.
            cache: allocate that of keys and values.

        Raises:
            RolloutError: the cache was to wake while the weights stay asleep, or before `update_weights` brought those
                that `sleep` has dropped.
        """
        ...

    async def update_weights(
        self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int
    ) -> None:
        """Replace the weights in memory; tokens sampled afterwards carry ``version``.

        Args:
            weights: Hugging Face parameter names and full tensors; a tied head may be left out.
            version: larger than the current one.

        Raises:
            RolloutError: the engine's weights are asleep.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Free the engine. Idempotent."""
        ...


def check_open(
    is_closed: bool,
    death: str | None,
    *,
    how_to_open: str,
    unfinished: tuple[tuple[str, int], ...] = (),
) -> None:
    """Refuse a call of a closed or dead engine; ``unfinished`` are its samples as (request id, index)."""
    if is_closed:
        raise RolloutError(f"the engine is closed: {how_to_open}")
    if death is not None:
        raise EngineDiedError(death, unfinished=unfinished)
