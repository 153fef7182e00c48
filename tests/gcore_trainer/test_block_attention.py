"""Attention block by block: each block's output, log-sum-exp and gradients, by the kernels and written out."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gcore_trainer.packing.block_attention import Scoring, attend_block, block_gradients

SCALE = 0.4
NUM_QUERIES = 1100
"""More than are taken at a time where no kernel does it."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [8, 4], ids=["kernel", "plain"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_keys_add_up(is_causal: bool, value_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_keys = NUM_QUERIES if is_causal else 300
    shapes = [
        (2, 4, NUM_QUERIES, 8),
        (2, 2, num_keys, 8),
        (2, 2, num_keys, value_dim),
        (2, 4, NUM_QUERIES, value_dim),
    ]
    q, k, v, grad = (torch.randn(shape).to(dtype) for shape in shapes)
    exact_q, exact_k, exact_v = exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(
        exact_q, exact_k, exact_v, is_causal=is_causal, scale=SCALE, enable_gqa=True
    )
    gradients = torch.autograd.grad(out, exact, grad.double())
    scores = (exact_q @ exact_k.repeat_interleave(2, dim=1).mT * SCALE).detach()
    if is_causal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    lse = scores.logsumexp(-1)

    scoring = Scoring(scale=SCALE, is_causal=is_causal)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    block_out, block_lse = attend_block(q, k, v, scoring)
    assert block_out.dtype == dtype
    assert block_lse.dtype == torch.promote_types(dtype, torch.float32)
    assert (block_out - out).abs().max() < tolerance
    assert (block_lse - lse).abs().max() < tolerance

    # Half of the keys, with the output and log-sum-exp over all of them.
    halves = [slice(0, num_keys)] if is_causal else [slice(0, 128), slice(128, num_keys)]
    parts = [
        block_gradients(
            grad,
            q,
            k[:, :, keys],
            v[:, :, keys],
            block_out,
            block_lse,
            Scoring(scale=SCALE, is_causal=is_causal),
        )
        for keys in halves
    ]
    actual = [
        sum(part[0] for part in parts),
        *(torch.cat([part[i] for part in parts], dim=2) for i in (1, 2)),
    ]
    for gradient, expected in zip(actual, gradients, strict=True):
        assert (gradient - expected).abs().max() < tolerance * expected.abs().max()
