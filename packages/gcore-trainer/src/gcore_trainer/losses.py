"""What the loss of a batch is made of beside the policy's: aggregation over tokens, divergence from a reference.

Shapes: N response tokens of any number of sequences, laid end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import MAX_K3, KLPenalty, LossAggMode
from gcore_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """What a batch is divided by, wherever its parts are; the totals of parts add up."""

    num_sequences: int
    num_tokens: int
    """Those that count."""

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_]]) -> "BatchTotals":
        """
        Args:
            masks: [R_i] of each sequence, True where a token counts.
        """
        return cls(num_sequences=len(masks), num_tokens=int(sum(m.sum() for m in masks)))

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(
            num_sequences=self.num_sequences + other.num_sequences, num_tokens=self.num_tokens + other.num_tokens
        )


def aggregation_weights(
    masks: Sequence[NDArray[np.bool_]],
    mode: LossAggMode,
    *,
    totals: BatchTotals,
    max_response_length: int | None = None,
) -> list[NDArray[np.float32]]:
    """The weight of every token, such that the batch's loss is the plain sum of weight times token loss.

    Because the weights are fixed before the batch is split, the sum does not depend on how it is split into
    micro-batches, nor on samples left out because their gradient is known to be zero.

    - ``token-mean``: 1 / (tokens in the batch), DAPO (arXiv 2503.14476, eq. 8)
    - ``seq-mean-token-sum``: 1 / (sequences)
    - ``seq-mean-token-mean``: 1 / (sequences x tokens of the sequence), GRPO (arXiv 2402.03300, eq. 3)
    - ``seq-mean-token-sum-norm``: 1 / (sequences x max_response_length), Dr. GRPO (arXiv 2503.20783)

    Args:
        masks: [R_i] of each sequence of a part of the batch, True where a token counts.
        totals: those of the whole batch.
        max_response_length: the divisor of ``seq-mean-token-sum-norm``; other modes do without.

    Raises:
        ConfigError: the mode needs ``max_response_length``, and there is none.
    """
    counts = np.array([m.sum() for m in masks], dtype=np.float64)
    num_sequences = totals.num_sequences
    match mode:
        case "token-mean":
            scales = np.full(len(masks), 1.0 / max(totals.num_tokens, 1))
        case "seq-mean-token-sum":
            scales = np.full(len(masks), 1.0 / num_sequences)
        case "seq-mean-token-mean":
            scales = 1.0 / (num_sequences * np.maximum(counts, 1.0))
        case "seq-mean-token-sum-norm":
            if max_response_length is None:
                raise ConfigError(
                    "max_response_length is None; expected 1 or more for loss_agg_mode 'seq-mean-token-sum-norm'"
                )
            scales = np.full(len(masks), 1.0 / (num_sequences * max_response_length))
        case _:
            assert_never(mode)
    return [(m * s).astype(np.float32) for m, s in zip(masks, scales, strict=True)]


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLPenalty) -> torch.Tensor:
    """Per-token estimates of KL(policy || reference), shape [N] (J. Schulman, "Approximating KL divergence", 2020).

    k1: log p - log q;  k2: (log p - log q)^2 / 2;  k3: q/p - 1 - log(q/p), GRPO's (arXiv 2402.03300, eq. 4), at most
    10 as in verl: a token at the bound has no gradient.

    k1 and, below its bound, k3 estimate the divergence without bias, but their gradients do not estimate its gradient
    (k1's is zero in expectation); k2's does, under the policy's own samples (arXiv 2510.01555). k1+ and k3+ have the
    value of k1 and k3 and the gradient of k2.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            negative = (-log_ratio).clamp(-20.0, 20.0)
            return (negative.exp() - 1 - negative).clamp(max=MAX_K3)
        case "k1+" | "k3+":
            value = kl_penalty(log_probs.detach(), ref_log_probs, "k1" if kind == "k1+" else "k3")
            return value + log_ratio.square() / 2 - (log_ratio.square() / 2).detach()
        case _:
            assert_never(kind)
