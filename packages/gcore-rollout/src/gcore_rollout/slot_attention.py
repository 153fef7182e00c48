"""Key-value slots for the `hf` engine, and the attention function that transformers' models call to use them.

Tokens reach the model packed in one row, [1, T], so no padding passes through the matrix products. Keys and values live
in slots of a preallocated cache, one live sample a slot, slots 0..B-1 in use; only attention itself sees a rectangle.

Shapes: T packed tokens, B live samples, P prompts, Lq/Lk longest query/key in tokens, H query heads, K key-value heads,
D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gcore_rollout.errors import UnsupportedModelError

ATTENTION_NAME = "gcore_slots"


class SlotCache:
    """Keys and values of up to ``num_slots`` samples, grown as needed."""

    def __init__(self, *, num_layers: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers
        self.num_slots = 0
        self.capacity = 0

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Make room for ``num_slots`` samples of ``capacity`` tokens, keeping what is stored."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        self.num_slots = max(num_slots, self.num_slots)
        self.capacity = max(capacity, self.capacity)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = self._grown(old)

    def _grown(self, old_BKLD: torch.Tensor) -> torch.Tensor:
        num_slots, num_heads, capacity, head_dim = old_BKLD.shape
        new = old_BKLD.new_zeros(self.num_slots, num_heads, self.capacity, head_dim)
        new[:num_slots, :, :capacity] = old_BKLD
        return new

    def layer(self, index: int, like_1KTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value buffers [num_slots, K, capacity, D] of one layer, made on first use."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            _, num_heads, _, head_dim = like_1KTD.shape
            shape = (self.num_slots, num_heads, self.capacity, head_dim)
            self.keys[index] = keys = like_1KTD.new_zeros(shape)
            self.values[index] = values = like_1KTD.new_zeros(shape)
        return keys, values

    def clear(self) -> None:
        """Free the buffers and what is stored in them."""
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)
        self.num_slots = 0
        self.capacity = 0

    def move(self, src: torch.Tensor, dst: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``src`` to slots ``dst`` (both [M], disjoint)."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[dst, :, :length] = buffer[src, :, :length]


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Packed prompts, each computed once and written to the slots of all its samples."""

    cache: SlotCache
    padded_index: torch.Tensor
    """[T] place of each packed token in a [P, Lq] rectangle, flattened."""
    num_prompts: int
    max_length: int
    slots: torch.Tensor
    """[M] slots to fill."""
    prompts: torch.Tensor
    """[M] the prompt (row of the rectangle) that each of them holds."""

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention output [1, T, H, D]."""
        keys, values = self.cache.layer(layer, k_1KTD)
        q, k, v = (self._unpack(x) for x in (q_1HTD, k_1KTD, v_1KTD))
        keys[self.slots, :, : self.max_length] = k[self.prompts]
        values[self.slots, :, : self.max_length] = v[self.prompts]
        # Padding stands behind every prompt, so the causal mask alone hides it from the real tokens.
        gqa = q.shape[1] != k.shape[1]
        out_PHLD = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        return out_PHLD.transpose(1, 2).flatten(0, 1)[self.padded_index][None]

    def _unpack(self, x_1HTD: torch.Tensor) -> torch.Tensor:
        _, num_heads, _, head_dim = x_1HTD.shape
        rows = x_1HTD.new_zeros(self.num_prompts * self.max_length, num_heads, head_dim)
        rows[self.padded_index] = x_1HTD[0].transpose(0, 1)
        return rows.view(self.num_prompts, self.max_length, num_heads, head_dim).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One new token for each of the slots 0..B-1; packed token i belongs to slot i."""

    cache: SlotCache
    slots: torch.Tensor
    """[B] 0..B-1."""
    positions: torch.Tensor
    """[B] where the new token stands in its sample."""
    mask: torch.Tensor
    """[B, 1, 1, Lk] additive mask: 0 up to and including the new token's position, -inf behind it."""

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention output [1, B, H, D]."""
        keys, values = self.cache.layer(layer, k_1KTD)
        keys[self.slots, :, self.positions] = k_1KTD[0].transpose(0, 1)
        values[self.slots, :, self.positions] = v_1KTD[0].transpose(0, 1)
        _, num_heads, batch, head_dim = q_1HTD.shape
        num_kv_heads, length = k_1KTD.shape[1], self.mask.shape[-1]
        # Query heads that share a key-value head stand as rows of one query: no repeated keys, no copy of the cache.
        q_BKGD = q_1HTD[0].transpose(0, 1).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out_BKGD = scaled_dot_product_attention(
            q_BKGD, keys[:batch, :, :length], values[:batch, :, :length], attn_mask=self.mask, scale=scale
        )
        return out_BKGD.reshape(1, batch, num_heads, head_dim)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    slots: Prefill | Decode,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} caps its attention logits or has attention sinks: the hf engine has neither, "
            "the vllm engine may"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return slots.attend(layer, query, key, value, scaling), None


def register() -> None:
    """Make ``attn_implementation="gcore_slots"`` known to transformers, through its own extension point."""
    AttentionInterface.register(ATTENTION_NAME, _forward)
