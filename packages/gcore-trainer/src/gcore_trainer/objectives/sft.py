"""The objective of supervised fine-tuning."""

from collections.abc import Sequence

import torch

from gcore_trainer.losses.aggregation import BatchTotals, token_weights
from gcore_trainer.objectives.objective import Objective, PartialLoss, mask_of
from gcore_trainer.packing.token_scores import TokenScores
from gcore_trainer.sample import MicroBatch


class SFTObjective(Objective[TokenScores]):
    """The mean negative log-likelihood of response tokens, at the model's temperature.

    Metrics: ``sft/loss``, and ``sft/entropy`` of the distributions that the tokens were scored under.
    """

    scores = "tokens"
    loss_name = "sft/loss"

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Accept every sample: the loss reads nothing but tokens and masks."""

    def partial_loss(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        weight_N = token_weights([s.mask for s in samples], "token-mean", totals=totals, like=scores.log_probs)
        mask = mask_of(samples, like=scores.log_probs)
        log_probs, entropies = (torch.where(mask, x, 0.0) for x in (scores.log_probs, scores.entropies))
        loss = -(weight_N * log_probs).sum()
        return loss, {"sft/loss": loss.detach(), "sft/entropy": (weight_N * entropies.detach()).sum()}
