"""A row's attention in one call: the keys of each segment, against tiles; the kernel is written out here."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from trainer_oracles import Group, make_samples

from gcore_trainer.packing import whole_row
from gcore_trainer.packing.block_attention import AttentionKind, VarlenLengths
from gcore_trainer.packing.layout import Segment, pack
from gcore_trainer.packing.tiles import RowCalls
from gcore_trainer.packing.whole_row import WholeRow

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def segments_of(
    q: Any, k: Any, v: Any, lengths: VarlenLengths, scale: float
) -> Iterator[tuple[Any, ...]]:
    """Yield the queries' and keys' places of each segment, its keys and values for all heads, and its scores.

    As flash attention on CUDA: causal, and windows, by the distance from the last query and the last key.
    """
    pairs = zip(lengths.query_bounds.tolist(), lengths.key_bounds.tolist(), strict=True)
    for (q_start, k_start), (q_end, k_end) in pairwise(pairs):
        queries, keys = slice(q_start, q_end), slice(k_start, k_end)
        own_keys, own_values = (x[keys].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        num_queries, num_keys = q_end - q_start, k_end - k_start
        scores = torch.einsum("qhd,lhd->hql", q[queries], own_keys) * scale
        place = torch.arange(num_queries)[:, None] + num_keys - num_queries
        hidden = torch.arange(num_keys) > place
        if lengths.window is not None:
            hidden |= torch.arange(num_keys) <= place - lengths.window
        yield queries, keys, own_keys, own_values, scores.masked_fill(hidden, -torch.inf)


def written_out(
    q: Any, k: Any, v: Any, lengths: VarlenLengths, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for queries, _, _, values, scores in segments_of(q, k, v, lengths, scale):
        out[queries] = torch.einsum("hql,lhd->qhd", scores.softmax(-1), values)
        lse[queries] = scores.logsumexp(-1).T
    return out, lse


def written_out_gradients(
    grad: torch.Tensor,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    lengths: VarlenLengths,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Flash attention's backward pass, which has the log-sum-exp over all that a query sees, a sink included."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    delta = (grad * out).sum(-1)
    for queries, keys, own_keys, values, scores in segments_of(q, k, v, lengths, scale):
        probs = (scores - lse[queries].T[..., None]).exp()
        pulls = torch.einsum("qhd,lhd->hql", grad[queries], values) - delta[queries].T[..., None]
        pulls *= probs * scale
        grads[0][queries] = torch.einsum("hql,lhd->qhd", pulls, own_keys)
        for total, part, rows in ((grads[1], pulls, q), (grads[2], probs, grad)):
            of_heads = torch.einsum("hql,qhd->lhd", part, rows[queries])
            total[keys] = of_heads.unflatten(1, (KV_HEADS, -1)).sum(2)
    return tuple(grads)


@settings(max_examples=40)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
        min_size=1,
    ),
    window=st.sampled_from([None, 1, 3, 8, 100]),
    has_sinks=st.booleans(),
    share_prefix=st.booleans(),
    num_forks=st.integers(0, 4),
)
def test_one_call_gives_what_tiles_do(
    groups: list[tuple[int, list[int]]],
    window: int | None,
    has_sinks: bool,
    share_prefix: bool,
    num_forks: int,
) -> None:
    lengths = [Group(prompt, lengths) for prompt, lengths in groups[:4]]
    samples = make_samples(lengths, seed=0, num_forks=num_forks)
    batch = pack(samples, share_prefix=share_prefix)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch.input_ids.size, count, HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    sinks = torch.randn(HEADS, generator=generator).requires_grad_() if has_sinks else None
    leaves = tensors if sinks is None else [*tensors, sinks]
    tiled = RowCalls(batch.segments, device=CPU).attend(
        tensors[0], tensors[1], tensors[2], AttentionKind(sliding_window=window, sinks=sinks)
    )
    grad = torch.randn(tiled.shape, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_row, "attend_varlen", written_out)
        patch.setattr(whole_row, "varlen_gradients", written_out_gradients)
        row = WholeRow(batch.segments, device=CPU, window=window)
        whole = row.attend(tensors[0], tensors[1], tensors[2], sinks, HEAD_DIM**-0.5)
        found = torch.autograd.grad(whole, leaves, grad)
    torch.testing.assert_close(whole, tiled, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, torch.autograd.grad(tiled, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_long_prompt_is_not_copied() -> None:
    prompt = Segment(0, 4096, None, 0)
    branches = [Segment(4096 + 256 * i, 256, prompt, 0) for i in range(16)]
    row = [prompt, *branches]
    assert not WholeRow.is_small(row, num_heads=32, num_kv_heads=32)
    assert not WholeRow.is_small(row, num_heads=32, num_kv_heads=8)
    assert WholeRow.is_small(row, num_heads=32, num_kv_heads=4)
    assert WholeRow.is_small([prompt], num_heads=8, num_kv_heads=8)
