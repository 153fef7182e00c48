"""Losses on response tokens: pure functions of flat tensors, one entry a token.

Shapes: N response tokens of any number of sequences, laid end to end.
"""

from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import KLPenalty, LossAggMode


def aggregation_weights(
    masks: list[NDArray[np.bool_]], mode: LossAggMode, *, max_response_length: int
) -> list[NDArray[np.float32]]:
    """The weight of every token, such that the batch's loss is the plain sum of weight times token loss.

    Because the weights are fixed before the batch is split, the sum does not depend on how it is split into
    micro-batches, nor on samples left out because their gradient is known to be zero.

    - ``token-mean``: 1 / (tokens in the batch), DAPO (arXiv 2503.14476, eq. 8)
    - ``seq-mean-token-sum``: 1 / (sequences)
    - ``seq-mean-token-mean``: 1 / (sequences x tokens of the sequence), GRPO (arXiv 2402.03300, eq. 3)
    - ``seq-mean-token-sum-norm``: 1 / (sequences x max_response_length), Dr. GRPO (arXiv 2503.20783)

    Args:
        masks: [R_i] of each sequence, True where a token counts.
    """
    counts = np.array([m.sum() for m in masks], dtype=np.float64)
    num_sequences, num_tokens = len(masks), max(counts.sum(), 1.0)
    match mode:
        case "token-mean":
            scales = np.full(num_sequences, 1.0 / num_tokens)
        case "seq-mean-token-sum":
            scales = np.full(num_sequences, 1.0 / num_sequences)
        case "seq-mean-token-mean":
            scales = 1.0 / (num_sequences * np.maximum(counts, 1.0))
        case "seq-mean-token-sum-norm":
            scales = np.full(num_sequences, 1.0 / (num_sequences * max_response_length))
        case _:
            assert_never(mode)
    return [(m * s).astype(np.float32) for m, s in zip(masks, scales, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Clipped policy loss of every token, with what happened to its ratio. All shape [N]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """True where the upper or lower clip is active, and with it the gradient cut."""
    clipped_lower: torch.Tensor
    """True where the dual clip of a negative advantage is active."""


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
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_clipped_lower = torch.zeros_like(is_clipped)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        is_clipped_lower = (advantages < 0) & (loss > bound)
        loss = torch.where(is_clipped_lower, bound, loss)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=is_clipped, clipped_lower=is_clipped_lower)


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLPenalty) -> torch.Tensor:
    """Per-token estimates of KL(policy || reference), shape [N] (J. Schulman, "Approximating KL divergence", 2020).

    k1: log p - log q;  k2: (log p - log q)^2 / 2;  k3: q/p - 1 - log(q/p), GRPO's (arXiv 2402.03300, eq. 4).
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            negative = (-log_ratio).clamp(-20.0, 20.0)
            return negative.exp() - 1 - negative
        case _:
            assert_never(kind)
