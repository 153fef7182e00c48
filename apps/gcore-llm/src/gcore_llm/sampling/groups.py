"""A group: one prompt's scored responses, from sampling to training."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.config import AlgorithmConfig
from gcore_llm.data.images import PromptImages
from gcore_rollout import Completion, EpisodeEnd
from gcore_trainer import Sample


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
        """Return plain arrays and numbers for a checkpoint."""
        return {**vars(self), "parts": dict(self.parts)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Response":
        mask = state.get("mask")
        return cls(
            token_ids=np.asarray(state["token_ids"]),
            log_probs=np.asarray(state["log_probs"]),
            weight_versions=np.asarray(state["weight_versions"]),
            truncated=state["truncated"],
            score=state["score"],
            mask=None if mask is None else np.asarray(mask),
            end=state.get("end"),
            parts=state.get("parts", {}),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfinishedGroup:
    """A group some of whose responses were cut short, to be continued in a later step."""

    prompt_index: int
    responses: Mapping[int, Response] = field(default_factory=dict[int, Response])
    """The finished responses, by index."""
    partial: Sequence[Completion] = ()
    """The others, with their tokens so far."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any token; None: there is no token yet."""
        versions = [*(r.weight_versions for r in self.responses.values()), *(c.weight_versions for c in self.partial)]
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
        return cls(
            prompt_index=state["ticket"],
            responses={r["index"]: Response.from_state(r) for r in state["responses"]},
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
        return [r.score for r in self.responses]

    @property
    def has_signal(self) -> bool:
        """True if the responses differ in score, so that their advantages do."""
        return len(set(self.scores)) > 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths in tokens, shape [n]."""
        return np.array([r.token_ids.size for r in self.responses])

    def samples(self, algorithm: AlgorithmConfig) -> list[Sample]:
        """Return the samples to train on, without advantages yet; no token of a filtered response counts."""
        images = None if self.images is None else self.images.for_training()
        return [
            Sample(
                prompt_ids=self.prompt_ids,
                response_ids=r.token_ids,
                response_mask=np.zeros(r.token_ids.shape, np.bool_)
                if r.truncated and algorithm.overlong.filter
                else r.mask,
                old_log_probs=r.log_probs if algorithm.old_log_probs == "rollout" else None,
                rollout_log_probs=r.log_probs,
                images=images,
            )
            for r in self.responses
        ]

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        return {
            "ticket": self.prompt_index,
            "prompt_ids": self.prompt_ids,
            "responses": [r.state() for r in self.responses],
            "greedy_score": self.greedy_score,
            "images": None if self.images is None else self.images.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        images = state.get("images")
        return cls(
            prompt_index=state["ticket"],
            prompt_ids=np.asarray(state["prompt_ids"]),
            responses=[Response.from_state(r) for r in state["responses"]],
            greedy_score=state["greedy_score"],
            images=None if images is None else PromptImages.from_state(images),
        )
