"""A group: one prompt's scored responses, from sampling to training."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.config import AlgorithmConfig
from gcore_trainer import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One completion and its score. Arrays have shape [R]."""

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    truncated: bool
    score: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The responses to one prompt."""

    ticket: int
    """Place of the prompt in the run's global order."""
    prompt_ids: NDArray[np.int64]
    responses: list[Response]
    greedy_score: float | None = None
    """Score of the greedy response, where the algorithm compares with it."""

    @property
    def scores(self) -> list[float]:
        return [r.score for r in self.responses]

    @property
    def has_signal(self) -> bool:
        """Whether the responses differ in score, so that their advantages do."""
        return len(set(self.scores)) > 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths in tokens, shape [n]."""
        return np.array([r.token_ids.size for r in self.responses])

    def samples(self, algorithm: AlgorithmConfig) -> list[Sample]:
        """What the trainer learns from, still without advantages; of a filtered response no token counts."""
        return [
            Sample(
                prompt_ids=self.prompt_ids,
                response_ids=r.token_ids,
                response_mask=np.zeros(r.token_ids.shape, np.bool_)
                if r.truncated and algorithm.overlong.filter
                else None,
                old_log_probs=r.log_probs if algorithm.old_log_probs == "rollout" else None,
                rollout_log_probs=r.log_probs,
            )
            for r in self.responses
        ]

    def state(self) -> dict[str, Any]:
        """As plain arrays and numbers, for a checkpoint."""
        return {
            "ticket": self.ticket,
            "prompt_ids": self.prompt_ids,
            "responses": [vars(r) for r in self.responses],
            "greedy_score": self.greedy_score,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        return cls(
            ticket=state["ticket"],
            prompt_ids=np.asarray(state["prompt_ids"]),
            responses=[
                Response(
                    token_ids=np.asarray(r["token_ids"]),
                    log_probs=np.asarray(r["log_probs"]),
                    weight_versions=np.asarray(r["weight_versions"]),
                    truncated=r["truncated"],
                    score=r["score"],
                )
                for r in state["responses"]
            ],
            greedy_score=state["greedy_score"],
        )
