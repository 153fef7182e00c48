"""Attention over a row as a few kernel calls, without masks: the tiles that tokens see (`Tile`), merged again.

Tiles of a query are merged by their log-sum-exp (FlashAttention, arXiv:2205.14135, section 3.1), and go backward with
the output and log-sum-exp over all of them. A tile whose queries see from one key on is a causal one in reverse order.

Shapes: T tokens of a row, S segments of L tokens in one kernel call, N tokens of a call, H query heads, K key-value
heads, D/V dimension of keys/values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from gcore_trainer.packing.block_attention import (
    AttentionKind,
    Places,
    Scoring,
    VarlenLengths,
    attend_block,
    attend_varlen,
    block_gradients,
    has_varlen_kernel,
    include_sinks,
    padded_places,
    places_end_to_end,
    sink_gradients,
    varlen_gradients,
)
from gcore_trainer.packing.layout import Segment, rounded_length
from gcore_trainer.packing.whole_row import WholeRow

NUM_PADDED = 64
"""Longest tiles that share a call with others of about their length, padded; longer ones only where lengths equal."""

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Tile(NamedTuple):
    """Neighbouring queries, and neighbouring keys that they see: all, or a triangle of as many keys as queries.

    Segments, shared prompts, sliding windows and the chunks of a ring are exact sums of tiles, without masks.
    """

    queries: range
    """Places in the row."""
    keys: range
    seen: Literal["all", "until", "from"]
    """Which keys query i sees: all, those until key i, or those from key i."""


def causal_tiles(tokens: range, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of tokens that see their latest predecessors and themselves, `window` in all."""
    step = len(tokens)
    if window is not None:
        step = min(window, step)
    chunks = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    for chunk in chunks:
        yield Tile(chunk, chunk, "until")
    for previous, chunk in pairwise(chunks):
        yield from earlier_tiles(chunk, previous, step, window)


def earlier_tiles(queries: range, keys: range, distance: int, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of queries whose keys all come before them, so that only a sliding window hides some.

    Args:
        distance: position of the first query less that of the first key.
        window: latest tokens that a query sees, its own included; None: all.
    """
    # Query i sees the keys from i + shift.
    shift = -len(queries)
    if window is not None:
        shift = distance - window + 1
    if shift > 0:
        keys = keys[shift:]
        shift = 0
    num_full = min(-shift, len(queries))
    num_partial = min(len(queries) - num_full, len(keys))
    partial = queries[num_full : num_full + num_partial]
    for tile in (
        Tile(queries[:num_full], keys, "all"),
        Tile(partial, keys[num_partial:], "all"),
    ):
        if tile.queries and tile.keys:
            yield tile
    if num_partial:
        yield Tile(partial, keys[:num_partial], "from")


def row_tiles(
    segments: Sequence[Segment], window: int | None, *, kernel_has_windows: bool = False
) -> list[Tile]:
    """Return the tiles of a row's segments: each sees itself causally, and all of its ancestors.

    A kernel that has windows gets causal tiles whole.
    """
    tiles: list[Tile] = []
    descendants: dict[Segment, list[Segment]] = {}
    causal_window = None if kernel_has_windows else window
    for segment in segments:
        tiles += causal_tiles(segment.tokens, causal_window)
        for ancestor in segment.path[:-1]:
            descendants.setdefault(ancestor, []).append(segment)
    for ancestor, branches in descendants.items():
        keys = ancestor.tokens
        # Descendants are neighbours, and the ancestor's last tokens are seen by all of them.
        longest = max(s.context_length + s.length for s in branches) - ancestor.context_length
        first = 0
        if window is not None:
            first = min(len(keys), max(0, longest - window))
        if first < len(keys):
            queries = range(branches[0].start, branches[-1].tokens.stop)
            tiles.append(Tile(queries, keys[first:], "all"))
        if first:
            for branch in branches:
                distance = branch.context_length - ancestor.context_length
                tiles += earlier_tiles(branch.tokens, keys[:first], distance, window)
    return tiles


@dataclass(frozen=True, kw_only=True, eq=False)
class TileCall:
    """One kernel call: for S segments of tiles of about equal extents, or for tiles end to end."""

    queries: Places
    keys: Places
    is_first: bool
    """No call before this one has any of its queries, nor of its keys."""
    is_causal: bool
    key_mask: torch.Tensor | None = None
    """[S, 1, 1, L] 0, or -inf for padding that a query would see."""
    lengths: VarlenLengths | None = None
    """Extents of the tiles that lie end to end, for flash attention of CUDA, with S = 1; None: a batch of S."""

    def _scoring(self, scoring: Scoring) -> Scoring:
        return replace(scoring, is_causal=self.is_causal, key_mask=self.key_mask)

    def attend(
        self, q_SQHD: torch.Tensor, k_SLKD: torch.Tensor, v_SLKV: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output [S, Q, H, V] and log-sum-exp [S, Q, H]."""
        if self.lengths is not None:
            out_NHD, lse_NH = attend_varlen(
                q_SQHD[0], k_SLKD[0], v_SLKV[0], self.lengths, scale=scoring.scale
            )
            return out_NHD[None], lse_NH[None]
        q_SHQD = q_SQHD.transpose(1, 2)
        k_SKLD = k_SLKD.transpose(1, 2)
        v_SKLV = v_SLKV.transpose(1, 2)
        out_SHQV, lse_SHQ = attend_block(q_SHQD, k_SKLD, v_SKLV, self._scoring(scoring))
        return out_SHQV.transpose(1, 2), lse_SHQ.transpose(1, 2)

    def gradients(self, tensors: Sequence[torch.Tensor], scoring: Scoring) -> _Gradients:
        """Return the call's part of the gradients of queries, keys and values.

        Args:
            tensors: [S, ...] of the call: gradient of the output, queries, keys, values, output, log-sum-exp.
        """
        if self.lengths is not None:
            grad, q, k, v, out, lse = (x[0] for x in tensors)
            grad_q, grad_k, grad_v = varlen_gradients(
                grad, q, k, v, out, lse, self.lengths, scale=scoring.scale
            )
            return grad_q[None], grad_k[None], grad_v[None]
        lse_SQH = tensors[-1]
        is_padding = self.queries.is_padding
        if is_padding is not None:
            # A query whose probabilities are 0 adds nothing.
            lse_SQH = lse_SQH.masked_fill(is_padding[..., None], torch.inf)
        grad, q, k, v, out, _ = (x.transpose(1, 2) for x in tensors)
        grad_q, grad_k, grad_v = block_gradients(
            grad, q, k, v, out, lse_SQH.transpose(1, 2), self._scoring(scoring)
        )
        return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def make_calls(
    tiles: Sequence[Tile],
    *,
    num_tokens: int,
    device: torch.device,
    is_varlen: bool,
    window: int | None = None,
) -> list[TileCall]:
    """Put tiles together in kernel calls.

    Args:
        num_tokens: of the row.
        is_varlen: for flash attention of CUDA, a call for each kind of tile.
        window: keys that queries of causal tiles see, for that kernel; None: all until their own.
    """
    # A query is in a call once, and its first call is the one where it sees itself.
    groups: dict[Any, list[Tile]] = {}
    times: dict[str, NDArray[np.int64]] = {}
    for tile in tiles:
        calls_of_token = times.setdefault(tile.seen, np.zeros(num_tokens, np.int64))
        calls_of_query = calls_of_token[tile.queries.start : tile.queries.stop]
        extents = None if is_varlen else _extents(tile)
        groups.setdefault((tile.seen, int(calls_of_query.max()), extents), []).append(tile)
        calls_of_query[:] = calls_of_query.max() + 1
    calls: list[TileCall] = []
    for (seen, _, _), members in sorted(groups.items(), key=lambda item: item[0][0] != "until"):
        options: dict[str, Any] = {"device": device, "is_reversed": seen == "from"}
        query_spans = [tile.queries for tile in members]
        key_spans = [tile.keys for tile in members]
        is_first = seen == "until"
        is_causal = seen != "all"
        lengths = key_mask = None
        if is_varlen:
            queries = places_end_to_end(query_spans, **options)
            keys = places_end_to_end(key_spans, **options)
            lengths = VarlenLengths.of(
                list(map(len, query_spans)),
                list(map(len, key_spans)),
                device,
                is_causal=is_causal,
                window=window if is_first else None,
            )
        else:
            queries = padded_places(query_spans, num_tokens=num_tokens, **options)
            keys = padded_places(key_spans, num_tokens=num_tokens, **options)
            is_padding_SL = keys.is_padding
            if is_padding_SL is not None and not is_causal:
                key_mask = torch.zeros(is_padding_SL.shape, device=device).masked_fill_(
                    is_padding_SL, -torch.inf
                )
                key_mask = key_mask[:, None, None]
        call = TileCall(
            queries=queries,
            keys=keys,
            is_first=is_first,
            is_causal=is_causal,
            lengths=lengths,
            key_mask=key_mask,
        )
        calls.append(call)
    return calls


def _extents(tile: Tile) -> tuple[int, int]:
    """Return the numbers of queries and keys, rounded up for small tiles."""
    num_queries = len(tile.queries)
    num_keys = len(tile.keys)
    if max(num_queries, num_keys) > NUM_PADDED:
        return num_queries, num_keys
    return rounded_length(num_queries), rounded_length(num_keys)


class RowCalls:
    """The kernel calls of a row's attention, made when a layer first needs them.

    Args:
        segments: of the whole row.
        device: that computes.
    """

    def __init__(self, segments: Sequence[Segment], *, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._calls: dict[tuple[int | None, bool], list[TileCall]] = {}
        self._whole_rows: dict[int | None, WholeRow] = {}

    def of(self, window: int | None, *, is_varlen: bool) -> list[TileCall]:
        """Return the calls of a layer with this sliding window."""
        if (window, is_varlen) not in self._calls:
            tiles = row_tiles(self._segments, window, kernel_has_windows=is_varlen)
            num_tokens = sum(segment.length for segment in self._segments)
            self._calls[window, is_varlen] = make_calls(
                tiles,
                num_tokens=num_tokens,
                device=self._device,
                is_varlen=is_varlen,
                window=window,
            )
        return self._calls[window, is_varlen]

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        attention: AttentionKind,
    ) -> torch.Tensor:
        """Compute attention [T, H, V], differentiably.

        Under autocast it computes in autocast's dtype, as torch's own attention does. Results of several calls are
        merged in float32 at least, and rounded once.
        """
        device_type = q_THD.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            q_THD = q_THD.to(dtype)
            k_TKD = k_TKD.to(dtype)
            v_TKV = v_TKV.to(dtype)
        scoring = scoring_of(attention, q_THD.shape[-1])
        is_varlen = has_varlen_kernel(q_THD, v_TKV, attention.softcap)
        if is_varlen and WholeRow.is_small(
            self._segments, num_heads=q_THD.shape[1], num_kv_heads=k_TKD.shape[1]
        ):
            return self._whole_row(attention.sliding_window).attend(
                q_THD, k_TKD, v_TKV, attention.sinks, scoring.scale
            )
        calls = self.of(attention.sliding_window, is_varlen=is_varlen)
        return RowAttention.apply(q_THD, k_TKD, v_TKV, attention.sinks, calls, scoring)

    def _whole_row(self, window: int | None) -> WholeRow:
        if window not in self._whole_rows:
            self._whole_rows[window] = WholeRow(self._segments, device=self._device, window=window)
        return self._whole_rows[window]


def scoring_of(attention: AttentionKind, head_dim: int) -> Scoring:
    """Return how a layer scores its blocks: without a mask, and with its scale or 1 / sqrt(D)."""
    scale = attention.scale
    if scale is None:
        scale = head_dim**-0.5
    return Scoring(scale=scale, softcap=attention.softcap)


def attend_calls(
    calls: Sequence[TileCall],
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    out_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Merge the attention to these keys into the output and log-sum-exp so far, which first calls replace."""
    for call in calls:
        q_SQHD = call.queries.take(q_THD)
        out_SQHV, lse_SQH = call.attend(
            q_SQHD, call.keys.take(k_TKD), call.keys.take(v_TKV), scoring
        )
        if not call.is_first:
            so_far_SQH = call.queries.take(lse_TH)
            # In float32: output of narrow kernels is widened, and rounded once if the row's is narrow.
            share_SQH1 = (lse_SQH - so_far_SQH).sigmoid_()[..., None]
            earlier_SQHV = call.queries.take(out_THV).to(share_SQH1.dtype)
            out_SQHV = torch.lerp(earlier_SQHV, out_SQHV.to(share_SQH1.dtype), share_SQH1)
            lse_SQH = torch.logaddexp(lse_SQH, so_far_SQH)
        call.queries.put(out_THV, out_SQHV.to(out_THV.dtype))
        call.queries.put(lse_TH, lse_SQH)


def gradients_of_calls(
    calls: Sequence[TileCall],
    tensors: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    scoring: Scoring,
    *,
    is_first_of_keys: bool,
) -> None:
    """Add the calls' parts of the gradients of queries, keys and values to their sums, which first calls replace.

    Args:
        tensors: gradient of the output, queries, keys, values, output, log-sum-exp over all keys; rows of each.
        is_first_of_keys: first calls replace the sums of keys and values, too.
    """
    for call in calls:
        queries = call.queries
        keys = call.keys
        sides = (queries, queries, keys, keys, queries, queries)
        parts = call.gradients(
            [side.take(x) for side, x in zip(sides, tensors, strict=True)], scoring
        )
        replaces_keys = call.is_first and is_first_of_keys
        replaces = (call.is_first, replaces_keys, replaces_keys)
        for side, total, part, is_replaced in zip(
            (queries, keys, keys), sums, parts, replaces, strict=True
        ):
            if is_replaced:
                side.put(total, part)
            else:
                side.add(total, part)


class RowAttention(torch.autograd.Function):
    """The attention of a row's calls; see `RowCalls.attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        sinks_H: torch.Tensor | None,
        calls: list[TileCall],
        scoring: Scoring,
    ) -> torch.Tensor:
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        shape_TH = num_rows(calls, q_THD.shape[0]), q_THD.shape[1]
        out_dtype = wide if merges_again(calls) else None
        out_THV = q_THD.new_empty((*shape_TH, v_TKV.shape[2]), dtype=out_dtype)
        lse_TH = q_THD.new_empty(shape_TH, dtype=wide)
        attend_calls(calls, q_THD, k_TKD, v_TKV, out_THV, lse_TH, scoring)
        out_THV, lse_TH = finish_row(out_THV, lse_TH, q_THD, sinks_H)
        ctx.calls = calls
        ctx.scoring = scoring
        ctx.save_for_backward(q_THD, k_TKD, v_TKV, sinks_H, out_THV, lse_TH)
        return out_THV

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKV, sinks_H, out_THV, lse_TH = ctx.saved_tensors
        grad_THV = grad_outputs[
            0
        ].contiguous()  # that of a sum has no strides, which kernels do not take
        # Keys that several calls see are summed in float32, as one kernel would.
        key_dtype = lse_TH.dtype if len(ctx.calls) > 1 else None
        query_dtype = lse_TH.dtype if merges_again(ctx.calls) else None
        num_tokens = q_THD.shape[0]
        rows = num_rows(ctx.calls, num_tokens)
        inputs = (q_THD, k_TKD, v_TKV)
        sums: list[torch.Tensor] = []
        for x, dtype in zip(inputs, (query_dtype, key_dtype, key_dtype), strict=True):
            sums.append(x.new_empty((rows, *x.shape[1:]), dtype=dtype))
        tensors = (grad_THV, q_THD, k_TKD, v_TKV, out_THV, lse_TH)
        gradients_of_calls(ctx.calls, tensors, sums, ctx.scoring, is_first_of_keys=True)
        grad_sinks_H = (
            sink_gradients(grad_THV, out_THV, lse_TH, sinks_H) if ctx.needs_input_grad[3] else None
        )
        grads = [total[:num_tokens].to(x.dtype) for total, x in zip(sums, inputs, strict=True)]
        return *grads, grad_sinks_H, None, None


def finish_row(
    out_THV: torch.Tensor, lse_TH: torch.Tensor, q_THD: torch.Tensor, sinks_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the row for padding off the output and log-sum-exp, and include sinks; round the output to q's dtype."""
    num_tokens = q_THD.shape[0]
    out_THV = out_THV[:num_tokens]
    lse_TH = lse_TH[:num_tokens]
    if sinks_H is not None:
        out_THV, lse_TH = include_sinks(out_THV, lse_TH, sinks_H)
    return out_THV.to(q_THD.dtype), lse_TH


def num_rows(calls: Sequence[TileCall], num_tokens: int) -> int:
    """Return the number of rows that calls write: one more than tokens if segments are padded."""
    for call in calls:
        if call.queries.is_padding is not None or call.keys.is_padding is not None:
            return num_tokens + 1
    return num_tokens


def merges_again(calls: Sequence[TileCall]) -> bool:
    """Return whether a query may be in more than one call that merges, so that sums must not be rounded in between."""
    return sum(not call.is_first for call in calls) > 1
