"""Attention of a block of queries to a block of keys, with what it takes to merge blocks and to go backward.

Shapes: S segments, Q/L queries/keys of a block, H query heads, K key-value heads, D/V dimension of keys/values.
The backward pass needs the output and log-sum-exp over *all* keys of a query, of which the block's are some
(FlashAttention, arXiv:2205.14135, algorithm 4).
"""

import math
from typing import Literal

import torch

_aten = torch.ops.aten

_NUM_PLAIN_ROWS = 1024
"""Queries whose scores are in memory at a time, where no kernel does it."""

_CUDA_MAX_HEAD_DIM = 256
"""Of the flash-attention kernel."""


def attend_block(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLV: torch.Tensor, *, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys, or causally to as many as there are queries.

    Returns:
        Output [S, H, Q, V] of the queries' dtype, and log-sum-exp of the scores [S, H, Q] in float32 at least.
    """
    match _kernel(q_SHQD, v_SKLV):
        case "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                q_SHQD, k_SKLD, v_SKLV, 0.0, is_causal, scale=scale
            )
        case "cuda":
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(
                q_SHQD, k_SKLD, v_SKLV, 0.0, is_causal, False, scale=scale
            )
            return out, lse
        case "plain":
            outs: list[torch.Tensor] = []
            lses: list[torch.Tensor] = []
            for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=is_causal):
                scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scale=scale, is_causal=is_causal)
                lse_SKGQ = scores_SKGQL.logsumexp(-1)
                probs_SKGQL = (scores_SKGQL - lse_SKGQ[..., None]).exp()
                outs.append((probs_SKGQL @ _widened(v_SKLV[:, :, None, keys])).flatten(1, 2))
                lses.append(lse_SKGQ.flatten(1, 2))
            return torch.cat(outs, dim=2).to(q_SHQD.dtype), torch.cat(lses, dim=2)


def block_gradients(
    grad_SHQV: torch.Tensor,
    q_SHQD: torch.Tensor,
    k_SKLD: torch.Tensor,
    v_SKLV: torch.Tensor,
    out_SHQV: torch.Tensor,
    lse_SHQ: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's part of the gradients of queries, keys and values, in their shapes.

    Args:
        grad_SHQV: of the output over all keys.
        q_SHQD: as handed to `attend_block`.
        k_SKLD: likewise.
        v_SKLV: likewise.
        out_SHQV: over all keys.
        lse_SHQ: over all keys.
        scale: as handed to `attend_block`.
        is_causal: likewise.
    """
    match _kernel(q_SHQD, v_SKLV):
        case "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ, 0.0, is_causal, scale=scale
            )
        case "cuda":
            # What describes dropout and ragged batches: there are none, and the kernel reads nothing of it.
            seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q_SHQD.device) for shape in (2, ()))
            num_queries, num_keys = q_SHQD.shape[2], k_SKLD.shape[2]
            return _aten._scaled_dot_product_flash_attention_backward(
                grad_SHQV,
                q_SHQD,
                k_SKLD,
                v_SKLV,
                out_SHQV,
                lse_SHQ.contiguous(),
                None,
                None,
                num_queries,
                num_keys,
                0.0,
                is_causal,
                seed,
                offset,
                scale=scale,
            )
        case "plain":
            return _plain_gradients(
                grad_SHQV, q_SHQD, k_SKLD, v_SKLV, out_SHQV, lse_SHQ, scale=scale, is_causal=is_causal
            )


def _plain_gradients(
    grad_SHQV: torch.Tensor,
    q_SHQD: torch.Tensor,
    k_SKLD: torch.Tensor,
    v_SKLV: torch.Tensor,
    out_SHQV: torch.Tensor,
    lse_SHQ: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = (k_SKLD.shape[1], -1)
    grad_q: list[torch.Tensor] = []
    grad_k_SKLD, grad_v_SKLV = torch.zeros_like(_widened(k_SKLD)), torch.zeros_like(_widened(v_SKLV))
    for rows, keys in _row_blocks(q_SHQD, k_SKLD, is_causal=is_causal):
        scores_SKGQL = _scores(q_SHQD, k_SKLD, rows, keys, scale=scale, is_causal=is_causal)
        probs_SKGQL = (scores_SKGQL - lse_SHQ[:, :, rows].unflatten(1, groups)[..., None]).exp()
        grad_SKGQV = _widened(grad_SHQV[:, :, rows]).unflatten(1, groups)
        delta_SKGQ = (grad_SKGQV * out_SHQV[:, :, rows].unflatten(1, groups)).sum(-1)
        grad_v_SKLV[:, :, keys] += (probs_SKGQL.mT @ grad_SKGQV).sum(2)
        grad_probs_SKGQL = grad_SKGQV @ _widened(v_SKLV[:, :, None, keys]).mT
        grad_scores_SKGQL = probs_SKGQL * (grad_probs_SKGQL - delta_SKGQ[..., None]) * scale
        grad_q.append((grad_scores_SKGQL @ _widened(k_SKLD[:, :, None, keys])).flatten(1, 2))
        q_SKGQD = _widened(q_SHQD[:, :, rows]).unflatten(1, groups)
        grad_k_SKLD[:, :, keys] += (grad_scores_SKGQL.mT @ q_SKGQD).sum(2)
    return torch.cat(grad_q, dim=2).to(q_SHQD.dtype), grad_k_SKLD.to(k_SKLD.dtype), grad_v_SKLV.to(v_SKLV.dtype)


def _kernel(q_SHQD: torch.Tensor, v_SKLV: torch.Tensor) -> Literal["cpu", "cuda", "plain"]:
    head_dim = q_SHQD.shape[-1]
    if head_dim != v_SKLV.shape[-1]:
        return "plain"
    if q_SHQD.device.type == "cpu":
        return "cpu"
    if (
        q_SHQD.device.type == "cuda"
        and q_SHQD.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _CUDA_MAX_HEAD_DIM
    ):
        return "cuda"
    return "plain"


def _row_blocks(q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, *, is_causal: bool) -> list[tuple[slice, slice]]:
    """Queries to take at a time, and the keys that any of them sees."""
    num_queries = q_SHQD.shape[2]
    num_blocks = math.ceil(num_queries / _NUM_PLAIN_ROWS)
    rows = [slice(i * _NUM_PLAIN_ROWS, min((i + 1) * _NUM_PLAIN_ROWS, num_queries)) for i in range(num_blocks)]
    return [(x, slice(0, x.stop if is_causal else k_SKLD.shape[2])) for x in rows]


def _scores(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, rows: slice, keys: slice, *, scale: float, is_causal: bool
) -> torch.Tensor:
    """[S, K, H / K, rows, keys], -inf where a query does not see a key."""
    q_SKGQD = _widened(q_SHQD[:, :, rows]).unflatten(1, (k_SKLD.shape[1], -1))
    scores_SKGQL = q_SKGQD @ _widened(k_SKLD[:, :, None, keys]).mT * scale
    if is_causal:
        row, column = (torch.arange(x.start, x.stop, device=q_SHQD.device) for x in (rows, keys))
        scores_SKGQL.masked_fill_(column > row[:, None], -torch.inf)
    return scores_SKGQL


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
