"""The objective of a critic: PPO's clipped value loss, and the quality of its predictions of N response tokens."""

from collections.abc import Sequence

import torch

from gcore_trainer.config import ValueLossConfig
from gcore_trainer.objectives.objective import (
    BatchTotals,
    Objective,
    PartialLoss,
    check_fields,
    field_of,
    mask_of,
    token_weights,
)
from gcore_trainer.sample import MicroBatch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped value loss, per token.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2): arXiv 1707.06347, section 5, as OpenAI's baselines have
    it (arXiv 2005.12729, section 3).

    Args:
        values: [N] of the critic, with their gradient.
        old_values: [N] of the critic before the step's first update.
        returns: [N] that the critic learns to predict.
        cliprange_value: c; infinity: no clip.

    Returns:
        loss [N], and [N] bool, True where the clip is active, and with it the gradient cut.
    """
    unclipped = (values - returns).square()
    clipped = (
        old_values + (values - old_values).clamp(-cliprange_value, cliprange_value) - returns
    ).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def value_moments(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the moments [5] for `explained_variance`, in float64; moments of parts of a batch add up.

    They are the count, and sum and sum of squares of the returns [N] and of the errors, where the mask is true.
    """
    counted = returns[mask].detach().double()
    errors = counted - values[mask].detach().double()
    return torch.stack(
        [
            mask.sum().double(),
            counted.sum(),
            counted.square().sum(),
            errors.sum(),
            errors.square().sum(),
        ]
    )


def explained_variance(moments: torch.Tensor) -> float:
    """Return the explained fraction of the returns' variance: 1 - var(R - V) / (var(R) + 1e-5), verl's form.

    1 is a perfect critic, 0 one that knows only the mean; less is worse than that. Of fewer than two tokens it is 0.

    Args:
        moments: [5], `value_moments` of the whole batch.
    """
    count, total, squares, error_total, error_squares = moments.tolist()
    if count < 2:
        return 0.0
    variance = max(squares - total * total / count, 0.0) / (count - 1)
    error_variance = max(error_squares - error_total * error_total / count, 0.0) / (count - 1)
    return 1.0 - error_variance / (variance + 1e-5)


class ValueObjective(Objective[torch.Tensor]):
    """A critic's regression on returns.

    Metrics: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean`` and ``critic/vf_explained_var``, of the
    values before the update.

    Example:
        >>> objective = ValueObjective(ValueLossConfig(cliprange_value=0.5))
        >>> scores = {"values": np.array([0.1, 0.2], np.float32), "returns": np.array([1.0, 1.0], np.float32)}
        >>> objective.check([[Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 2]), **scores)]])
    """

    scores = "values"
    loss_name = "critic/vf_loss"

    def __init__(self, config: ValueLossConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the value loss", "values", "returns")

    def partial_loss(
        self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        config = self._config
        weight_N = token_weights(
            samples, config.loss_agg_mode, config.max_response_length, totals=totals, like=scores
        )
        old = field_of(samples, "values", like=scores)
        returns = field_of(samples, "returns", like=scores)
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
        metrics = super().metrics(sums)
        if moments:
            metrics["critic/vf_explained_var"] = explained_variance(torch.tensor(moments))
        return metrics
