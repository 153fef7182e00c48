"""Attention over a packed row against one with a dense mask, written out in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_cases import SAMPLES, WINDOW

from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.layout import PackedBatch, pack
from gcore_trainer.packing.row import PackedPlan

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
KINDS = ("causal", "window", "sinks", "window and sinks", "soft cap")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LONGEST = max(SAMPLES, key=lambda sample: sample.response_ids.size)
SIZE = LONGEST.response_ids.size
TREE = replace(
    LONGEST,
    response_mask=np.arange(SIZE) != SIZE // 2,
    forks=np.array([[SIZE // 4, 2], [SIZE // 3, SIZE // 4 + 1], [SIZE // 2, -2], [SIZE - 3, -1]]),
)
ROWS = {
    "shared": pack(SAMPLES),
    "apart": pack(SAMPLES, share_prefix=False),
    "tree": pack([TREE, *SAMPLES]),
}


def dense_attention(
    batch: PackedBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: AttentionKind,
) -> torch.Tensor:
    """Compute [1, T, H, D]: a token sees those before it on its path, its own included."""
    num_tokens, groups = batch.input_ids.size, HEADS // KV_HEADS
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
    for segment in batch.segments:
        path = segment.sequence
        for i, token in enumerate(path.tolist()):
            first = 0 if kind.sliding_window is None else max(0, i + 1 - kind.sliding_window)
            hidden[token, path[first : i + 1]] = False
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * HEAD_DIM**-0.5
    if kind.softcap is not None:
        scores = (scores / kind.softcap).tanh() * kind.softcap
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = scores.softmax(-1)[..., :num_tokens]
    return (probs @ value.repeat_interleave(groups, 1)).transpose(1, 2)


@pytest.mark.parametrize("packing", ROWS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_packed_attention_is_that_of_a_dense_mask(
    device: str, name: str, dtype: torch.dtype, packing: str
) -> None:
    batch = ROWS[packing]
    torch.manual_seed(0)
    shapes = [(1, heads, batch.input_ids.size, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    rounded = [torch.randn(shape).to(dtype) for shape in shapes]
    sinks = torch.randn(HEADS) if "sinks" in name else None

    def computed(dtype: torch.dtype, device: str, *, is_dense: bool) -> list[torch.Tensor]:
        """Return the output and all gradients, in float64 on the CPU."""
        q, k, v = (x.to(device, dtype).requires_grad_() for x in rounded)
        own_sinks = (
            None
            if sinks is None
            else sinks.to(device, torch.float64 if is_dense else torch.float32)
        )
        leaves = [q, k, v] if own_sinks is None else [q, k, v, own_sinks.requires_grad_()]
        kind = AttentionKind(
            sliding_window=WINDOW if "window" in name else None,
            softcap=20.0 if name == "soft cap" else None,
            sinks=own_sinks,
        )
        plan = PackedPlan(batch, device=torch.device(device))
        out = dense_attention(batch, q, k, v, kind) if is_dense else plan.attend(q, k, v, kind)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        (out * weights.to(out)).sum().backward()
        return [
            x.detach().double().cpu()
            for x in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))
        ]

    expected = computed(torch.float64, "cpu", is_dense=True)
    actual = computed(dtype, device, is_dense=False)
    assert len(actual) == len(expected) == (4 if sinks is None else 5)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= TOLERANCES[dtype] * max(1.0, float(e.abs().max()))
