"""Objectives over given answers: imitation of one, and comparison of a chosen with a rejected one.

For pairs a micro-batch holds chosen and rejected samples in turn. Shapes: P pairs, N response tokens of 2P samples.
"""

from collections.abc import Sequence
from itertools import chain
from typing import assert_never

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from gcore_trainer.config import DPOConfig, DPOLossType, RewardModelLossConfig
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.objectives.objective import (
    BatchTotals,
    Objective,
    PartialLoss,
    TokenScores,
    check_fields,
    field_of,
    mask_of,
    token_weights,
)
from gcore_trainer.sample import MicroBatch, Sample


class SFTObjective(Objective[TokenScores]):
    """The mean negative log-likelihood of response tokens, at the model's temperature.

    Metrics: ``sft/loss``, and ``sft/entropy`` of the distributions that the tokens were scored under.

    Example:
        >>> objective = SFTObjective()
        >>> objective.check([[Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))]])
        >>> objective.metrics({"mean:sft/loss": 3.0, "count": 2.0})
        {'sft/loss': 1.5}
    """

    scores = "tokens"
    loss_name = "sft/loss"

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Accept every sample: the loss reads nothing but tokens and masks."""

    def partial_loss(
        self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        weight_N = token_weights(samples, "token-mean", None, totals=totals, like=scores.log_probs)
        mask = mask_of(samples, like=scores.log_probs)
        log_probs = torch.where(mask, scores.log_probs, 0.0)
        entropies = torch.where(mask, scores.entropies, 0.0)
        loss = -(weight_N * log_probs).sum()
        return loss, {
            "sft/loss": loss.detach(),
            "sft/entropy": (weight_N * entropies.detach()).sum(),
        }


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the loss of direct preference optimisation, per pair.

    With h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected):

    - ``sigmoid``: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h); s = 0 is DPO (arXiv 2305.18290, eq. 7), and
      s > 0 its conservative form for labels of which a share s is wrong (E. Mitchell, "A note on DPO with noisy
      preferences", 2023)
    - ``ipo``: (h - 1 / (2 beta))^2, IPO (arXiv 2310.12036, eq. 17)
    - ``hinge``: max(0, 1 - beta h), SLiC's loss on DPO's rewards (arXiv 2305.10425, arXiv 2309.06657)

    Args:
        policy_chosen: [P] log-probabilities of the responses under the policy, with their gradient: the sum over a
            response's tokens in ``sigmoid`` and ``hinge``, but the mean over them in ``ipo``, whose target would
            otherwise mean another thing for every length.
        policy_rejected: [P], likewise.
        ref_chosen: [P] under the reference policy, likewise.
        ref_rejected: [P], likewise.
        label_smoothing: s, in [0, 0.5); 0 for any other loss than ``sigmoid``.

    Returns:
        loss [P], and the rewards [P] that the policy implies for the chosen and for the rejected responses,
        beta (log pi - log pi_ref), without gradient.

    Raises:
        ConfigError: a label_smoothing out of its bounds.
        BatchError: shapes that differ.
    """
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "sigmoid"):
        raise ConfigError(
            f"label_smoothing is {label_smoothing}; expected a number in [0, 0.5), and 0 unless loss_type is sigmoid "
            f"(loss_type is {loss_type!r})"
        )
    _require_one_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    chosen = policy_chosen - ref_chosen
    rejected = policy_rejected - ref_rejected
    h = chosen - rejected
    match loss_type:
        case "sigmoid":
            loss = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(
                -beta * h
            )
        case "ipo":
            loss = (h - 1 / (2 * beta)).square()
        case "hinge":
            loss = (1 - beta * h).relu()
        case _:
            assert_never(loss_type)
    return loss, beta * chosen.detach(), beta * rejected.detach()


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    margin: torch.Tensor | None = None,
    center_coefficient: float = 0.0,
) -> torch.Tensor:
    """Compute a reward model's loss of every pair, shape [P].

    -log sigmoid(r_chosen - r_rejected - margin) + center_coefficient (r_chosen + r_rejected)^2: arXiv 2203.02155,
    eq. 1; the margin is Llama 2's (arXiv 2307.09288, eq. 2). A comparison leaves the rewards' origin open; the last
    term keeps it near 0 (arXiv 2312.09244).

    Args:
        chosen: [P] rewards of the chosen responses, with their gradient.
        rejected: [P] rewards of the rejected ones.
        margin: [P], how much better the chosen one was found. None: 0.

    Raises:
        BatchError: shapes that differ.
    """
    if margin is None:
        _require_one_shape(chosen=chosen, rejected=rejected)
        difference = chosen - rejected
    else:
        _require_one_shape(chosen=chosen, rejected=rejected, margin=margin)
        difference = chosen - rejected - margin
    return -logsigmoid(difference) + center_coefficient * (chosen + rejected).square()


def _require_one_shape(**tensors: torch.Tensor) -> None:
    """Refuse shapes [P] and [P, 1], which would broadcast to [P, P] pairs."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise BatchError(f"shapes are {shapes}; expected equal shapes of one dimension")


class DPOObjective(Objective[TokenScores]):
    """Direct preference optimisation: the mean loss of pairs (see `dpo_loss`).

    Metrics, the means over pairs: ``dpo/loss``, ``dpo/accuracy`` (the chosen response has the higher implicit reward),
    ``dpo/chosen_reward``, ``dpo/rejected_reward`` and ``dpo/margin`` between them.

    Example:
        >>> objective = DPOObjective(DPOConfig(beta=0.1))
        >>> reference = {"ref_log_probs": np.array([-1.0, -1.0], np.float32)}
        >>> chosen = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 2]), **reference)
        >>> rejected = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([9, 2]), **reference)
        >>> objective.check([[chosen, rejected]])
    """

    scores = "tokens"
    loss_name = "dpo/loss"

    def __init__(self, config: DPOConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        for sample in chain.from_iterable(micro_batches):
            if not sample.mask.any():
                raise BatchError(
                    "response_mask is all False; expected a token that counts in every response of a pair"
                )
        check_fields(micro_batches, "DPO", "ref_log_probs")

    def partial_loss(
        self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        ref_log_probs = field_of(samples, "ref_log_probs", like=scores.log_probs)
        chosen, rejected = self._by_pair(scores.log_probs, samples)
        ref_chosen, ref_rejected = self._by_pair(ref_log_probs, samples)
        losses, chosen_rewards, rejected_rewards = dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, **vars(self._config)
        )
        return _loss_and_sums("dpo", losses, chosen_rewards, rejected_rewards, totals)

    def _by_pair(
        self, log_probs_N: torch.Tensor, samples: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of chosen and rejected responses, [P] each: sums over their tokens, or means in IPO."""
        values: list[torch.Tensor] = []
        parts = log_probs_N.split([s.response_ids.size for s in samples])
        for part, sample in zip(parts, samples, strict=True):
            counted = part[torch.tensor(sample.mask, device=part.device)]
            values.append(counted.mean() if self._config.loss_type == "ipo" else counted.sum())
        values_2P = torch.stack(values)
        return values_2P[0::2], values_2P[1::2]


class RewardModelObjective(Objective[torch.Tensor]):
    """Bradley-Terry training of a reward model: the mean loss of pairs (see `bradley_terry_loss`).

    A response's reward is the value at the one token of its mask; `scored_at_end` makes such samples. Metrics, the
    means over pairs: ``rm/loss``, ``rm/accuracy``, ``rm/chosen_reward``, ``rm/rejected_reward`` and ``rm/margin``.

    Example:
        >>> objective = RewardModelObjective(RewardModelLossConfig(center_rewards_coefficient=0.01))
        >>> chosen = scored_at_end(Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 2])))
        >>> rejected = scored_at_end(Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([9, 2])))
        >>> objective.check([[chosen, rejected]])
    """

    scores = "values"
    loss_name = "rm/loss"

    def __init__(self, config: RewardModelLossConfig) -> None:
        self._config = config

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        _check_pairs(micro_batches)
        for sample in chain.from_iterable(micro_batches):
            count = sample.mask.sum()
            if count != 1:
                raise BatchError(
                    f"response_mask has {count} tokens; expected exactly one token, at which the value is the reward "
                    "(see scored_at_end)"
                )

    def partial_loss(
        self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        rewards = scores[mask_of(samples, like=scores)]
        chosen = rewards[0::2]
        rejected = rewards[1::2]
        losses = bradley_terry_loss(
            chosen, rejected, center_coefficient=self._config.center_rewards_coefficient
        )
        return _loss_and_sums("rm", losses, chosen.detach(), rejected.detach(), totals)


def scored_at_end(sample: Sample) -> Sample:
    """Append a token that is never read, and make it the only one that counts: its value is the sample's reward.

    Raises:
        BatchError: the response has several ends.
    """
    if sample.forks is not None and sample.forks.size:
        raise BatchError(f"forks is {sample.forks.tolist()}; expected None for a reward at the end")
    response_ids = np.append(sample.response_ids, 0)
    return Sample(
        prompt_ids=sample.prompt_ids,
        response_ids=response_ids,
        response_mask=np.arange(response_ids.size) == response_ids.size - 1,
    )


def _loss_and_sums(
    name: str,
    losses_P: torch.Tensor,
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    totals: BatchTotals,
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
            raise BatchError(
                f"micro-batch {i} holds {len(batch)} samples; expected chosen and rejected ones in turn"
            )
