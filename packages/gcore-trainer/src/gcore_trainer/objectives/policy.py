"""The objective of a policy: a policy loss of `gcore_trainer.losses`, with KL and entropy terms."""

from collections.abc import Sequence

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.errors import BatchError
from gcore_trainer.losses.aggregation import BatchTotals, token_weights
from gcore_trainer.losses.kl import kl_penalty
from gcore_trainer.losses.policy_loss import policy_loss
from gcore_trainer.objectives.objective import (
    Objective,
    PartialLoss,
    check_fields,
    check_finite,
    field_of,
    mask_of,
)
from gcore_trainer.packing.token_scores import TokenScores
from gcore_trainer.sample import MicroBatch, Sample

_OPTIONAL = ("old_log_probs", "rollout_log_probs", "rollout_is_weights")


class PolicyObjective(Objective[TokenScores]):
    """The policy gradient losses, with their KL and entropy terms.

    Without a KL and an entropy term, samples whose advantages are all zero have no gradient. Metrics:
    ``actor/pg_loss``, ``actor/ppo_kl``, ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/entropy``,
    ``actor/kl_loss``, ``training/rollout_probs_diff_mean``; the means are over the samples that have a gradient.
    """

    scores = "tokens"
    loss_name = "actor/pg_loss"

    def __init__(self, config: PolicyLossConfig) -> None:
        self._config = config
        self.entropy_grad = config.entropy_coeff > 0

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the policy loss", "advantages")
        if self._config.kl_loss_coef:
            check_fields(micro_batches, f"kl_loss_coef={self._config.kl_loss_coef}", "ref_log_probs")
        for field in _OPTIONAL:
            if len({getattr(s, field) is None for batch in micro_batches for s in batch}) > 1:
                raise BatchError(f"{field} is None for some samples of the step; expected it for all of them or none")
        check_finite(micro_batches, *_OPTIONAL)

    def has_no_gradient(self, sample: Sample) -> bool:
        if self._config.kl_loss_coef or self._config.entropy_coeff:
            return super().has_no_gradient(sample)
        has_advantages = sample.advantages is None or sample.advantages[sample.mask].any()
        return super().has_no_gradient(sample) or not has_advantages

    def partial_loss(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        config = self._config
        mask = mask_of(samples, like=scores.log_probs)
        log_probs, entropies = (torch.where(mask, x, 0.0) for x in (scores.log_probs, scores.entropies))
        current = log_probs.detach()
        masks = [s.mask for s in samples]
        weight_N = token_weights(
            masks, config.loss_agg_mode, totals=totals, max_response_length=config.max_response_length, like=current
        )
        given = {f: field_of(samples, f, like=current) for f in _OPTIONAL if getattr(samples[0], f) is not None}
        old = given.get("old_log_probs", current)
        advantages = field_of(samples, "advantages", like=current)
        lengths = [s.response_ids.size for s in samples]
        policy = policy_loss(config, log_probs, old, advantages, mask=mask, lengths=lengths)
        importance = given.get("rollout_is_weights")
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
            reference = field_of(samples, "ref_log_probs", like=current)
            kl_loss = (weight_N * kl_penalty(log_probs, reference, config.kl_loss_type)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        if "rollout_log_probs" in given:
            difference = (current.exp() - given["rollout_log_probs"].exp()).abs()
            sums["mean:training/rollout_probs_diff_mean"] = (count * difference).sum()
        return loss, sums
