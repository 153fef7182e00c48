"""Ring attention: each rank keeps its queries, and the keys and values of all visit it in turn.

Liu et al., arXiv:2310.01889: blockwise attention whose partial results are merged by their log-sum-exp, while the next
block travels. Segments are divided zig-zag (`groups.py`), so that a visiting block is seen by all local queries through
its first half, or by the second half of them entirely: every step computes the same, and nothing that is masked.
With a sliding window, each chunk of queries attends to each chunk of keys separately, except to chunks that it does not
see.

Shapes: R ranks of the ring, T tokens of a rank's shard, S segments of equal length, H query heads, K key-value heads,
D/V dimension of keys/values, Q queries of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from gcore_trainer.packing.block_attention import (
    AttentionKind,
    Scoring,
    attend_block,
    block_gradients,
    include_sinks,
    sink_gradients,
)


class EqualSegments(NamedTuple):
    """Segments of one length, whose chunks lie side by side in a ring rank's shard."""

    start: int
    """Place of the first segment's part in the shard."""
    num_segments: int
    chunk_length: int
    """Each segment has two chunks here."""


def equal_segments(segment_lengths: NDArray[np.int64], *, ring_size: int) -> list[EqualSegments]:
    """Return the segments of every ring rank's shard, in order."""
    result: list[EqualSegments] = []
    start = 0
    for length, count in zip(*np.unique(segment_lengths, return_counts=True), strict=True):
        result.append(EqualSegments(start, int(count), int(length) // (2 * ring_size)))
        start += int(length * count) // ring_size
    return result


def ring_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    kind: AttentionKind,
    *,
    group: dist.ProcessGroup,
    segments: list[EqualSegments],
) -> torch.Tensor:
    """Attend causally within each segment of a row that the ranks of a ring divide.

    A rank keeps no more than its own tokens' tensors for the backward pass, in which all travel once more.

    Returns:
        [T, H, V], of the queries' dtype; partial results are merged in float32 at least.
    """
    scoring = Scoring(scale=q_THD.shape[-1] ** -0.5 if kind.scale is None else kind.scale, softcap=kind.softcap)
    return _RingAttention.apply(q_THD, k_TKD, v_TKV, kind.sinks, group, segments, kind.sliding_window, scoring)


@dataclass(frozen=True)
class _Block:
    """Local chunks of queries of a segment (of two) that see visiting chunks of keys (of two)."""

    queries: slice
    keys: slice
    is_causal: bool
    band: tuple[int, int] | None = None
    """Distances (position of the query - that of the key) of the first query to the first key, and from which on a
    query does not see a key; None: all queries see all keys, or all before them."""

    def scoring(self, base: Scoring, length: int, *, like: torch.Tensor) -> Scoring:
        """Return the scoring of this block: causal, or with a mask [1, 1, length, length]."""
        if self.band is None:
            return replace(base, is_causal=self.is_causal)
        first, window = self.band
        place = torch.arange(length, device=like.device)
        distance_QL = first + place[:, None] - place
        is_hidden = (distance_QL < 0) | (distance_QL >= window)
        mask_QL = torch.zeros_like(is_hidden, dtype=like.dtype).masked_fill_(is_hidden, -torch.inf)
        return replace(base, mask=mask_QL[None, None])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        sinks_H: torch.Tensor | None,
        group: dist.ProcessGroup,
        segments: list[EqualSegments],
        window: int | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        rank, size = group.rank(), group.size()
        own_kv = torch.cat([k_TKD, v_TKV], dim=-1)
        head_dims = (k_TKD.shape[2], v_TKV.shape[2])
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        out_THV = q_THD.new_zeros((*q_THD.shape[:2], head_dims[1]), dtype=wide)
        lse_TH = q_THD.new_full(q_THD.shape[:2], -torch.inf, dtype=wide)
        kv = own_kv
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            for segment, block in _blocks(segments, rank, source=(rank - step) % size, size=size, window=window):
                k_SKLD, v_SKLV = _part(kv, segment, block.keys).split(head_dims, dim=-1)
                own = block.scoring(scoring, segment.chunk_length, like=q_THD)
                q_SHQD, out_SHQV, lse_SHQ = (_part(x, segment, block.queries) for x in (q_THD, out_THV, lse_TH))
                _merge(out_SHQV, lse_SHQ, *attend_block(q_SHQD, k_SKLD, v_SKLV, own))
            if passing is not None:
                kv = passing.wait()
        if sinks_H is not None:
            out_THV, lse_TH = include_sinks(out_THV, lse_TH, sinks_H)
        result = out_THV.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, own_kv, sinks_H, result, lse_TH)
        ctx.group, ctx.segments, ctx.window, ctx.head_dims = group, segments, window, head_dims
        ctx.scoring = scoring
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
        q_THD, kv, sinks_H, out_THV, lse_TH = ctx.saved_tensors
        grad_q_THD = torch.zeros_like(q_THD, dtype=lse_TH.dtype)
        # Gradients of keys and values follow them around the ring, a step later, and end where they belong.
        passing_grad: _Passing | None = None
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            grad_kv = torch.zeros_like(kv, dtype=lse_TH.dtype)
            source = (rank - step) % size
            for segment, block in _blocks(segments, rank, source=source, size=size, window=ctx.window):
                k_SKLD, v_SKLV = _part(kv, segment, block.keys).split(ctx.head_dims, dim=-1)
                own = block.scoring(ctx.scoring, segment.chunk_length, like=q_THD)
                grad_SHQV, q_SHQD, out_SHQV, lse_SHQ = (
                    _part(x, segment, block.queries) for x in (grad_THV, q_THD, out_THV, lse_TH)
                )
                given = grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ
                grad_q, grad_k, grad_v = block_gradients(*given, own)
                _part(grad_q_THD, segment, block.queries).add_(grad_q)
                _part(grad_kv, segment, block.keys).add_(torch.cat([grad_k, grad_v], dim=-1))
            if passing_grad is not None:
                grad_kv += passing_grad.wait()
            passing_grad = _Passing(grad_kv, group)
            if passing is not None:
                kv = passing.wait()
        assert passing_grad is not None
        grad_k_TKD, grad_v_TKV = passing_grad.wait().to(kv.dtype).split(ctx.head_dims, dim=-1)
        grad_sinks_H = None
        if ctx.needs_input_grad[3]:
            grad_sinks_H = sink_gradients(grad_THV, out_THV, lse_TH, sinks_H).sum(0).to(sinks_H.dtype)
        return grad_q_THD.to(q_THD.dtype), grad_k_TKD, grad_v_TKV, grad_sinks_H, None, None, None, None


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
        """Return the tensor that the previous rank sent."""
        for work in self._works:
            work.wait()
        return self._received


def _blocks(
    segments: list[EqualSegments], rank: int, *, source: int, size: int, window: int | None
) -> Iterator[tuple[EqualSegments, _Block]]:
    """Yield what this rank computes with the keys and values of rank `source`, chunks `source` and 2R - 1 - `source`.

    With a window, it is the pairs of a chunk of queries and a chunk of keys in which any query sees a key. Latest keys
    come first: a query must meet a key that it sees before it meets blocks of keys that are all hidden from it.
    """
    for segment in segments:
        length = segment.chunk_length
        if window is None or window >= 2 * size * length:
            queries = slice(1 if source > rank else 0, 2)
            yield segment, _Block(queries, slice(0, 1 if source < rank else 2), is_causal=source == rank)
            continue
        for i, query_chunk in ((0, rank), (1, 2 * size - 1 - rank)):
            for j, key_chunk in ((1, 2 * size - 1 - source), (0, source)):
                first = (query_chunk - key_chunk) * length
                if first < 0 or first - length + 1 >= window:
                    continue
                is_seen_whole = first + length - 1 < window
                band = None if is_seen_whole else (first, window)
                is_causal = first == 0 and is_seen_whole
                yield segment, _Block(slice(i, i + 1), slice(j, j + 1), is_causal=is_causal, band=band)


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
