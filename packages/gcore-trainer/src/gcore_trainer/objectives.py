"""What a trainer minimises: an objective turns a micro-batch's scores into its share of the batch's loss.

Shares add up: over micro-batches, and over ranks. So a batch's gradient does not depend on how it is split.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch

from gcore_trainer.config import LossAggMode, PolicyLossConfig, ValueLossConfig
from gcore_trainer.errors import BatchError
from gcore_trainer.losses import BatchTotals, aggregation_weights, kl_penalty
from gcore_trainer.policy_losses import policy_loss
from gcore_trainer.token_scores import TokenScores
from gcore_trainer.types import MicroBatch, Sample
from gcore_trainer.value_losses import explained_variance, value_loss, value_moments

ScoresT = TypeVar("ScoresT", TokenScores, torch.Tensor)
Share = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A micro-batch's part of the loss, and of sums that `Objective.metrics` turns into metrics."""


class Objective(ABC, Generic[ScoresT]):
    """A loss over samples. ``ScoresT`` says what it looks at: `TokenScores` of a policy, or values [N] of a critic."""

    scores: ClassVar[Literal["tokens", "values"]]
    entropy_grad: bool = False
    """Whether the entropies need a gradient."""

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """
        Raises:
            BatchError: the samples lack something that the loss needs.
        """

    def totals(self, samples: Sequence[Sample]) -> BatchTotals:
        """What these samples add to the batch's denominators."""
        return BatchTotals.of([s.mask for s in samples])

    def is_idle(self, sample: Sample) -> bool:
        """Whether the sample's gradient is known to be zero, so that it need not be computed."""
        return not sample.mask.any()

    @abstractmethod
    def share(self, scores: ScoresT, samples: MicroBatch, totals: BatchTotals) -> Share:
        """The part of the batch's loss that these samples make up.

        Args:
            scores: of the samples' response tokens, in their order.
            samples: a micro-batch.
            totals: of the whole batch.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the batch's sums: those named ``mean:...`` are divided by ``count``, the others stay."""
        count = max(sums.get("count", 1.0), 1.0)
        return {
            name.removeprefix("mean:"): value / count if name.startswith("mean:") else value
            for name, value in sums.items()
            if name != "count"
        }


class PolicyObjective(Objective[TokenScores]):
    """The policy gradient losses, with their KL and entropy terms.

    Samples whose advantages are all zero are idle where no KL and entropy term is. Metrics: ``actor/pg_loss``,
    ``actor/ppo_kl``, ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/entropy``, ``actor/kl_loss``,
    ``training/rollout_probs_diff_mean``; the means are over the samples that are not idle.
    """

    scores = "tokens"

    def __init__(self, config: PolicyLossConfig) -> None:
        self._config = config
        self.entropy_grad = config.entropy_coeff > 0

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        samples = [s for batch in micro_batches for s in batch]
        if any(s.advantages is None for s in samples):
            raise BatchError("advantages is None: the policy loss needs them for every sample")
        if self._config.kl_loss_coef and any(s.ref_log_probs is None for s in samples):
            raise BatchError(f"ref_log_probs is None: kl_loss_coef={self._config.kl_loss_coef} needs them")
        for field in ("old_log_probs", "rollout_log_probs", "rollout_is_weights"):
            if len({getattr(s, field) is None for s in samples}) > 1:
                raise BatchError(f"{field} is None for some samples of the step: all of them or none must carry it")
        fields = ["advantages", "old_log_probs", "rollout_log_probs", "rollout_is_weights"]
        check_finite(micro_batches, *fields, *["ref_log_probs"] * bool(self._config.kl_loss_coef))

    def is_idle(self, sample: Sample) -> bool:
        if self._config.kl_loss_coef or self._config.entropy_coeff:
            return super().is_idle(sample)
        return super().is_idle(sample) or (sample.advantages is not None and not sample.advantages[sample.mask].any())

    def share(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> Share:
        config = self._config
        mask = counted_tokens(samples, like=scores.log_probs)
        log_probs, entropies = (torch.where(mask, x, 0.0) for x in (scores.log_probs, scores.entropies))
        current = log_probs.detach()
        weight_N = _weights(samples, config.loss_agg_mode, totals, config.max_response_length, like=current)
        old = counted(samples, "old_log_probs", like=current)
        old = current if old is None else old
        advantages = counted(samples, "advantages", like=current)
        assert advantages is not None
        lengths = [s.response_ids.size for s in samples]
        policy = policy_loss(config, log_probs, old, advantages, mask=mask, lengths=lengths)
        importance = counted(samples, "rollout_is_weights", like=current)
        pg_loss = (weight_N * (policy.loss if importance is None else importance * policy.loss)).sum()
        loss = pg_loss
        count = mask.float()
        sums = {
            "actor/pg_loss": pg_loss.detach(),
            "mean:actor/ppo_kl": (count * (old - current)).sum(),
            "mean:actor/pg_clipfrac": (mask & policy.clipped).sum(),
            "mean:actor/pg_clipfrac_lower": (mask & policy.clipped_lower).sum(),
            "mean:actor/entropy": (count * entropies.detach()).sum(),
            "count": count.sum(),
        }
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (weight_N * entropies).sum()
        if config.kl_loss_coef:
            reference = counted(samples, "ref_log_probs", like=current)
            assert reference is not None
            kl_loss = (weight_N * kl_penalty(log_probs, reference, config.kl_loss_type)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        rollout = counted(samples, "rollout_log_probs", like=current)
        if rollout is not None:
            difference = (current.exp() - rollout.exp()).abs()
            sums["mean:training/rollout_probs_diff_mean"] = (count * difference).sum()
        return loss, sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"actor/pg_loss": 0.0, **super().metrics(sums)}


class ValueObjective(Objective[torch.Tensor]):
    """A critic's regression on returns.

    Metrics: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean`` and ``critic/vf_explained_var``, of the
    values before the update.
    """

    scores = "values"

    def __init__(self, config: ValueLossConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        for field in ("values", "returns"):
            if any(getattr(s, field) is None for batch in micro_batches for s in batch):
                raise BatchError(f"{field} is None: the value loss needs them for every sample")
        check_finite(micro_batches, "values", "returns")

    def share(self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals) -> Share:
        config = self._config
        weight_N = _weights(samples, config.loss_agg_mode, totals, config.max_response_length, like=scores)
        old, returns = (counted(samples, field, like=scores) for field in ("values", "returns"))
        assert old is not None
        assert returns is not None
        mask = counted_tokens(samples, like=scores)
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
        return {"critic/vf_loss": 0.0, **super().metrics(sums), **explained}


class SFTObjective(Objective[TokenScores]):
    """Supervised fine-tuning: the mean negative log-likelihood of response tokens, at the model's temperature.

    Metrics: ``sft/loss``, and ``sft/entropy`` of the distributions that the tokens were scored under.
    """

    scores = "tokens"

    def share(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> Share:
        weight_N = _weights(samples, "token-mean", totals, 1, like=scores.log_probs)
        mask = counted_tokens(samples, like=scores.log_probs)
        log_probs, entropies = (torch.where(mask, x, 0.0) for x in (scores.log_probs, scores.entropies))
        loss = -(weight_N * log_probs).sum()
        return loss, {"sft/loss": loss.detach(), "sft/entropy": (weight_N * entropies.detach()).sum()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"sft/loss": 0.0, **super().metrics(sums)}


def _weights(
    samples: MicroBatch, mode: LossAggMode, totals: BatchTotals, max_response_length: int | None, *, like: torch.Tensor
) -> torch.Tensor:
    """The aggregation weight of every token, shape [N]."""
    masks = [s.mask for s in samples]
    weights = aggregation_weights(masks, mode, totals=totals, max_response_length=max_response_length)
    return torch.from_numpy(np.concatenate(weights)).to(like.device)


def counted_tokens(samples: MicroBatch, *, like: torch.Tensor) -> torch.Tensor:
    """The samples' masks end to end, shape [N] bool, on the device of ``like``."""
    return torch.from_numpy(np.concatenate([s.mask for s in samples])).to(like.device)


def counted(samples: MicroBatch, field: str, *, like: torch.Tensor) -> torch.Tensor | None:
    """A per-token array of the samples end to end, shape [N]; None where they have none.

    Masked-out entries are 0 rather than multiplied by 0: NaN times 0 is NaN, in the gradient too.
    """
    arrays = [np.where(s.mask, a, 0.0) for s in samples if (a := getattr(s, field)) is not None]
    return torch.from_numpy(np.concatenate(arrays)).to(like) if arrays else None


def check_finite(micro_batches: Sequence[MicroBatch], *fields: str) -> None:
    """Check `Sample.check_finite` of every sample, by its place in the micro-batches.

    Raises:
        BatchError: an entry that counts is not finite.
    """
    for i, batch in enumerate(micro_batches):
        for j, sample in enumerate(batch):
            sample.check_finite(f"micro_batches[{i}][{j}]", *fields)
