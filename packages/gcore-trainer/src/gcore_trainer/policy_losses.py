"""Policy losses: pure functions of flat tensors, one entry a token.

Shapes: N response tokens of any number of sequences, laid end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from gcore_trainer.config import PolicyLossConfig

_MAX_LOG_RATIO = 20.0
"""Beyond this a ratio is a number that overflows sooner or later, and says nothing more."""
_MAX_SEQUENCE_LOG_RATIO = 10.0
"""The same bound for a sequence's ratio, from above only, as in verl."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy's loss at every token, with what happened to its ratio. All shape [N]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """True where the upper or lower clip is active, and with it the gradient cut (in CISPO the ratio alone)."""
    clipped_lower: torch.Tensor
    """True where the dual clip of a negative advantage is active."""


def policy_loss(
    config: PolicyLossConfig,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    lengths: Sequence[int],
) -> PolicyLoss:
    """The loss that ``config.loss_mode`` names.

    Args:
        log_probs: [N] of the policy, with its gradient.
        old_log_probs: [N] of the policy that the ratio is against.
        advantages: [N].
        mask: [N] bool, the tokens that count; the others have loss 0 and no gradient, even where they hold NaN.
        lengths: tokens of each sequence; N in all.
    """
    low, high = config.clip_ratio_low, config.clip_ratio_high
    log_probs, old_log_probs, advantages = (torch.where(mask, x, 0.0) for x in (log_probs, old_log_probs, advantages))
    match config.loss_mode:
        case "vanilla":
            c = config.clip_ratio_c
            return ppo_clip_loss(
                log_probs, old_log_probs, advantages, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c
            )
        case "gspo":
            return gspo_loss(
                log_probs, old_log_probs, advantages, mask, lengths, clip_ratio_low=low, clip_ratio_high=high
            )
        case "cispo":
            return cispo_loss(log_probs, old_log_probs, advantages, clip_ratio_low=low, clip_ratio_high=high)
        case "sapo":
            return sapo_loss(log_probs, old_log_probs, advantages, tau_pos=config.tau_pos, tau_neg=config.tau_neg)
        case _:
            assert_never(config.loss_mode)


def ppo_clip_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, per token.

    max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_probs - old_log_probs): PPO (arXiv 1707.06347, eq. 7);
    high > low is DAPO's clip-higher (arXiv 2503.14476, section 3.1). With ``clip_ratio_c`` > 1 and A < 0 the loss is
    at most -A c: dual-clip PPO (arXiv 1912.09729, eq. 5).
    """
    ratio = _ratio(log_probs - old_log_probs)
    policy = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    if clip_ratio_c is None:
        return policy
    bound = -advantages * clip_ratio_c
    is_clipped_lower = (advantages < 0) & (policy.loss > bound)
    return PolicyLoss(
        loss=torch.where(is_clipped_lower, bound, policy.loss),
        ratio=ratio,
        clipped=policy.clipped,
        clipped_lower=is_clipped_lower,
    )


def gspo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate of a sequence's ratio, the geometric mean of its tokens' ratios.

    s_i = exp(mean_t(log_probs - old_log_probs)), and at token t the ratio is sg[s_i] pi / sg[pi], whose value is s_i
    and whose gradient is the token's own: GSPO-token (arXiv 2507.18071, section 4.3); with one advantage for all tokens
    of a sequence and ``seq-mean-token-mean`` it is GSPO.

    Args:
        mask: [N] bool, the tokens whose ratios are averaged.
        lengths: tokens of each sequence; N in all.
    """
    log_ratio = torch.where(mask, (log_probs - old_log_probs).detach(), 0.0)
    means = [part.sum() / count.clamp(min=1) for part, count in _by_sequence(log_ratio, mask, lengths)]
    sequence = torch.cat([mean.expand(length) for mean, length in zip(means, lengths, strict=True)])
    ratio = torch.exp((sequence + (log_probs - log_probs.detach())).clamp(max=_MAX_SEQUENCE_LOG_RATIO))
    return _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)


def cispo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """REINFORCE weighted by a clipped ratio through which no gradient flows: every token keeps its gradient.

    -sg[clip(r, 1 - low, 1 + high)] A log_probs: CISPO, MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). The paper has no
    lower clip: ``clip_ratio_low`` 1.
    """
    ratio = _ratio(log_probs - old_log_probs)
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high).detach()
    clipped = weight != ratio
    return PolicyLoss(
        loss=-weight * advantages * log_probs,
        ratio=ratio,
        clipped=clipped,
        clipped_lower=torch.zeros_like(clipped),
    )


def sapo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> PolicyLoss:
    """A smooth gate in the place of the clip: the further a ratio is from 1, the less its token weighs.

    -A (4 / tau) sigmoid(tau (r - 1)), tau = ``tau_pos`` where A > 0, else ``tau_neg``: SAPO (arXiv 2511.20347).
    """
    ratio = _ratio(log_probs - old_log_probs)
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(
        loss=-advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau,
        ratio=ratio,
        clipped=nothing,
        clipped_lower=nothing,
    )


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    is_clipped = clipped > unclipped
    return PolicyLoss(
        loss=torch.maximum(unclipped, clipped),
        ratio=ratio,
        clipped=is_clipped,
        clipped_lower=torch.zeros_like(is_clipped),
    )


def _by_sequence(
    values: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each sequence's values, and how many of its tokens count."""
    parts = zip(values.split(list(lengths)), mask.split(list(lengths)), strict=True)
    return [(part, counted.sum()) for part, counted in parts]
