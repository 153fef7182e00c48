"""Objectives over pairs of responses: a micro-batch holds chosen and rejected samples in turn.

Shapes: P pairs, N response tokens of their 2P samples.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gcore_trainer.config import DPOConfig, RewardModelConfig
from gcore_trainer.errors import BatchError
from gcore_trainer.losses import BatchTotals
from gcore_trainer.objectives import Objective, Share, check_finite, counted, counted_tokens
from gcore_trainer.preference_losses import bradley_terry_loss, dpo_loss
from gcore_trainer.token_scores import TokenScores
from gcore_trainer.types import MicroBatch, Sample


class DPOObjective(Objective[TokenScores]):
    """Direct preference optimisation: the mean loss of pairs (see `preference_losses.dpo_loss`).

    Metrics, the means over pairs: ``dpo/loss``, ``dpo/accuracy`` (the chosen response has the higher implicit reward),
    ``dpo/chosen_reward``, ``dpo/rejected_reward`` and ``dpo/margin`` between them.
    """

    scores = "tokens"

    def __init__(self, config: DPOConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        if any(s.ref_log_probs is None for batch in micro_batches for s in batch):
            raise BatchError("ref_log_probs is None: DPO needs them for every sample")
        if any(not s.mask.any() for batch in micro_batches for s in batch):
            raise BatchError("response_mask is all False: a response of a pair needs a token that counts")
        check_finite(micro_batches, "ref_log_probs")

    def share(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> Share:
        config = self._config
        chosen, rejected = self._of_pairs(scores.log_probs, samples)
        reference = counted(samples, "ref_log_probs", like=scores.log_probs)
        assert reference is not None
        ref_chosen, ref_rejected = self._of_pairs(reference, samples)
        pairs = dpo_loss(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=config.beta,
            loss_type=config.loss_type,
            label_smoothing=config.label_smoothing,
        )
        loss = pairs.loss.sum() * 2 / totals.num_sequences
        margins = pairs.chosen_rewards - pairs.rejected_rewards
        return loss, {
            "dpo/loss": loss.detach(),
            "mean:dpo/accuracy": (margins > 0).sum(),
            "mean:dpo/chosen_reward": pairs.chosen_rewards.sum(),
            "mean:dpo/rejected_reward": pairs.rejected_rewards.sum(),
            "mean:dpo/margin": margins.sum(),
            "count": torch.tensor(float(margins.numel())),
        }

    def _of_pairs(self, log_probs_N: torch.Tensor, samples: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of chosen and rejected responses, [P] each: sums over their tokens, or means in IPO."""
        parts = log_probs_N.split([s.response_ids.size for s in samples])
        masked = [p[torch.from_numpy(s.mask).to(p.device)] for p, s in zip(parts, samples, strict=True)]
        values = torch.stack([m.mean() if self._config.loss_type == "ipo" else m.sum() for m in masked])
        return values[0::2], values[1::2]


class RewardModelObjective(Objective[torch.Tensor]):
    """Bradley-Terry training of a reward model: the mean loss of pairs (see `preference_losses.bradley_terry_loss`).

    A response's reward is the value at the one token of its mask; `scored_at_end` makes such samples. Metrics, the
    means over pairs: ``rm/loss``, ``rm/accuracy``, ``rm/chosen_reward``, ``rm/rejected_reward`` and ``rm/margin``.
    """

    scores = "values"

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        if any(s.mask.sum() != 1 for batch in micro_batches for s in batch):
            raise BatchError("response_mask has not exactly one token: a reward is the value there (see scored_at_end)")

    def share(self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals) -> Share:
        rewards = scores[counted_tokens(samples, like=scores)]
        chosen, rejected = rewards[0::2], rewards[1::2]
        pairs = bradley_terry_loss(chosen, rejected, center_coefficient=self._config.center_rewards_coefficient)
        loss = pairs.sum() * 2 / totals.num_sequences
        margins = (chosen - rejected).detach()
        return loss, {
            "rm/loss": loss.detach(),
            "mean:rm/accuracy": (margins > 0).sum(),
            "mean:rm/chosen_reward": chosen.detach().sum(),
            "mean:rm/rejected_reward": rejected.detach().sum(),
            "mean:rm/margin": margins.sum(),
            "count": torch.tensor(float(margins.numel())),
        }


def scored_at_end(sample: Sample) -> Sample:
    """The sample with a token behind its end that is never read, alone in the mask: its value is that of the end."""
    response_ids = np.append(sample.response_ids, 0)
    return Sample(
        prompt_ids=sample.prompt_ids,
        response_ids=response_ids,
        response_mask=np.arange(response_ids.size) == response_ids.size - 1,
    )


def _check_pairs(micro_batches: Sequence[MicroBatch]) -> None:
    for i, batch in enumerate(micro_batches):
        if len(batch) % 2:
            raise BatchError(f"micro-batch {i} holds {len(batch)} samples: chosen and rejected ones in turn are needed")
