"""Attention in the `hf` engine that torch's own does not compute: caps, sinks, and windows over whole prompts.

Shapes as in `decoding`; Q: queries.
"""

from dataclasses import dataclass

import torch

_NUM_PLAIN_SCORES = 1 << 26
"""Most scores in memory at a time where torch's own attention does not compute them: 256 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The scoring of keys by a layer."""

    scale: float | None
    """Factor of the scores; None: 1 / sqrt(D)."""
    sliding_window: int | None
    """Number of latest tokens that a query sees, its own included; None: all."""
    softcap: float | None
    """Replaces scores x by softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118); None: no softcap."""
    sinks: torch.Tensor | None
    """[H] a further score of each head's softmax, without a value (gpt-oss); None: no sinks."""


def attend_causally(
    q_PHLD: torch.Tensor, k_PKLD: torch.Tensor, v_PKLD: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Return the output [P, H, L, D] of queries that see themselves and keys before them, some queries at a time."""
    num_prompts, num_heads, length, _ = q_PHLD.shape
    num_rows = max(1, _NUM_PLAIN_SCORES // (num_prompts * num_heads * length))
    window = rule.sliding_window or length
    place_L = torch.arange(length, device=q_PHLD.device)
    outputs: list[torch.Tensor] = []
    for first in range(0, length, num_rows):
        end = min(first + num_rows, length)
        rows = slice(first, end)
        keys = slice(max(0, first - window + 1), end)
        distance_QL = place_L[rows, None] - place_L[keys]
        is_hidden_QL = (distance_QL < 0) | (distance_QL >= window)
        mask_QL = torch.zeros_like(is_hidden_QL, dtype=torch.float32).masked_fill_(
            is_hidden_QL, -torch.inf
        )
        q_PKGQD = q_PHLD[:, :, rows].unflatten(1, (k_PKLD.shape[1], -1))
        out_PKGQD = attend(q_PKGQD, k_PKLD[:, :, keys], v_PKLD[:, :, keys], mask_QL, rule)
        outputs.append(out_PKGQD.flatten(1, 2))
    return torch.cat(outputs, dim=2)


def attend_block(
    q_HLD: torch.Tensor, k_KCD: torch.Tensor, v_KCD: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Return the output [H, L, D] of the last L of C tokens, which see each other besides what precedes them."""
    key_C = torch.arange(k_KCD.shape[1], device=q_HLD.device)
    query_L1 = key_C[-q_HLD.shape[1] :, None]
    is_far_LC = query_L1 - key_C >= (rule.sliding_window or len(key_C))
    mask_LC = torch.zeros_like(is_far_LC, dtype=torch.float32)
    mask_LC.masked_fill_(is_far_LC & (key_C < query_L1[0]), -torch.inf)
    q_1KGLD = q_HLD.unflatten(0, (k_KCD.shape[0], -1))[None]
    return attend(q_1KGLD, k_KCD[None], v_KCD[None], mask_LC, rule)[0].flatten(0, 1)


def attend(
    q_BKGQD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    mask: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Return softmax attention [B, K, H / K, Q, D] under a mask that is added to the scores, in float32 at least."""
    q_BKGQD, k_BKLD, v_wide_BKLD = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BKGQD, k_BKLD, v_BKLD)
    )
    scale = q_BKGQD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores_BKGQL = q_BKGQD @ k_BKLD[:, :, None].mT * scale
    if rule.softcap is not None:
        scores_BKGQL = (scores_BKGQL / rule.softcap).tanh() * rule.softcap
    scores_BKGQL += mask
    lse_BKGQ = scores_BKGQL.logsumexp(-1)
    if rule.sinks is not None:
        sinks_KG1 = rule.sinks.view(*q_BKGQD.shape[1:3], 1)
        lse_BKGQ = torch.logaddexp(lse_BKGQ, sinks_KG1.to(lse_BKGQ.dtype))
    probs_BKGQL = (scores_BKGQL - lse_BKGQ[..., None]).exp()
    return (probs_BKGQL @ v_wide_BKLD[:, :, None]).to(v_BKLD.dtype)
