"""Attention of a block of queries to a block of keys, with what it takes to merge blocks and to go backward.

Shapes: S segments, Q/L queries/keys of a block, H query heads, K key-value heads, D/V dimension of keys/values.
The backward pass needs the output and log-sum-exp over *all* keys of a query, of which the block's are some
(FlashAttention, arXiv:2205.14135, algorithm 4).

An attention sink (gpt-oss; StreamingLLM, arXiv:2309.17453) is one more score in each softmax, without a value: a term
of the log-sum-exp, merged like a block whose output is 0.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

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
    mask: torch.Tensor | None = None
    """[S or 1, 1, Q, L], added to the scores after the cap: 0, or -inf if a query does not see a key."""


def block_attention(
    q_SHQD: torch.Tensor,
    k_SKLD: torch.Tensor,
    v_SKLV: torch.Tensor,
    scoring: Scoring,
    *,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention [S, H, Q, V] with a soft cap or sinks, differentiably.

    Under autocast it computes in autocast's dtype, as torch's own attention does.
    """
    device_type = q_SHQD.device.type
    if torch.is_autocast_enabled(device_type):
        q_SHQD, k_SKLD, v_SKLV = (x.to(torch.get_autocast_dtype(device_type)) for x in (q_SHQD, k_SKLD, v_SKLV))
    return _Attention.apply(q_SHQD, k_SKLD, v_SKLV, sinks_H, scoring)


def attend_block(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLV: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a block of keys.

    Returns:
        Output [S, H, Q, V] of the queries' dtype, and log-sum-exp of the scores [S, H, Q] in float32 at least. A query
        that sees no key has output 0 and log-sum-exp -inf.
    """
    scale, is_causal, kernel = scoring.scale, scoring.is_causal, _kernel(q_SHQD, v_SKLV, scoring)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q_SHQD, k_SKLD, v_SKLV, 0.0, is_causal, scale=scale)
    if kernel == "cuda":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q_SHQD, k_SKLD, v_SKLV, 0.0, is_causal, False, scale=scale
        )
        return out, lse
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    # Autocast would narrow the matrix products.
    with torch.autocast(q_SHQD.device.type, enabled=False):
        for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=is_causal):
            scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scoring)
            _hide(scores_SKGQL, rows, keys, scoring)
            lse_SKGQ = scores_SKGQL.logsumexp(-1)
            probs_SKGQL = _probs(scores_SKGQL, lse_SKGQ)
            outs.append((probs_SKGQL @ _widened(v_SKLV[:, :, None, keys])).flatten(1, 2))
            lses.append(lse_SKGQ.flatten(1, 2))
    return torch.cat(outs, dim=2).to(q_SHQD.dtype), torch.cat(lses, dim=2)


def include_sinks(
    out_HV: torch.Tensor, lse_H: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Include the head's sink in the output and log-sum-exp over a query's keys."""
    total_H = torch.logaddexp(lse_H, sinks_H.to(lse_H.dtype))
    return (out_HV * (lse_H - total_H).exp()[..., None]).to(out_HV.dtype), total_H


def sink_gradients(
    grad_HV: torch.Tensor, out_HV: torch.Tensor, lse_H: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Compute each query's part of the gradient of its head's sink, in the shape of ``lse_H``."""
    delta_H = (_widened(grad_HV) * out_HV).sum(-1)
    return -(sinks_H.to(lse_H.dtype) - lse_H).exp() * delta_H


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
    scale, softcap, kernel = scoring.scale, scoring.softcap, _kernel(q_SHQD, v_SKLV, scoring)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ, 0.0, scoring.is_causal, scale=scale
        )
    if kernel == "cuda":
        # What describes dropout and ragged batches: there are none, and the kernel reads nothing of it.
        seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q_SHQD.device) for shape in (2, ()))
        tensors = (grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ.contiguous())
        lengths = (None, None, q_SHQD.shape[2], k_SKLD.shape[2])
        return _aten._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, scoring.is_causal, seed, offset, scale=scale
        )
    groups = (k_SKLD.shape[1], -1)
    grad_q: list[torch.Tensor] = []
    grad_k_SKLD, grad_v_SKLV = torch.zeros_like(_widened(k_SKLD)), torch.zeros_like(_widened(v_SKLV))
    for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=scoring.is_causal):
        scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scoring)
        slope_SKGQL = scale if softcap is None else (1 - (scores_SKGQL / softcap).square()) * scale
        _hide(scores_SKGQL, rows, keys, scoring)
        probs_SKGQL = _probs(scores_SKGQL, lse_SHQ[:, :, rows].unflatten(1, groups))
        grad_SKGQV = _widened(grad_SHQV[:, :, rows]).unflatten(1, groups)
        delta_SKGQ = (grad_SKGQV * out_SHQV[:, :, rows].unflatten(1, groups)).sum(-1)
        grad_v_SKLV[:, :, keys] += (probs_SKGQL.mT @ grad_SKGQV).sum(2)
        grad_probs_SKGQL = grad_SKGQV @ _widened(v_SKLV[:, :, None, keys]).mT
        grad_scores_SKGQL = probs_SKGQL * (grad_probs_SKGQL - delta_SKGQ[..., None]) * slope_SKGQL
        grad_q.append((grad_scores_SKGQL @ _widened(k_SKLD[:, :, None, keys])).flatten(1, 2))
        q_SKGQD = _widened(q_SHQD[:, :, rows]).unflatten(1, groups)
        grad_k_SKLD[:, :, keys] += (grad_scores_SKGQL.mT @ q_SKGQD).sum(2)
    return torch.cat(grad_q, dim=2).to(q_SHQD.dtype), grad_k_SKLD.to(k_SKLD.dtype), grad_v_SKLV.to(v_SKLV.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SHQD: torch.Tensor,
        k_SKLD: torch.Tensor,
        v_SKLV: torch.Tensor,
        sinks_H: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        out_SHQV, lse_SHQ = attend_block(q_SHQD, k_SKLD, v_SKLV, scoring)
        if sinks_H is not None:
            out_SHQV, lse_SHQ = include_sinks(out_SHQV, lse_SHQ, sinks_H[:, None])
        ctx.scoring = scoring
        ctx.save_for_backward(q_SHQD, k_SKLD, v_SKLV, sinks_H, out_SHQV, lse_SHQ)
        return out_SHQV

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q_SHQD, k_SKLD, v_SKLV, sinks_H, out_SHQV, lse_SHQ = ctx.saved_tensors
        grad_SHQV = grad_outputs[0].contiguous()  # that of a sum has no strides, which kernels do not take
        grads = block_gradients(grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ, ctx.scoring)
        grad_sinks_H = None
        if ctx.needs_input_grad[3]:
            parts_SHQ = sink_gradients(grad_SHQV, out_SHQV, lse_SHQ, sinks_H[:, None])
            grad_sinks_H = parts_SHQ.sum((0, 2)).to(sinks_H.dtype)
        return *grads, grad_sinks_H, None


def _kernel(q_SHQD: torch.Tensor, v_SKLV: torch.Tensor, scoring: Scoring) -> Literal["cpu", "cuda", "plain"]:
    head_dim = q_SHQD.shape[-1]
    if scoring.softcap is not None or scoring.mask is not None or head_dim != v_SKLV.shape[-1]:
        return "plain"
    if q_SHQD.device.type == "cpu":
        return "cpu"
    is_narrow = q_SHQD.dtype in (torch.bfloat16, torch.float16)
    if q_SHQD.device.type == "cuda" and is_narrow and head_dim % 8 == 0 and head_dim <= _CUDA_MAX_HEAD_DIM:
        return "cuda"
    return "plain"


def _row_blocks(q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, *, is_causal: bool) -> list[tuple[slice, slice]]:
    """Queries to take at a time, and the keys that any of them sees."""
    num_segments, num_heads, num_queries, _ = q_SHQD.shape
    num_keys = k_SKLD.shape[2]
    step = min(_NUM_PLAIN_ROWS, max(1, _NUM_PLAIN_SCORES // (num_segments * num_heads * num_keys)))
    rows = [slice(i, min(i + step, num_queries)) for i in range(0, num_queries, step)]
    return [(x, slice(0, x.stop if is_causal else num_keys)) for x in rows]


def _scores(q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, rows: slice, keys: slice, scoring: Scoring) -> torch.Tensor:
    """Compute the scores [S, K, H / K, rows, keys], without the mask."""
    q_SKGQD = _widened(q_SHQD[:, :, rows]).unflatten(1, (k_SKLD.shape[1], -1))
    scores_SKGQL = q_SKGQD @ _widened(k_SKLD[:, :, None, keys]).mT * scoring.scale
    if scoring.softcap is not None:
        scores_SKGQL.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores_SKGQL


def _hide(scores_SKGQL: torch.Tensor, rows: slice, keys: slice, scoring: Scoring) -> None:
    """Set scores to -inf where a query does not see a key."""
    if scoring.is_causal:
        row, column = (torch.arange(x.start, x.stop, device=scores_SKGQL.device) for x in (rows, keys))
        scores_SKGQL.masked_fill_(column > row[:, None], -torch.inf)
    if scoring.mask is not None:
        scores_SKGQL.add_(scoring.mask[:, :, None, rows, keys])


def _probs(scores_SKGQL: torch.Tensor, lse_SKGQ: torch.Tensor) -> torch.Tensor:
    """Compute probabilities; 0, and not NaN, for a query that sees no key."""
    return (scores_SKGQL - lse_SKGQ.clamp(min=torch.finfo(lse_SKGQ.dtype).min)[..., None]).exp()


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
