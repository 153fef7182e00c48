"""Attention of a block of queries to a block of keys; blocks can be merged and have gradients.

Shapes: S segments, Q/L queries/keys of a block, H query heads, K key-value heads, D/V dimension of keys/values.
The backward pass needs the output and log-sum-exp over *all* keys of a query, of which the block's are some
(FlashAttention, arXiv:2205.14135, algorithm 4).

An attention sink (gpt-oss; StreamingLLM, arXiv:2309.17453) is one more score in each softmax, without a value: a term
of the log-sum-exp, merged like a block whose output is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.objectives.objective import on_device

_aten = torch.ops.aten
_NUM_PLAIN_ROWS = 1024
"""Most queries whose scores are in memory at a time, without a kernel."""
_NUM_PLAIN_SCORES = 1 << 26
"""Most scores in memory at a time, without a kernel: 256 MB in float32."""
_CUDA_MAX_HEAD_DIM = 256
"""Largest head dimension of the flash-attention kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionKind:
    """A layer's attention. H query heads."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    sliding_window: int | None = None
    """Number of latest tokens of its sequence that a query sees, its own included; None: all."""
    softcap: float | None = None
    """Replace scores x by softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2); None: do not."""
    sinks: torch.Tensor | None = None
    """[H] a further score of each head's softmax, without a value; None: none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoring:
    """The scores of a block of queries and a block of keys."""

    scale: float
    """Factor of the scores."""
    is_causal: bool = False
    """Query i sees keys up to i only, of as many keys as there are queries."""
    softcap: float | None = None
    key_mask: torch.Tensor | None = None
    """[S, 1, 1, L], added to the scores after the cap: 0, or -inf for keys that pad a segment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """The tokens of a row that make up S segments of L tokens."""

    num_segments: int
    length: int
    start: int = 0
    step: int = 1
    """Segments are `step` tokens apart, from `start` on, if there is no index."""
    index: torch.Tensor | None = None
    """[S * L] index of each token in the row; padding of a segment repeats its last token."""
    write_index: torch.Tensor | None = None
    """The same, but padding is written to the row's end: the output then has one token more."""
    is_padding: torch.Tensor | None = None
    """[S, L] tokens that pad; None: there are none."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x as [S, L, ...], a view if they are evenly spaced."""
        if self.index is not None:
            return x.index_select(0, self.index).unflatten(0, (self.num_segments, self.length))
        if self.num_segments == 1:
            return x[None, self.start : self.start + self.length]
        end = self.start + (self.num_segments - 1) * self.step + self.length
        return x[self.start : end].unfold(0, self.length, self.step).movedim(-1, 1)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows of x by values [S, L, ...]."""
        if self.write_index is None:
            self.take(x).copy_(values)
        else:
            x.index_copy_(0, self.write_index, values.flatten(0, 1).to(x.dtype))

    def add(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Add values [S, L, ...] to the rows of x."""
        if self.write_index is None:
            self.take(x).add_(values)
        else:
            x.index_add_(0, self.write_index, values.flatten(0, 1).to(x.dtype))


def padded_places(
    spans: Sequence[range], *, num_tokens: int, device: torch.device, is_reversed: bool
) -> Places:
    """Return the places of spans as segments of the length of the longest."""
    starts = np.array([span.start for span in spans])
    lengths = np.array(list(map(len, spans)))
    length = int(lengths.max())
    is_equal = bool((lengths == length).all())
    steps = np.diff(starts)
    if is_equal and not is_reversed and (steps == steps[:1]).all() and (steps[:1] >= length).all():
        step = int(steps[0]) if steps.size else length
        return Places(num_segments=len(spans), length=length, start=int(starts[0]), step=step)
    columns = np.arange(length)
    offsets = np.minimum(columns, lengths[:, None] - 1)
    if is_reversed:
        offsets = lengths[:, None] - 1 - offsets
    index = starts[:, None] + offsets
    arrays = {"index": index.ravel(), "write_index": index.ravel()}
    if not is_equal:
        is_padding = columns >= lengths[:, None]
        arrays |= {
            "write_index": np.where(is_padding, num_tokens, index).ravel(),
            "is_padding": is_padding,
        }
    tensors: dict[str, Any] = {name: on_device(array, device) for name, array in arrays.items()}
    return Places(num_segments=len(spans), length=length, **tensors)


def places_end_to_end(spans: Sequence[range], *, device: torch.device, is_reversed: bool) -> Places:
    """Return the places of spans as one segment: a view if each starts where the last ended."""
    starts = np.array([span.start for span in spans])
    lengths = np.array(list(map(len, spans)))
    if not is_reversed and (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return Places(num_segments=1, length=int(lengths.sum()), start=int(starts[0]))
    parts: list[NDArray[np.int64]] = []
    for span in spans:
        part = np.arange(span.start, span.stop)
        if is_reversed:
            part = part[::-1]
        parts.append(part)
    index = on_device(np.concatenate(parts), device)
    return Places(num_segments=1, length=index.numel(), index=index, write_index=index)


@dataclass(frozen=True, kw_only=True, eq=False)
class VarlenLengths:
    """Segments of queries and of keys that lie end to end, for flash attention of CUDA."""

    query_bounds: torch.Tensor
    """[segments + 1] int32 places of the first queries, and the number of queries."""
    key_bounds: torch.Tensor
    max_queries: int
    """Length of the longest segment."""
    max_keys: int
    is_causal: bool
    window: int | None
    """Latest keys that a query sees, its own included; None: all."""

    @classmethod
    def of(
        cls,
        num_queries: Sequence[int],
        num_keys: Sequence[int],
        device: torch.device,
        *,
        is_causal: bool,
        window: int | None,
    ) -> "VarlenLengths":
        """Describe segments by their numbers of queries and of keys."""
        return cls(
            query_bounds=on_device(np.append(0, np.cumsum(num_queries)).astype(np.int32), device),
            key_bounds=on_device(np.append(0, np.cumsum(num_keys)).astype(np.int32), device),
            max_queries=max(num_queries),
            max_keys=max(num_keys),
            is_causal=is_causal,
            window=window,
        )

    @property
    def of_segments(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Lengths and bounds as the kernel takes them, in its order."""
        return self.query_bounds, self.key_bounds, self.max_queries, self.max_keys

    @property
    def windows(self) -> dict[str, int]:
        """Window arguments of the kernel: keys left and right of its own that a query sees; empty: all."""
        if self.window is None:
            return {}
        return {"window_size_left": self.window - 1, "window_size_right": 0}


def attend_block(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLV: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a block of keys.

    Returns:
        Output [S, H, Q, V] of the queries' dtype, and log-sum-exp of the scores [S, H, Q] in float32 at least. A query
        that sees no key has output 0 and log-sum-exp -inf.
    """
    is_causal = scoring.is_causal
    if _has_cpu_kernel(q_SHQD, v_SKLV, scoring):
        options = _cpu_options(scoring, q_SHQD)
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q_SHQD, k_SKLD, v_SKLV, 0.0, is_causal, **options
        )
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    # Autocast would narrow the matrix products.
    with torch.autocast(q_SHQD.device.type, enabled=False):
        for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=is_causal):
            scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scoring)
            _hide(scores_SKGQL, rows, keys, scoring)
            lse_SKGQ = scores_SKGQL.logsumexp(-1)
            probs_SKGQL = _probs(scores_SKGQL, lse_SKGQ)
            outs.append((probs_SKGQL @ _promote(v_SKLV[:, :, None, keys])).flatten(1, 2))
            lses.append(lse_SKGQ.flatten(1, 2))
    return torch.cat(outs, dim=2).to(q_SHQD.dtype), torch.cat(lses, dim=2)


def include_sinks(
    out_THV: torch.Tensor, lse_TH: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Include the sinks in the output and log-sum-exp of T queries over their keys."""
    total_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    return (out_THV * (lse_TH - total_TH).exp()[..., None]).to(out_THV.dtype), total_TH


def sink_gradients(
    grad_THV: torch.Tensor, out_THV: torch.Tensor, lse_TH: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient [H] of the sinks of T queries."""
    delta_TH = (_promote(grad_THV) * out_THV).sum(-1)
    return (-(sinks_H.to(lse_TH.dtype) - lse_TH).exp() * delta_TH).sum(0).to(sinks_H.dtype)


def block_gradients(
    grad_SHQV: torch.Tensor,
    q_SHQD: torch.Tensor,
    k_SKLD: torch.Tensor,
    v_SKLV: torch.Tensor,
    out_SHQV: torch.Tensor,
    lse_SHQ: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the block's part of the gradients of queries, keys and values, in their shapes."""
    scale = scoring.scale
    softcap = scoring.softcap
    if _has_cpu_kernel(q_SHQD, v_SKLV, scoring):
        options = _cpu_options(scoring, q_SHQD)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ, 0.0, scoring.is_causal, **options
        )
    groups = (k_SKLD.shape[1], -1)
    grad_q: list[torch.Tensor] = []
    grad_k_SKLD = torch.zeros_like(_promote(k_SKLD))
    grad_v_SKLV = torch.zeros_like(_promote(v_SKLV))
    for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=scoring.is_causal):
        scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scoring)
        slope_SKGQL: Any = scale
        if softcap is not None:
            slope_SKGQL = (1 - (scores_SKGQL / softcap).square()) * scale
        _hide(scores_SKGQL, rows, keys, scoring)
        probs_SKGQL = _probs(scores_SKGQL, lse_SHQ[:, :, rows].unflatten(1, groups))
        grad_SKGQV = _promote(grad_SHQV[:, :, rows]).unflatten(1, groups)
        delta_SKGQ = (grad_SKGQV * out_SHQV[:, :, rows].unflatten(1, groups)).sum(-1)
        grad_v_SKLV[:, :, keys] += (probs_SKGQL.mT @ grad_SKGQV).sum(2)
        grad_probs_SKGQL = grad_SKGQV @ _promote(v_SKLV[:, :, None, keys]).mT
        grad_scores_SKGQL = probs_SKGQL * (grad_probs_SKGQL - delta_SKGQ[..., None]) * slope_SKGQL
        grad_q.append((grad_scores_SKGQL @ _promote(k_SKLD[:, :, None, keys])).flatten(1, 2))
        q_SKGQD = _promote(q_SHQD[:, :, rows]).unflatten(1, groups)
        grad_k_SKLD[:, :, keys] += (grad_scores_SKGQL.mT @ q_SKGQD).sum(2)
    return (
        torch.cat(grad_q, dim=2).to(q_SHQD.dtype),
        grad_k_SKLD.to(k_SKLD.dtype),
        grad_v_SKLV.to(v_SKLV.dtype),
    )


def has_varlen_kernel(q_THD: torch.Tensor, v_TKV: torch.Tensor, softcap: float | None) -> bool:
    """Return whether flash attention of CUDA computes a row's attention; elsewhere blocks are computed one by one."""
    head_dim = q_THD.shape[-1]
    if q_THD.device.type != "cuda" or softcap is not None or head_dim != v_TKV.shape[-1]:
        return False
    is_narrow = q_THD.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and head_dim % 8 == 0 and head_dim <= _CUDA_MAX_HEAD_DIM


def attend_varlen(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    lengths: VarlenLengths,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each segment of queries to its segment of keys, by flash attention of CUDA.

    Returns:
        Output [N, H, D], and log-sum-exp [N, H] in float32.
    """
    out_NHD, lse_HN, *_ = _aten._flash_attention_forward(
        q_NHD,
        k_MKD,
        v_MKD,
        *lengths.of_segments,
        0.0,
        lengths.is_causal,
        False,
        scale=scale,
        **lengths.windows,
    )
    return out_NHD, lse_HN.T


def varlen_gradients(
    grad_NHD: torch.Tensor,
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor,
    lengths: VarlenLengths,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the segments' part of the gradients of queries, keys and values, in their shapes."""
    # The state of dropout, of which there is none: the kernel reads nothing of it.
    state = (
        torch.empty(2, dtype=torch.uint64, device=q_NHD.device),
        torch.empty(0, device=q_NHD.device),
    )
    return _aten._flash_attention_backward(
        grad_NHD,
        q_NHD,
        k_MKD,
        v_MKD,
        out_NHD,
        lse_NH.T.contiguous(),
        *lengths.of_segments,
        0.0,
        lengths.is_causal,
        *state,
        scale=scale,
        **lengths.windows,
    )


def _has_cpu_kernel(q_SHQD: torch.Tensor, v_SKLV: torch.Tensor, scoring: Scoring) -> bool:
    return (
        q_SHQD.device.type == "cpu"
        and scoring.softcap is None
        and q_SHQD.shape[-1] == v_SKLV.shape[-1]
    )


def _cpu_options(scoring: Scoring, q_SHQD: torch.Tensor) -> dict[str, Any]:
    mask = scoring.key_mask
    if mask is not None:
        mask = mask.to(q_SHQD.dtype)
    return {"attn_mask": mask, "scale": scoring.scale}


def _row_blocks(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, *, is_causal: bool
) -> list[tuple[slice, slice]]:
    """Return the queries of each step, with the keys that any of them sees."""
    num_segments, num_heads, num_queries, _ = q_SHQD.shape
    num_keys = k_SKLD.shape[2]
    step = min(_NUM_PLAIN_ROWS, max(1, _NUM_PLAIN_SCORES // (num_segments * num_heads * num_keys)))
    blocks: list[tuple[slice, slice]] = []
    for start in range(0, num_queries, step):
        end = min(start + step, num_queries)
        if is_causal:
            num_keys = end
        blocks.append((slice(start, end), slice(0, num_keys)))
    return blocks


def _scores(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, rows: slice, keys: slice, scoring: Scoring
) -> torch.Tensor:
    """Compute the scores [S, K, H / K, rows, keys], hidden ones too."""
    q_SKGQD = _promote(q_SHQD[:, :, rows]).unflatten(1, (k_SKLD.shape[1], -1))
    scores_SKGQL = q_SKGQD @ _promote(k_SKLD[:, :, None, keys]).mT * scoring.scale
    if scoring.softcap is not None:
        scores_SKGQL.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores_SKGQL


def _hide(scores_SKGQL: torch.Tensor, rows: slice, keys: slice, scoring: Scoring) -> None:
    """Set scores to -inf where a query does not see a key."""
    if scoring.is_causal:
        row = torch.arange(rows.start, rows.stop, device=scores_SKGQL.device)
        column = torch.arange(keys.start, keys.stop, device=scores_SKGQL.device)
        scores_SKGQL.masked_fill_(column > row[:, None], -torch.inf)
    if scoring.key_mask is not None:
        scores_SKGQL.add_(scoring.key_mask[:, :, None, :, keys])


def _probs(scores_SKGQL: torch.Tensor, lse_SKGQ: torch.Tensor) -> torch.Tensor:
    """Compute probabilities; 0, and not NaN, for a query that sees no key."""
    return (scores_SKGQL - lse_SKGQ.clamp(min=torch.finfo(lse_SKGQ.dtype).min)[..., None]).exp()


def _promote(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
