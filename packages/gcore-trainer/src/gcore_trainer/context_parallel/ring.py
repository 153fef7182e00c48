"""Ring attention: each rank keeps its queries, and the keys and values of all visit it in turn.

Liu et al., arXiv:2310.01889: blockwise attention whose partial results are merged by their log-sum-exp, while the next
block travels. Segments are divided zig-zag (`layout.py`), so that a visiting block is seen by all local queries through
its first half, or by the second half of them entirely: every step computes the same, and nothing that is masked.

Shapes: R ranks of the ring, T tokens of a rank's shard, S segments of equal length, H query heads, K key-value heads,
D/V dimension of keys/values, Q queries of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gcore_trainer.context_parallel.block_attention import attend_block, block_gradients
from gcore_trainer.context_parallel.layout import EqualSegments


def ring_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    segments: list[EqualSegments],
    scale: float,
) -> torch.Tensor:
    """Causal attention within each segment of a row that the ranks of a ring divide.

    A rank keeps no more than its own tokens' tensors for the backward pass, in which all travel once more.

    Args:
        q_THD: of this rank's shard.
        k_TKD: K divides H.
        v_TKV: of the keys' tokens.
        group: the ring; ranks pass to the next one.
        segments: what the shards are made of.
        scale: of the scores.

    Returns:
        [T, H, V], of the queries' dtype; partial results are merged in float32 at least.
    """
    return _RingAttention.apply(q_THD, k_TKD, v_TKV, group, segments, scale)


@dataclass(frozen=True)
class _Block:
    """Which of a segment's two local chunks of queries see which of the visiting two of keys."""

    queries: slice
    keys: slice
    is_causal: bool


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        group: dist.ProcessGroup,
        segments: list[EqualSegments],
        scale: float,
    ) -> torch.Tensor:
        rank, size = group.rank(), group.size()
        own_kv = torch.cat([k_TKD, v_TKV], dim=-1)
        head_dims = (k_TKD.shape[2], v_TKV.shape[2])
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        out_THV = q_THD.new_empty((*q_THD.shape[:2], head_dims[1]), dtype=wide)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
        kv = own_kv
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            block = _block(rank, source=(rank - step) % size)
            for segment in segments:
                k_SKLD, v_SKLV = _part(kv, segment, block.keys).split(head_dims, dim=-1)
                out_SHQV, lse_SHQ = attend_block(
                    _part(q_THD, segment, block.queries), k_SKLD, v_SKLV, scale=scale, is_causal=block.is_causal
                )
                merged = (_part(out_THV, segment, block.queries), _part(lse_TH, segment, block.queries))
                if step == 0:
                    merged[0].copy_(out_SHQV)
                    merged[1].copy_(lse_SHQ)
                else:
                    _merge(*merged, out_SHQV, lse_SHQ)
            if passing is not None:
                kv = passing.wait()
        result = out_THV.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, own_kv, result, lse_TH)
        ctx.group, ctx.segments, ctx.scale, ctx.head_dims = group, segments, scale, head_dims
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_THV = grad_outputs[0].contiguous()  # that of a sum has no strides, which kernels do not take
        group: dist.ProcessGroup = ctx.group
        segments: list[EqualSegments] = ctx.segments
        rank, size = group.rank(), group.size()
        q_THD, kv, out_THV, lse_TH = ctx.saved_tensors
        grad_q_THD = torch.zeros_like(q_THD, dtype=lse_TH.dtype)
        # Gradients of keys and values follow them around the ring, a step behind, and end where they belong.
        passing_grad: _Passing | None = None
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            block = _block(rank, source=(rank - step) % size)
            grad_kv = torch.zeros_like(kv, dtype=lse_TH.dtype)
            for segment in segments:
                k_SKLD, v_SKLV = _part(kv, segment, block.keys).split(ctx.head_dims, dim=-1)
                grad_q, grad_k, grad_v = block_gradients(
                    _part(grad_THV, segment, block.queries),
                    _part(q_THD, segment, block.queries),
                    k_SKLD,
                    v_SKLV,
                    _part(out_THV, segment, block.queries),
                    _part(lse_TH, segment, block.queries),
                    scale=ctx.scale,
                    is_causal=block.is_causal,
                )
                _part(grad_q_THD, segment, block.queries).add_(grad_q)
                _part(grad_kv, segment, block.keys).copy_(torch.cat([grad_k, grad_v], dim=-1))
            if passing_grad is not None:
                grad_kv += passing_grad.wait()
            passing_grad = _Passing(grad_kv, group)
            if passing is not None:
                kv = passing.wait()
        assert passing_grad is not None
        grad_k_TKD, grad_v_TKV = passing_grad.wait().to(kv.dtype).split(ctx.head_dims, dim=-1)
        return grad_q_THD.to(q_THD.dtype), grad_k_TKD, grad_v_TKV, None, None, None


class _Passing:
    """A tensor on its way to the next rank of a ring, while the previous one's arrives."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent = tensor  # must live until it has left
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> torch.Tensor:
        """What the previous rank sent."""
        for work in self._works:
            work.wait()
        return self._received


def _block(rank: int, *, source: int) -> _Block:
    """What this rank computes with the chunks `source` and 2R - 1 - `source` of a segment."""
    if source == rank:
        return _Block(slice(0, 2), slice(0, 2), is_causal=True)
    if source < rank:
        return _Block(slice(0, 2), slice(0, 1), is_causal=False)
    return _Block(slice(1, 2), slice(0, 2), is_causal=False)


def _part(x: torch.Tensor, segment: EqualSegments, chunks: slice) -> torch.Tensor:
    """A view of x [T, heads, ...]: some chunks of some segments, as [S, heads, tokens, ...]."""
    length = segment.chunk_length
    rows = x.narrow(0, segment.start, segment.num_segments * 2 * length).unflatten(0, (segment.num_segments, -1))
    return rows[:, chunks.start * length : chunks.stop * length].transpose(1, 2)


def _merge(
    out_SHQV: torch.Tensor, lse_SHQ: torch.Tensor, other_SHQV: torch.Tensor, other_lse_SHQ: torch.Tensor
) -> None:
    """Change out and lse, over some keys, to those over some keys and some others (arXiv:2205.14135, section 3.1)."""
    total_SHQ = torch.logaddexp(lse_SHQ, other_lse_SHQ)
    out_SHQV.mul_((lse_SHQ - total_SHQ).exp()[..., None])
    out_SHQV.add_(other_SHQV * (other_lse_SHQ - total_SHQ).exp()[..., None])
    lse_SHQ.copy_(total_SHQ)
