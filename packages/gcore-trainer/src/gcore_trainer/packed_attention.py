"""Attention over a packed row, in the form that transformers' models call.

Shapes: T packed tokens, S segments of a bucket, Lq/Lk padded queries/keys, H query heads, K key-value heads, D head
dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from gcore_trainer.errors import BatchError, UnsupportedModelError
from gcore_trainer.packed_mask import describe, window_of
from gcore_trainer.packing import Bucket, PackedBatch

ATTENTION_NAME = "gcore_packed"

_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""What models hand to their attention that changes its result, and that is not computed here."""


class AttentionPlan(Protocol):
    """How the tokens of a packed row attend to each other; made once a micro-batch, used by every layer."""

    num_calls: int
    """Attention layers served so far."""

    def attend(
        self,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attention output [1, T, H, D] of the T tokens that this process holds.

        Args:
            query_1HTD: with rotary embeddings applied, as the keys.
            key_1KTD: K divides H.
            value_1KTD: of the keys' tokens.
            scale: of the scores; None: 1 / sqrt(D).
            sliding_window: of the layer, in tokens; None: none.

        Raises:
            BatchError: a sequence is longer than the sliding window.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _BucketOnDevice:
    query_index: torch.Tensor
    key_index: torch.Tensor
    num_segments: int
    mask: torch.Tensor | None
    """[S, 1, Lq, Lk], 0 or -inf; None: causal."""


class PackedPlan(AttentionPlan):
    """The attention of a `PackedBatch` whose row one process holds."""

    def __init__(self, batch: PackedBatch, *, device: torch.device, dtype: torch.dtype) -> None:
        self._unpack_index = torch.from_numpy(batch.unpack_index).to(device)
        self._buckets = [
            _BucketOnDevice(
                query_index=torch.from_numpy(bucket.query_index.ravel()).to(device),
                key_index=torch.from_numpy(bucket.key_index.ravel()).to(device),
                num_segments=bucket.query_index.shape[0],
                mask=_branch_mask(bucket, device=device, dtype=dtype),
            )
            for bucket in batch.buckets
        ]
        self._longest = longest_sequence(batch)
        self.num_calls = 0

    def attend(
        self,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self.num_calls += 1
        check_sliding_window(sliding_window, self._longest)
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        outputs: list[torch.Tensor] = []
        for bucket in self._buckets:
            shape = (bucket.num_segments, -1)
            q_SHQD = q_THD.index_select(0, bucket.query_index).unflatten(0, shape).transpose(1, 2)
            k_SKKD = k_TKD.index_select(0, bucket.key_index).unflatten(0, shape).transpose(1, 2)
            v_SKKD = v_TKD.index_select(0, bucket.key_index).unflatten(0, shape).transpose(1, 2)
            out_SHQD = scaled_dot_product_attention(
                q_SHQD,
                k_SKKD,
                v_SKKD,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=scale,
                enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
            )
            outputs.append(out_SHQD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._unpack_index)[None]


def longest_sequence(batch: PackedBatch) -> int:
    """Tokens of the longest prompt and response, less the response's last, which is no input."""
    return int(batch.positions[batch.predict_index].max()) + 1


def check_sliding_window(sliding_window: int | None, longest: int) -> None:
    """Refuse a window that would hide tokens of the longest sequence.

    Raises:
        BatchError: the window is shorter.
    """
    if sliding_window is not None and sliding_window < longest:
        raise BatchError(
            f"a sequence of {longest} tokens exceeds the model's sliding_window of {sliding_window}: "
            "packed training covers sequences up to the window"
        )


def _branch_mask(bucket: Bucket, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    if bucket.prompt_lengths is None:
        return None
    num_segments, num_queries = bucket.query_index.shape
    num_prompt_keys = bucket.key_index.shape[1] - num_queries
    mask = torch.full((num_segments, 1, num_queries, bucket.key_index.shape[1]), -torch.inf, dtype=dtype, device=device)
    prompt, own = mask[..., :num_prompt_keys], mask[..., num_prompt_keys:]
    lengths = torch.from_numpy(bucket.prompt_lengths).to(device)
    prompt.masked_fill_((torch.arange(num_prompt_keys, device=device) < lengths[:, None])[:, None, None], 0.0)
    own.triu_(1)
    return mask


def _forward(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if packed is None:
        raise UnsupportedModelError(
            "the model does not pass the keyword arguments of its forward pass on to its attention: packed training "
            "needs it to"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise UnsupportedModelError(f"the model's attention uses {name!r}: packed training does not compute it")
    if attention_mask is not None:
        # Some models have their window in the mask alone; where both have one, transformers' eager attention and SDPA
        # follow the mask.
        sliding_window = window_of(attention_mask)
    return packed.attend(query, key, value, scale=scaling, sliding_window=sliding_window), None


def register() -> None:
    """Make ``attn_implementation="gcore_packed"`` known to transformers, through its own extension points."""
    AttentionInterface.register(ATTENTION_NAME, _forward)
    AttentionMaskInterface.register(ATTENTION_NAME, describe)
