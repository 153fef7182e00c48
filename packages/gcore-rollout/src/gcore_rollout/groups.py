"""Prompts, and groups: the scored responses to one prompt, complete or to be continued."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import Completion
from gcore_rollout.multi_turn.episode import EpisodeEnd
from gcore_rollout.rewards.runner import part_means

if TYPE_CHECKING:
    from gcore_rollout.images.vision_processor import Pixels, VisionProcessor


@cache
def vision_processor(folder: str) -> "VisionProcessor":
    """Load the image processor of a model folder, once."""
    from gcore_rollout.images.vision_processor import VisionProcessor

    return VisionProcessor.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, in order; files are read whenever they are needed."""

    model: str
    """Hugging Face folder of the model that the images are for."""
    sources: tuple[bytes | Path, ...]
    """Encoded image files, or their paths."""

    def encoded(self) -> tuple[bytes, ...]:
        """Return the encoded image files, for a request."""
        return tuple(s if isinstance(s, bytes) else s.read_bytes() for s in self.sources)

    def pixels(self) -> "Pixels":
        """Return the images as the model takes them."""
        return vision_processor(self.model).process(self.encoded())

    def state(self) -> dict[str, Any]:
        """Return plain arrays and strings for a checkpoint."""
        sources = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else str(s) for s in self.sources]
        return {"model": self.model, "sources": sources}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PromptImages":
        """Return the images that `state` gave this state for."""
        sources = (Path(s) if isinstance(s, str) else np.asarray(s).tobytes() for s in state["sources"])
        return cls(model=state["model"], sources=tuple(sources))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine."""

    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    """Every column of the data set, for the reward."""
    images: PromptImages | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One completion and its score. Arrays have shape [R]."""

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    truncated: bool
    score: float
    mask: NDArray[np.bool_] | None = None
    """Whether the policy generated the token; None: it generated all of them."""
    end: EpisodeEnd | None = None
    """How an episode of several turns ended; None: there is one turn."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name."""

    def state(self) -> dict[str, Any]:
        """Return the arguments that make the response, as plain arrays and numbers for a checkpoint."""
        return {**vars(self), "parts": dict(self.parts)}


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfinishedGroup:
    """A group some of whose responses were cut short, to be continued later."""

    prompt_index: int
    responses: Mapping[int, Response] = field(default_factory=dict[int, Response])
    """The finished responses, by index."""
    partial: Sequence[Completion] = ()
    """The others, with their tokens so far."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any token; None: there is no token yet."""
        versions = [own.weight_versions for own in (*self.responses.values(), *self.partial)]
        return min((int(v.min()) for v in versions if v.size), default=None)

    def restarted(self) -> "UnfinishedGroup":
        """Return the group without any response."""
        return UnfinishedGroup(prompt_index=self.prompt_index)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        return {
            "ticket": self.prompt_index,
            "responses": [{"index": i, **r.state()} for i, r in self.responses.items()],
            "begun": [asdict(completion) for completion in self.partial],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "UnfinishedGroup":
        """Return the group that `state` gave this state for."""
        responses: dict[int, Response] = {}
        for entry in state["responses"]:
            fields = dict(entry)
            index = fields.pop("index")
            responses[index] = Response(**fields)
        return cls(
            prompt_index=state["ticket"],
            responses=responses,
            partial=[Completion(**completion) for completion in state["begun"]],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The responses to one prompt."""

    prompt_index: int
    """Position of the prompt in the run's global order."""
    prompt_ids: NDArray[np.int64]
    responses: list[Response]
    greedy_score: float | None = None
    """Score of the greedy response, where the algorithm compares with it."""
    images: PromptImages | None = None
    """Images of the prompt."""

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that generated any token."""
        return min(int(r.weight_versions[slice(None) if r.mask is None else r.mask].min()) for r in self.responses)

    @property
    def scores(self) -> list[float]:
        """Score of each response."""
        return [r.score for r in self.responses]

    @property
    def has_signal(self) -> bool:
        """True if the responses differ in score, so that their advantages do."""
        return len(set(self.scores)) > 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths in tokens, shape [n]."""
        return np.array([r.token_ids.size for r in self.responses])

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        return {
            "ticket": self.prompt_index,
            "prompt_ids": self.prompt_ids,
            "responses": [r.state() for r in self.responses],
            "greedy_score": self.greedy_score,
            "images": self.images and self.images.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """Return the group that `state` gave this state for."""
        images = state.get("images")
        return cls(
            prompt_index=state["ticket"],
            prompt_ids=state["prompt_ids"],
            responses=[Response(**r) for r in state["responses"]],
            greedy_score=state["greedy_score"],
            images=images and PromptImages.from_state(images),
        )


SampledPart = tuple[NDArray[np.float64], list[Mapping[str, float]], Counter[str]]
"""[N, 4] score, length, whether it was cut off, and prompt length of each response; parts of the scores; ends of
episodes."""


def sampled_part(groups: Sequence[Group]) -> SampledPart:
    """Return one controller's part of `sampled_metrics`."""
    responses = [(group, response) for group in groups for response in group.responses]
    columns = [(r.score, r.token_ids.size, r.truncated, g.prompt_ids.size) for g, r in responses]
    ends = Counter[str](r.end for _, r in responses if r.end is not None)
    return np.array(columns, np.float64).reshape(-1, 4), [r.parts for _, r in responses if r.parts], ends


def sampled_metrics(parts: Sequence[SampledPart]) -> dict[str, float]:
    """Return metrics of all controllers' responses, under verl's names; without responses there are none of them."""
    rows = np.concatenate([own for own, *_ in parts])
    metrics: dict[str, float] = {}
    if len(rows):
        scores, lengths, truncated, prompts = rows.T
        metrics |= {
            "critic/score/mean": scores.mean(),
            "critic/score/max": scores.max(),
            "critic/score/min": scores.min(),
            "response_length/mean": lengths.mean(),
            "response_length/max": lengths.max(),
            "response_length/clip_ratio": truncated.mean(),
            "prompt_length/mean": prompts.mean(),
            "perf/total_num_tokens": lengths.sum() + prompts.sum(),
        }
    metrics |= part_means(part for _, own, _ in parts for part in own)
    ends = sum((own for *_, own in parts), start=Counter[str]())
    if total := ends.total():
        metrics |= {f"multi_turn/end/{end}": ends[end] / total for end in get_args(EpisodeEnd)}
    return {name: float(value) for name, value in metrics.items()}
