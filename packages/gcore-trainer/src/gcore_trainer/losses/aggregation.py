"""Aggregation of token losses to the loss of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import LossAggMode
from gcore_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """The denominators of a batch's loss; those of its parts add up."""

    num_sequences: int
    num_tokens: int
    """Tokens that count."""

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_]]) -> "BatchTotals":
        """Count sequences and tokens from the masks [R_i] of each sequence, True where a token counts."""
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
    """Return the weight of every token, such that the batch's loss is the plain sum of weight times token loss.

    Because the weights are fixed before the batch is split, the sum does not depend on how it is split into
    micro-batches, nor on samples left out because their gradient is known to be zero.

    - ``token-mean``: 1 / (tokens in the batch), DAPO (arXiv 2503.14476, eq. 8)
    - ``seq-mean-token-sum``: 1 / (sequences)
    - ``seq-mean-token-mean``: 1 / (sequences x tokens of the sequence), GRPO (arXiv 2402.03300, eq. 3)
    - ``seq-mean-token-sum-norm``: 1 / (sequences x max_response_length), Dr. GRPO (arXiv 2503.20783)

    Args:
        masks: [R_i] of each sequence of a part of the batch, True where a token counts.
        mode: how the token losses are aggregated.
        totals: of the whole batch.
        max_response_length: the divisor of ``seq-mean-token-sum-norm``; unused in other modes.

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


def token_weights(
    masks: Sequence[NDArray[np.bool_]],
    mode: LossAggMode,
    *,
    totals: BatchTotals,
    max_response_length: int | None = None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Lay `aggregation_weights` end to end: [N], on the device of ``like``."""
    weights = aggregation_weights(masks, mode, totals=totals, max_response_length=max_response_length)
    return torch.from_numpy(np.concatenate(weights)).to(like.device)
