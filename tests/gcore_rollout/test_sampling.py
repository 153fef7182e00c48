"""Uniform numbers that depend on seed and position alone, and tokens drawn with them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from transformers import TopKLogitsWarper, TopPLogitsWarper

from gcore_rollout.engines.hf.decoding import sample_tokens, truncate_logits
from gcore_rollout.engines.hf.static import draw_tokens
from gcore_rollout.engines.queueing import sample_seeds, uniforms

# 0.9999 quantiles of the chi-square distribution: seeds are fixed, so a test passes always or never.
CHI_SQUARE_LIMIT = {9: 33.7, 99: 159.2}

Draw = Callable[[torch.Tensor, np.ndarray, np.ndarray], tuple[torch.Tensor, torch.Tensor]]
seeds_64 = arrays(np.uint64, st.integers(1, 50), elements=st.integers(0, 2**64 - 1))


def _draw_on_device(
    logits_BV: torch.Tensor, temperatures: np.ndarray, u: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as the steps on a GPU do; of probabilities that it does not add up at once."""
    return draw_tokens(logits_BV, torch.from_numpy(temperatures), torch.from_numpy(u))


def _draw_on_host(
    logits_BV: torch.Tensor, temperatures: np.ndarray, u: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    return sample_tokens(logits_BV, temperatures, u)[:2]


draws = pytest.mark.parametrize("draw", [_draw_on_host, _draw_on_device])


def _chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@given(seeds_64, st.integers(0, 2**31))
def test_uniforms_lie_strictly_between_0_and_1(seeds: np.ndarray, position: int) -> None:
    u = uniforms(seeds, np.full(len(seeds), position))
    assert ((u > 0) & (u < 1)).all()


@given(seeds_64, st.integers(0, 10_000))
def test_uniforms_do_not_depend_on_the_batch(seeds: np.ndarray, position: int) -> None:
    together = uniforms(seeds, np.full(len(seeds), position))
    alone = [uniforms(seeds[i : i + 1], np.array([position]))[0] for i in range(len(seeds))]
    assert together.tolist() == alone


@given(st.integers(-(2**63), 2**64), st.integers(1, 64))
def test_seeds_of_samples_differ_and_do_not_depend_on_n(seed: int, n: int) -> None:
    seeds = sample_seeds(seed, np.arange(n))
    assert len(set(seeds.tolist())) == n
    assert sample_seeds(seed, np.array([n - 1])).tolist() == seeds[-1:].tolist()


@pytest.mark.parametrize("axis", ["positions", "seeds", "indices"])
def test_uniforms_are_uniform(axis: str) -> None:
    n = 20_000
    if axis == "positions":
        u = uniforms(np.repeat(sample_seeds(0, np.arange(1)), n), np.arange(n))
    elif axis == "seeds":
        u = uniforms(
            np.concatenate([sample_seeds(s, np.arange(1)) for s in range(n)]), np.zeros(n, np.int64)
        )
    else:
        u = uniforms(sample_seeds(0, np.arange(n)), np.zeros(n, np.int64))
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert _chi_square(counts, np.full(100, n / 100)) < CHI_SQUARE_LIMIT[99]
    pairs = np.histogram2d(u[:-1], u[1:], bins=10, range=((0, 1), (0, 1)))[0].ravel()
    assert _chi_square(pairs, np.full(100, (n - 1) / 100)) < CHI_SQUARE_LIMIT[99]


@draws
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_probabilities(draw: Draw, temperature: float) -> None:
    n = 50_000
    logits_V = torch.randn(10, generator=torch.Generator().manual_seed(1))
    u = uniforms(sample_seeds(7, np.arange(n)), np.zeros(n, np.int64))
    tokens, log_probs = draw(logits_V.expand(n, -1), np.full(n, temperature, np.float32), u)
    expected_V = torch.softmax(logits_V.double() / temperature, dim=-1)
    counts = torch.bincount(tokens, minlength=10).numpy()
    assert _chi_square(counts, n * expected_V.numpy()) < CHI_SQUARE_LIMIT[9]
    torch.testing.assert_close(log_probs.double(), expected_V.log()[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_truncation_is_that_of_transformers(seed: int) -> None:
    """Top-k first, then top-p; rows of a batch may differ."""
    logits_BV = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(seed))
    top_k = torch.tensor([1, 7, 50, 2**31 - 1]).repeat(16)
    top_p = torch.tensor([0.1, 0.5, 0.9, 1.0]).repeat_interleave(16)
    truncated_BV = truncate_logits(logits_BV, top_p, top_k)
    for row, k, p, truncated in zip(
        logits_BV, top_k.clamp(max=50), top_p, truncated_BV, strict=True
    ):
        by_k: Any = TopKLogitsWarper(int(k))
        by_p: Any = TopPLogitsWarper(float(p))
        assert torch.equal(truncated, by_p(None, by_k(None, row[None]))[0])


extreme_u = st.one_of(
    st.sampled_from([2.0**-53, 0.5, 1 - 2.0**-53]), st.floats(2.0**-53, 1 - 2.0**-53)
)


@draws
@given(
    arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.sampled_from([-np.inf, -200, -30, -1, 0, 0.3, 5]),
    ),
    extreme_u,
    st.floats(0.05, 5),
)
def test_impossible_tokens_are_never_drawn(
    draw: Draw, logits_V: np.ndarray, u: float, temperature: float
) -> None:
    logits_V[len(logits_V) // 2] = 0
    (token,), (log_prob,) = draw(
        torch.from_numpy(logits_V)[None], np.array([temperature], np.float32), np.array([u])
    )
    assert logits_V[int(token)] > -np.inf
    assert log_prob > -np.inf


@draws
@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32)), extreme_u)
def test_temperature_0_takes_the_most_probable(draw: Draw, logits_V: np.ndarray, u: float) -> None:
    """Beside rows that sample; its log-prob is the one at temperature 1."""
    logits_2V = torch.from_numpy(np.stack([logits_V, logits_V]))
    tokens, log_probs = draw(logits_2V, np.array([0, 0.5], np.float32), np.array([u, u]))
    assert int(tokens[0]) == int(logits_2V[0].argmax())
    assert float(log_probs[0]) == pytest.approx(
        float(torch.log_softmax(logits_2V[0], dim=-1).max()), abs=1e-5
    )
