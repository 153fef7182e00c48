"""The scored responses to a prompt, and metrics of all that were sampled."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.multi_turn.environment import EpisodeEnd
from gcore_rollout.responses import PromptImages, Response
from gcore_rollout.rewards.reward import part_means


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
    source: str = ""
    """The prompt's row in the column `Generation.source_key`; empty: there is none."""

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

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        own = {**vars(self), "responses": [dict(vars(r)) for r in self.responses]}
        return {"ticket": own.pop("prompt_index"), **own, "images": self.images and self.images.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """Return the group that `state` gave this state for."""
        own: dict[str, Any] = {**state, "responses": [Response(**r) for r in state["responses"]]}
        images = own.pop("images", None)
        return cls(prompt_index=own.pop("ticket"), **own, images=images and PromptImages.from_state(images))


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
    if explained := [part for _, own, _ in parts for part in own]:
        metrics |= part_means(explained)
    ends = sum((own for *_, own in parts), start=Counter[str]())
    if total := ends.total():
        metrics |= {f"multi_turn/end/{end}": ends[end] / total for end in get_args(EpisodeEnd)}
    return {name: float(value) for name, value in metrics.items()}
