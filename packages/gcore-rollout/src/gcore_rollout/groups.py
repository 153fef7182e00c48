"""The scored responses to a prompt, and metrics of all that were sampled."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import Completion, EpisodeEnd
from gcore_rollout.prompts import PromptImages
from gcore_rollout.rewards.reward import part_means


@dataclass(kw_only=True, eq=False)
class Group:
    """The completions of one prompt."""

    prompt_index: int
    """Position of the prompt in the run's global order."""
    prompt_ids: NDArray[np.int64]
    responses: list[Completion] = field(default_factory=list[Completion])
    """By index; in a group that was cut short, some have ``finish_reason`` "abort", and others may be missing."""
    greedy_score: float | None = None
    """Score of the greedy response, where the algorithm compares with it."""
    images: PromptImages | None = None
    """Images of the prompt."""
    source: str = ""
    """The prompt's row in the column `Generation.source_key`; empty: there is none."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any token; None: there is no token yet."""
        oldest = [int(r.sampled_versions.min()) for r in self.responses if r.sampled_versions.size]
        return min(oldest, default=None)

    @property
    def aborted(self) -> list[Completion]:
        """The responses that were cut short, to be continued."""
        return [r for r in self.responses if r.finish_reason == "abort"]

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
        responses = [r.state() for r in self.responses]
        own = {**vars(self), "responses": responses, "images": self.images and self.images.state()}
        return {"ticket": own.pop("prompt_index"), **own}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Group":
        """Return the group that `state` gave this state for.

        Older checkpoints have aborted responses of their own under ``begun``, and no prompt in such a group; their
        other responses lack the request's name and, in a whole group, their index.
        """
        own: dict[str, Any] = {"prompt_ids": np.zeros(0, np.int64), **state}
        prompt_index: int = own.pop("ticket")
        states: list[dict[str, Any]] = own.pop("begun", [])
        for index, response in enumerate(own.pop("responses")):
            states.append({"request_id": str(prompt_index), "index": index, **response})
        responses = [Completion.from_state(response) for response in states]
        responses.sort(key=lambda response: response.index)
        images = own.pop("images", None)
        images = images and PromptImages.from_state(images)
        return cls(prompt_index=prompt_index, responses=responses, images=images, **own)


SampledPart = tuple[NDArray[np.float64], list[Mapping[str, float]], Counter[str]]
"""[N, 4] score, length, whether it was cut off, and prompt length of each response; parts of the scores; ends of
episodes."""


def sampled_part(groups: Sequence[Group]) -> SampledPart:
    """Return one controller's part of `sampled_metrics`."""
    responses = [(group, response) for group in groups for response in group.responses]
    columns = [(r.score, r.token_ids.size, r.is_truncated, g.prompt_ids.size) for g, r in responses]
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
