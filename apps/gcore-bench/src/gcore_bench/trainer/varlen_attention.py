"""Causal attention within each sequence of a row without padding: what flash-attention's varlen kernel computes.

flash-attn has no CPU kernel, so verl's forward pass cannot use it here. This makes one call of torch's own fused
kernel for each sequence, and computes no more than it would.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "bench_varlen"


def register() -> None:
    """Make ``attn_implementation="bench_varlen"`` known to transformers."""
    AttentionInterface.register(NAME, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each; the output is [1, T, heads, D]."""
    del module, attention_mask, others
    parts = zip(*(x.split(sequence_lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None
