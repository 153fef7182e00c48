"""Ring attention: each rank keeps its queries, and the keys and values of all visit it in turn.

Liu et al., arXiv:2310.01889: blockwise attention whose partial results are merged by their log-sum-exp, while the next
block travels. Segments are divided zig-zag (`groups.py`), so that a visiting block is seen by all local queries through
its first half, or by the second half of them entirely: every step computes the same, and nothing that is masked.
With a sliding window, each chunk of queries attends to each chunk of keys separately, and to what it sees of it only.

Shapes: R ranks of the ring, T tokens of a rank's shard, H query heads, K key-value heads, D/V dimension of keys/values.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from gcore_trainer.packing.block_attention import (
    AttentionKind,
    Scoring,
    has_varlen_kernel,
    sink_gradients,
)
from gcore_trainer.packing.tiles import (
    Tile,
    TileCall,
    attend_calls,
    causal_tiles,
    earlier_tiles,
    finish_row,
    gradients_of_calls,
    make_calls,
    scoring_of,
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
    lengths, counts = np.unique(segment_lengths, return_counts=True)
    for length, count in zip(lengths, counts, strict=True):
        result.append(EqualSegments(start, int(count), int(length) // (2 * ring_size)))
        start += int(length * count) // ring_size
    return result


class RingRow:
    """Attention over a row that the ranks of a ring divide: causal within each segment.

    A rank keeps no more than its own tokens' tensors for the backward pass, in which all travel once more.
    """

    def __init__(
        self, segments: list[EqualSegments], group: dist.ProcessGroup, *, device: torch.device
    ) -> None:
        self.group = group
        self.num_tokens = sum(s.num_segments * 2 * s.chunk_length for s in segments)
        self._segments = segments
        self._device = device
        self._calls: dict[tuple[int, int | None, bool], list[TileCall]] = {}

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        attention: AttentionKind,
    ) -> torch.Tensor:
        """Compute [T, H, V] of this rank, of the queries' dtype; partial results are merged in float32 at least."""
        return _RingAttention.apply(
            q_THD,
            k_TKD,
            v_TKV,
            attention.sinks,
            self,
            attention,
            scoring_of(attention, q_THD.shape[-1]),
        )

    def num_rows(self, window: int | None) -> int:
        """Return the number of rows that calls write: one more than tokens where segments may be padded."""
        return self.num_tokens + (len(self._segments) > 1 or window is not None)

    def calls(self, source: int, window: int | None, *, is_varlen: bool) -> list[TileCall]:
        """Return the kernel calls of this rank with the keys and values of rank ``source``."""
        key = (source, window, is_varlen)
        if key not in self._calls:
            rank = self.group.rank()
            size = self.group.size()
            tiles: list[Tile] = []
            for segments in self._segments:
                tiles.extend(_tiles(segments, rank, source=source, size=size, window=window))
            self._calls[key] = make_calls(
                tiles, num_tokens=self.num_tokens, device=self._device, is_varlen=is_varlen
            )
        return self._calls[key]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        sinks_H: torch.Tensor | None,
        row: RingRow,
        attention: AttentionKind,
        scoring: Scoring,
    ) -> torch.Tensor:
        group = row.group
        rank = group.rank()
        size = group.size()
        is_varlen = has_varlen_kernel(q_THD, v_TKV, attention.softcap)
        window = attention.sliding_window
        local_kv = torch.cat([k_TKD, v_TKV], dim=-1)
        head_dims = (k_TKD.shape[2], v_TKV.shape[2])
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        # A rank meets its own keys first, of which every query sees its own.
        shape_TH = row.num_rows(attention.sliding_window), q_THD.shape[1]
        out_THV = q_THD.new_empty((*shape_TH, head_dims[1]), dtype=wide)
        lse_TH = q_THD.new_empty(shape_TH, dtype=wide)
        kv = local_kv
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            k_TKD, v_TKV = kv.split(head_dims, dim=-1)
            calls = row.calls((rank - step) % size, window, is_varlen=is_varlen)
            attend_calls(calls, q_THD, k_TKD, v_TKV, out_THV, lse_TH, scoring)
            if passing is not None:
                kv = passing.wait()
        out_THV, lse_TH = finish_row(out_THV, lse_TH, q_THD, sinks_H)
        ctx.save_for_backward(q_THD, local_kv, sinks_H, out_THV, lse_TH)
        ctx.row = row
        ctx.window = window
        ctx.is_varlen = is_varlen
        ctx.head_dims = head_dims
        ctx.scoring = scoring
        return out_THV

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_THV = grad_outputs[
            0
        ].contiguous()  # that of a sum has no strides, which kernels do not take
        row: RingRow = ctx.row
        group = row.group
        rank = group.rank()
        size = group.size()
        q_THD, kv, sinks_H, out_THV, lse_TH = ctx.saved_tensors
        num_rows = row.num_rows(ctx.window)
        grad_q_THD = q_THD.new_empty((num_rows, *q_THD.shape[1:]), dtype=lse_TH.dtype)
        # Gradients of keys and values follow them around the ring, a step later, and end where they belong.
        passing_grad: _Passing | None = None
        for step in range(size):
            passing = _Passing(kv, group) if step < size - 1 else None
            whole_grad_kv = kv.new_zeros((num_rows, *kv.shape[1:]), dtype=lse_TH.dtype)
            grad_kv = whole_grad_kv[: row.num_tokens]
            k_TKD, v_TKV = kv.split(ctx.head_dims, dim=-1)
            tensors = (grad_THV, q_THD, k_TKD, v_TKV, out_THV, lse_TH)
            sum_k, sum_v = whole_grad_kv.split(ctx.head_dims, dim=-1)
            sums = (grad_q_THD, sum_k, sum_v)
            calls = row.calls((rank - step) % size, ctx.window, is_varlen=ctx.is_varlen)
            gradients_of_calls(calls, tensors, sums, ctx.scoring, is_first_of_keys=False)
            if passing_grad is not None:
                grad_kv += passing_grad.wait()
            passing_grad = _Passing(grad_kv, group)
            if passing is not None:
                kv = passing.wait()
        assert passing_grad is not None
        grad_k_TKD, grad_v_TKV = passing_grad.wait().to(kv.dtype).split(ctx.head_dims, dim=-1)
        grad_sinks_H = (
            sink_gradients(grad_THV, out_THV, lse_TH, sinks_H) if ctx.needs_input_grad[3] else None
        )
        return (
            grad_q_THD[: row.num_tokens].to(q_THD.dtype),
            grad_k_TKD,
            grad_v_TKV,
            grad_sinks_H,
            None,
            None,
            None,
        )


class _Passing:
    """A tensor on its way to the next rank of a ring, while the previous one's arrives."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank = group.rank()
        size = group.size()
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


def _tiles(
    segments: EqualSegments, rank: int, *, source: int, size: int, window: int | None
) -> Iterator[Tile]:
    """Yield the tiles of this rank's queries with the keys of rank `source`: chunks `source` and 2R - 1 - `source`."""
    length = segments.chunk_length
    for start in range(
        segments.start, segments.start + segments.num_segments * 2 * length, 2 * length
    ):
        both_chunks = range(start, start + 2 * length)
        early = both_chunks[:length]
        late = both_chunks[length:]
        if window is None or window >= 2 * size * length:
            if source == rank:
                yield Tile(both_chunks, both_chunks, "until")
            elif source < rank:
                yield Tile(both_chunks, early, "all")
            else:
                yield Tile(late, both_chunks, "all")
            continue
        for queries, query_chunk in ((early, rank), (late, 2 * size - 1 - rank)):
            for keys, key_chunk in ((early, source), (late, 2 * size - 1 - source)):
                if query_chunk == key_chunk:
                    yield from causal_tiles(queries, window)
                elif query_chunk > key_chunk:
                    yield from earlier_tiles(
                        queries, keys, (query_chunk - key_chunk) * length, window
                    )
