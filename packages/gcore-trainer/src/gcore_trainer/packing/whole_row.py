"""Attention over a row in one call of flash attention, on CUDA, without tiles to merge.

Each segment's queries attend to the keys of its ancestors and then its own, which are copied end to end. The kernel
aligns the last query with the last key, so that causality and sliding windows need no mask. Shapes: T tokens of a row,
M keys of all segments, H query heads, K key-value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from gcore_trainer.objectives.objective import on_device
from gcore_trainer.packing.block_attention import (
    VarlenLengths,
    attend_varlen,
    include_sinks,
    sink_gradients,
    varlen_gradients,
)
from gcore_trainer.packing.layout import Segment

_MOST_KEYS = 2
"""Memory of copied keys over that of queries, up to which they are copied. Tiles read a long prompt's keys once."""


class WholeRow:
    """The visible keys of each segment of a row, end to end, for layers with one sliding window.

    Args:
        window: keys that a query sees, its own included; None: all.
    """

    def __init__(
        self, segments: Sequence[Segment], *, device: torch.device, window: int | None
    ) -> None:
        num_queries: list[int] = []
        num_keys: list[int] = []
        index: list[NDArray[np.int64]] = []
        for segment in segments:
            keys = segment.sequence
            num_queries.append(segment.length)
            num_keys.append(keys.size)
            index.append(keys)
        self.lengths = VarlenLengths.of(
            num_queries, num_keys, device, is_causal=True, window=window
        )
        self.key_index: torch.Tensor | None = None
        """[M] index of each key in the row; None: the row's keys as they are."""
        if any(s.parent for s in segments):
            self.key_index = on_device(np.concatenate(index), device)

    @staticmethod
    def is_small(segments: Sequence[Segment], *, num_heads: int, num_kv_heads: int) -> bool:
        """Return whether the copied keys are few next to the queries."""
        num_tokens = sum(s.length for s in segments)
        num_keys = num_tokens + sum(s.context_length for s in segments)
        return num_keys * num_kv_heads <= _MOST_KEYS * num_tokens * num_heads

    def gather_keys(self, x_TKD: torch.Tensor) -> torch.Tensor:
        """Return the keys or values [M, K, D] of all segments."""
        if self.key_index is None:
            return x_TKD
        return x_TKD.index_select(0, self.key_index)

    def sum_gradients(self, grad_MKD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Add up the gradients [T, K, D] of keys or values that several segments see, in float32."""
        if self.key_index is None:
            return grad_MKD
        total_TKD = grad_MKD.new_zeros((num_tokens, *grad_MKD.shape[1:]), dtype=torch.float32)
        return total_TKD.index_add_(0, self.key_index, grad_MKD.float()).to(grad_MKD.dtype)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Compute attention [T, H, D], differentiably."""
        return _WholeRowAttention.apply(q_THD, k_TKD, v_TKD, sinks_H, self, scale)


class _WholeRowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        row: WholeRow,
        scale: float,
    ) -> torch.Tensor:
        keys_MKD = row.gather_keys(k_TKD)
        values_MKD = row.gather_keys(v_TKD)
        out_THD, lse_TH = attend_varlen(q_THD, keys_MKD, values_MKD, row.lengths, scale=scale)
        if sinks_H is not None:
            out_THD, lse_TH = include_sinks(out_THD, lse_TH, sinks_H)
        ctx.row = row
        ctx.scale = scale
        ctx.save_for_backward(q_THD, keys_MKD, values_MKD, sinks_H, out_THD, lse_TH)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q_THD, keys_MKD, values_MKD, sinks_H, out_THD, lse_TH = ctx.saved_tensors
        grad_THD = grad_outputs[
            0
        ].contiguous()  # that of a sum has no strides, which the kernel does not take
        row: WholeRow = ctx.row
        grad_q_THD, grad_keys_MKD, grad_values_MKD = varlen_gradients(
            grad_THD, q_THD, keys_MKD, values_MKD, out_THD, lse_TH, row.lengths, scale=ctx.scale
        )
        grad_k_TKD = row.sum_gradients(grad_keys_MKD, q_THD.shape[0])
        grad_v_TKD = row.sum_gradients(grad_values_MKD, q_THD.shape[0])
        grad_sinks_H = (
            sink_gradients(grad_THD, out_THD, lse_TH, sinks_H) if ctx.needs_input_grad[3] else None
        )
        return grad_q_THD, grad_k_TKD, grad_v_TKD, grad_sinks_H, None, None
