"""The objective of a critic."""

from collections.abc import Sequence

import torch

from gcore_trainer.config import ValueLossConfig
from gcore_trainer.losses.aggregation import BatchTotals, token_weights
from gcore_trainer.losses.value import explained_variance, value_loss, value_moments
from gcore_trainer.objectives.objective import Objective, PartialLoss, check_fields, field_of, mask_of
from gcore_trainer.sample import MicroBatch


class ValueObjective(Objective[torch.Tensor]):
    """A critic's regression on returns.

    Metrics: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean`` and ``critic/vf_explained_var``, of the
    values before the update.
    """

    scores = "values"
    loss_name = "critic/vf_loss"

    def __init__(self, config: ValueLossConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the value loss", "values", "returns")

    def partial_loss(self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        config = self._config
        masks = [s.mask for s in samples]
        weight_N = token_weights(
            masks, config.loss_agg_mode, totals=totals, max_response_length=config.max_response_length, like=scores
        )
        old, returns = (field_of(samples, field, like=scores) for field in ("values", "returns"))
        mask = mask_of(samples, like=scores)
        scores = torch.where(mask, scores, 0.0)
        loss_N, clipped_N = value_loss(scores, old, returns, cliprange_value=config.cliprange_value)
        loss = (weight_N * loss_N).sum()
        moments = value_moments(old, returns, mask)
        return loss, {
            "critic/vf_loss": loss.detach(),
            "mean:critic/vf_clipfrac": (mask & clipped_N).sum(),
            "mean:critic/vpred_mean": (mask * scores.detach()).sum(),
            "count": mask.sum(),
            **{f"moment:{i}": moment for i, moment in enumerate(moments)},
        }

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        moments = [sums.pop(name) for name in sorted(sums) if name.startswith("moment:")]
        explained = {"critic/vf_explained_var": explained_variance(torch.tensor(moments))} if moments else {}
        return super().metrics(sums) | explained
