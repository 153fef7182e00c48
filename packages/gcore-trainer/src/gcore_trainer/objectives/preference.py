"""Objectives over pairs of responses: a micro-batch holds chosen and rejected samples in turn.

Shapes: P pairs, N response tokens of their 2P samples.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gcore_trainer.config import DPOConfig, RewardModelConfig
from gcore_trainer.errors import BatchError
from gcore_trainer.losses.aggregation import BatchTotals
from gcore_trainer.losses.preference import bradley_terry_loss, dpo_loss
from gcore_trainer.objectives.objective import Objective, PartialLoss, check_fields, field_of, mask_of
from gcore_trainer.packing.token_scores import TokenScores
from gcore_trainer.sample import MicroBatch, Sample


class DPOObjective(Objective[TokenScores]):
    """Direct preference optimisation: the mean loss of pairs (see `losses.preference.dpo_loss`).

    Metrics, the means over pairs: ``dpo/loss``, ``dpo/accuracy`` (the chosen response has the higher implicit reward),
    ``dpo/chosen_reward``, ``dpo/rejected_reward`` and ``dpo/margin`` between them.
    """

    scores = "tokens"
    loss_name = "dpo/loss"

    def __init__(self, config: DPOConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        if any(not s.mask.any() for batch in micro_batches for s in batch):
            raise BatchError("response_mask is all False; expected a token that counts in every response of a pair")
        check_fields(micro_batches, "DPO", "ref_log_probs")

    def partial_loss(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        config = self._config
        pairs = dpo_loss(
            *self._by_pair(scores.log_probs, samples),
            *self._by_pair(field_of(samples, "ref_log_probs", like=scores.log_probs), samples),
            beta=config.beta,
            loss_type=config.loss_type,
            label_smoothing=config.label_smoothing,
        )
        return _loss_and_sums("dpo", pairs.loss, pairs.chosen_rewards, pairs.rejected_rewards, totals)

    def _by_pair(self, log_probs_N: torch.Tensor, samples: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of chosen and rejected responses, [P] each: sums over their tokens, or means in IPO."""
        parts = log_probs_N.split([s.response_ids.size for s in samples])
        masked = [p[torch.from_numpy(s.mask).to(p.device)] for p, s in zip(parts, samples, strict=True)]
        values = torch.stack([m.mean() if self._config.loss_type == "ipo" else m.sum() for m in masked])
        return values[0::2], values[1::2]


class RewardModelObjective(Objective[torch.Tensor]):
    """Bradley-Terry training of a reward model: the mean loss of pairs (see `losses.preference.bradley_terry_loss`).

    A response's reward is the value at the one token of its mask; `scored_at_end` makes such samples. Metrics, the
    means over pairs: ``rm/loss``, ``rm/accuracy``, ``rm/chosen_reward``, ``rm/rejected_reward`` and ``rm/margin``.
    """

    scores = "values"
    loss_name = "rm/loss"

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        for count in (s.mask.sum() for batch in micro_batches for s in batch):
            if count != 1:
                raise BatchError(
                    f"response_mask has {count} tokens; expected exactly one token, at which the value is the reward "
                    "(see scored_at_end)"
                )

    def partial_loss(self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        rewards = scores[mask_of(samples, like=scores)]
        chosen, rejected = rewards[0::2], rewards[1::2]
        losses = bradley_terry_loss(chosen, rejected, center_coefficient=self._config.center_rewards_coefficient)
        return _loss_and_sums("rm", losses, chosen.detach(), rejected.detach(), totals)


def scored_at_end(sample: Sample) -> Sample:
    """Append a token that is never read, and make it the only one that counts: its value is that of the sample."""
    response_ids = np.append(sample.response_ids, 0)
    return Sample(
        prompt_ids=sample.prompt_ids,
        response_ids=response_ids,
        response_mask=np.arange(response_ids.size) == response_ids.size - 1,
    )


def _loss_and_sums(
    name: str, losses_P: torch.Tensor, chosen_P: torch.Tensor, rejected_P: torch.Tensor, totals: BatchTotals
) -> PartialLoss:
    loss = losses_P.sum() * 2 / totals.num_sequences
    margins = chosen_P - rejected_P
    return loss, {
        f"{name}/loss": loss.detach(),
        f"mean:{name}/accuracy": (margins > 0).sum(),
        f"mean:{name}/chosen_reward": chosen_P.sum(),
        f"mean:{name}/rejected_reward": rejected_P.sum(),
        f"mean:{name}/margin": margins.sum(),
        "count": torch.tensor(float(margins.numel())),
    }


def _check_pairs(micro_batches: Sequence[MicroBatch]) -> None:
    for i, batch in enumerate(micro_batches):
        if len(batch) % 2:
            raise BatchError(f"micro-batch {i} holds {len(batch)} samples; expected chosen and rejected ones in turn")
