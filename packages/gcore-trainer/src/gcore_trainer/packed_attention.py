"""Attention over a packed row, in the form that transformers' models call.

Shapes: T packed tokens, S segments of a bucket, Lq/Lk padded queries/keys, H query heads, K key-value heads, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gcore_trainer.errors import BatchError
from gcore_trainer.packing import PackedBatch

ATTENTION_NAME = "gcore_packed"


@dataclass(frozen=True, kw_only=True)
class _BucketOnDevice:
    query_index: torch.Tensor
    key_index: torch.Tensor
    num_segments: int
    mask_S1QK: torch.Tensor | None


class PackedPlan:
    """A `PackedBatch`'s attention, on the model's device; made once a micro-batch, used by every layer."""

    def __init__(self, batch: PackedBatch, *, device: torch.device, dtype: torch.dtype) -> None:
        self._unpack_index = torch.from_numpy(batch.unpack_index).to(device)
        self._buckets = [
            _BucketOnDevice(
                query_index=torch.from_numpy(bucket.query_index.ravel()).to(device),
                key_index=torch.from_numpy(bucket.key_index.ravel()).to(device),
                num_segments=bucket.query_index.shape[0],
                mask_S1QK=None
                if bucket.visible is None
                else torch.zeros(bucket.visible.shape, dtype=dtype, device=device)
                .masked_fill_(torch.from_numpy(~bucket.visible).to(device), float("-inf"))
                .unsqueeze_(1),
            )
            for bucket in batch.buckets
        ]
        self._longest = int(batch.positions.max()) + 1

    def attend(
        self,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attention output [1, T, H, D]."""
        if sliding_window is not None and sliding_window < self._longest:
            raise BatchError(
                f"a sequence of {self._longest} tokens exceeds the model's sliding_window of {sliding_window}: "
                "packed training covers sequences up to the window"
            )
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        num_heads, num_kv_heads, head_dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
        outputs: list[torch.Tensor] = []
        for bucket in self._buckets:
            shape = (bucket.num_segments, -1)
            q_SHQD = q_THD.index_select(0, bucket.query_index).view(*shape, num_heads, head_dim).transpose(1, 2)
            k_SKKD = k_TKD.index_select(0, bucket.key_index).view(*shape, num_kv_heads, head_dim).transpose(1, 2)
            v_SKKD = v_TKD.index_select(0, bucket.key_index).view(*shape, num_kv_heads, head_dim).transpose(1, 2)
            out_SHQD = scaled_dot_product_attention(
                q_SHQD,
                k_SKKD,
                v_SKKD,
                attn_mask=bucket.mask_S1QK,
                is_causal=bucket.mask_S1QK is None,
                scale=scale,
                enable_gqa=num_heads != num_kv_heads,
            )
            outputs.append(out_SHQD.transpose(1, 2).reshape(-1, num_heads, head_dim))
        return torch.cat(outputs).index_select(0, self._unpack_index)[None]


def _forward(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *,
    packed: PackedPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return packed.attend(query, key, value, scale=scaling, sliding_window=sliding_window), None


def register() -> None:
    """Make ``attn_implementation="gcore_packed"`` known to transformers, through its own extension point."""
    AttentionInterface.register(ATTENTION_NAME, _forward)
