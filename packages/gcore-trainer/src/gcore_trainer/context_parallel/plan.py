"""Attention over a packed row that a context-parallel group divides, and the exchanges between its ranks.

Shapes: U ranks that exchange heads, T tokens of the row or ring shard, H query heads, K key-value heads, D head
dimension.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gcore_trainer.context_parallel.groups import ContextParallel, equal_segments
from gcore_trainer.context_parallel.ring import ring_attention
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.packing.pack import AttentionKind, PackedBatch, PackedPlan


class ContextParallelPlan(PackedPlan):
    """The attention of a `PackedBatch`, from and to the tokens `cp.places(batch)` of each rank.

    Raises:
        BatchError: the row does not divide, or shares prompts where a ring divides it.
    """

    def __init__(self, batch: PackedBatch, cp: ContextParallel, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(batch, device=device, dtype=dtype)
        self._cp = cp
        self._num_tokens = cp.places(batch).size
        if cp.ring is not None:
            if any(bucket.prompt_lengths is not None for bucket in batch.buckets):
                raise BatchError(
                    f"the row shares prompts; expected one packed with share_prefix=False for ring_size {cp.ring_size}"
                )
            self._segments = equal_segments(batch.segment_lengths, ring_size=cp.ring_size)

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
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
            return super().attend(q_1HTD, k_1KTD, v_1KTD, kind)[0]
        self.num_calls += 1
        return ring_attention(q_THD, k_TKD, v_TKD, kind, group=self._cp.ring, segments=self._segments)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _exchanged(grad_outputs[0], ctx.group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch hands it over
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ARG004 - torch hands it over
        return None, grad_outputs[0]


def scatter_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange a slice of the tokens with all heads for all tokens with a slice of the heads.

    DeepSpeed-Ulysses, arXiv:2309.14509, section 3.1. All tensors travel in one message.

    Returns:
        [T, heads / U, D] of each.
    """
    size = group.size()
    parts = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in tensors]
    message = torch.cat([part.flatten(2) for part in parts], dim=-1)
    received = _AllToAll.apply(group, message).flatten(0, 1)
    widths = [part.shape[2] * part.shape[3] for part in parts]
    return [x.unflatten(-1, part.shape[2:]) for x, part in zip(received.split(widths, dim=-1), parts, strict=True)]


def gather_heads(x_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Invert `scatter_heads`: from [T, H / U, D] to [T / U, H, D]."""
    received: torch.Tensor = _AllToAll.apply(group, x_THD.unflatten(0, (group.size(), -1)))
    return received.transpose(0, 1).flatten(1, 2)


def repeat_for_ranks(x_TKD: torch.Tensor, *, num_query_heads: int, size: int) -> torch.Tensor:
    """Repeat key-value heads until `size` ranks divide them, each head next to its query heads.

    Raises:
        ConfigError: the ranks do not divide the query heads.
    """
    if num_query_heads % size:
        raise ConfigError(
            f"ulysses_size is {size}; expected a divisor of the {num_query_heads} query heads of attention"
        )
    num_heads = x_TKD.shape[1]
    return x_TKD.repeat_interleave(math.lcm(num_heads, size) // num_heads, dim=1)


def sum_over_ranks(values_N: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum the ranks' values [N] on all of them; the gradient passes unchanged.

    For ranks that each compute some entries, leave the others 0, and then compute the same loss of all: each
    back-propagates what the loss says of its own entries. The parameters' gradients are then to be summed over ranks.
    A rank that has no entries goes backward too: its attention passes on the gradients of others.
    """
    for group in groups:
        if group is not None:
            values_N = _SumOverRanks.apply(group, values_N)
    return values_N


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
