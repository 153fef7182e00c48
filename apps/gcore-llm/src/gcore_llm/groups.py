"""A group: one prompt's scored responses, from sampling to training."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_llm.config import AlgorithmConfig
from gcore_trainer import Sample
from gcore_trainer.advantages import discounted_returns, group_advantages, grpo_advantages, moments, whiten


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
        """What the trainer learns from; advantages that compare with the batch are still to be whitened."""
        return [
            Sample(
                prompt_ids=self.prompt_ids,
                response_ids=r.token_ids,
                advantages=advantages,
                old_log_probs=r.log_probs if algorithm.old_log_probs == "rollout" else None,
                rollout_log_probs=r.log_probs,
            )
            for r, advantages in zip(self.responses, self._advantages(algorithm), strict=True)
        ]

    def _advantages(self, algorithm: AlgorithmConfig) -> list[NDArray[np.float32]]:
        """Of every token of every response, [R] each."""
        if algorithm.adv_estimator == "reinforce_plus_plus":
            return [_returns(r, algorithm.gamma) for r in self.responses]
        if algorithm.adv_estimator == "grpo":
            scalars = grpo_advantages(self.scores, norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo)
        else:
            scalars = group_advantages(self.scores, algorithm.adv_estimator)
        return [np.full(r.token_ids.shape, a, np.float32) for r, a in zip(self.responses, scalars, strict=True)]

    def state(self) -> dict[str, Any]:
        """As plain arrays and numbers, for a checkpoint."""
        return {
            "ticket": self.ticket,
            "prompt_ids": self.prompt_ids,
            "responses": [vars(r) for r in self.responses],
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
        )


async def whiten_over_batch(samples: list[list[Sample]], algorithm: AlgorithmConfig, group: Collectives) -> None:
    """Whiten the advantages over all controllers' samples, where the estimator asks for it; in place in the lists."""
    if algorithm.adv_estimator not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return
    own = [sample.advantages for part in samples for sample in part if sample.advantages is not None]
    batch = sum(await group.all_gather(moments(own, [np.ones(a.shape, np.bool_) for a in own])), np.zeros(3))
    for part in samples:
        for i, sample in enumerate(part):
            assert sample.advantages is not None
            whitened = whiten(sample.advantages, np.ones(sample.advantages.shape, np.bool_), batch)
            part[i] = dataclasses.replace(sample, advantages=whitened)


def _returns(response: Response, gamma: float) -> NDArray[np.float32]:
    rewards = np.zeros(response.token_ids.shape, np.float64)
    rewards[-1] = response.score
    return discounted_returns(rewards, np.ones(rewards.shape, np.bool_), gamma=gamma).astype(np.float32)
