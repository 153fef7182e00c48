"""Attention over a packed row that a context-parallel group divides."""

from dataclasses import replace

import torch

from gcore_trainer.context_parallel.collectives import gather_heads, repeat_for_ranks, scatter_heads
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.context_parallel.layout import equal_segments
from gcore_trainer.context_parallel.ring import ring_attention
from gcore_trainer.errors import BatchError
from gcore_trainer.packing.attention import AttentionKind, AttentionPlan, PackedPlan
from gcore_trainer.packing.pack import PackedBatch


class ContextParallelPlan(AttentionPlan):
    """The attention of a `PackedBatch`, from and to the tokens `cp.places(batch)` of each rank.

    Args:
        batch: the same on all ranks, packed with `cp.padding`.
        cp: this rank's place.
        device: the model's.
        dtype: the model's.

    Raises:
        BatchError: the row does not divide, or shares prompts where a ring divides it.
    """

    def __init__(self, batch: PackedBatch, cp: ContextParallel, *, device: torch.device, dtype: torch.dtype) -> None:
        self.num_calls = 0
        self._cp = cp
        self._num_tokens = cp.places(batch).size
        if cp.ring is None:
            self._packed = PackedPlan(batch, device=device, dtype=dtype)
        else:
            if any(bucket.prompt_lengths is not None for bucket in batch.buckets):
                raise BatchError(
                    f"the row shares prompts; expected one packed with share_prefix=False for ring_size {cp.ring_size}"
                )
            self._segments = equal_segments(batch.segment_lengths, ring_size=cp.ring_size)

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        self.num_calls += 1
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        if q_THD.shape[0] != self._num_tokens:
            raise BatchError(
                f"attention was called with {q_THD.shape[0]} tokens; expected the {self._num_tokens} of this rank"
            )
        if self._cp.ulysses is None:
            return self._attend_to_shard(q_THD, k_TKD, v_TKD, kind)[None]
        size, num_heads = self._cp.ulysses_size, q_THD.shape[1]
        k_TKD, v_TKD = (repeat_for_ranks(x, num_query_heads=num_heads, size=size) for x in (k_TKD, v_TKD))
        q_THD, k_TKD, v_TKD = scatter_heads([q_THD, k_TKD, v_TKD], self._cp.ulysses)
        if kind.sinks is not None:
            kind = replace(kind, sinks=kind.sinks.unflatten(0, (size, -1))[self._cp.ulysses_rank])
        return gather_heads(self._attend_to_shard(q_THD, k_TKD, v_TKD, kind), self._cp.ulysses)[None]

    def _attend_to_shard(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Compute [T, H, D] of all tokens of the row, or of the ring rank's shard of it, with some of the heads."""
        if self._cp.ring is None:
            q_1HTD, k_1KTD, v_1KTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
            return self._packed.attend(q_1HTD, k_1KTD, v_1KTD, kind)[0]
        return ring_attention(q_THD, k_TKD, v_TKD, kind, group=self._cp.ring, segments=self._segments)
