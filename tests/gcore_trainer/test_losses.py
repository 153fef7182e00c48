"""Token losses against the same formulas in float64 numpy, written case by case."""

from typing import Any

import numpy as np
import pytest
import torch
from by_name import flat_loss
from hypothesis import assume, given, strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from gcore_trainer import (
    BatchTotals,
    ConfigError,
    LossAggMode,
    PolicyLossConfig,
    PolicyObjective,
    aggregation_weights,
    kl_penalty,
)
from gcore_trainer.config import KLPenalty

Array = NDArray[np.float64]

log_probs = st.floats(-8.0, 0.0)
advantages = st.integers(-3000, 3000).map(
    lambda n: n / 1000
)  # no subnormals: which clip they hit is rounding's choice
tokens = st.lists(st.tuples(log_probs, log_probs, advantages), min_size=1, max_size=20)


def columns(rows: list[tuple[float, float, float]]) -> tuple[Array, Array, Array]:
    table = np.array(rows, np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def one_token_loss(
    ratio: float, advantage: float, low: float, high: float, c: float | None
) -> float:
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    weight = max(ratio, 1 - low)
    return -advantage * (weight if c is None else min(weight, c))


@given(
    rows=tokens,
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 2.0),
    c=st.none() | st.floats(1.01, 5.0),
)
def test_ppo_clip(
    rows: list[tuple[float, float, float]], low: float, high: float, c: float | None
) -> None:
    new, old, advantages = columns(rows)
    ratio = np.exp(new - old)
    assume(c is None or (np.abs(ratio - c) > 1e-9).all())  # which side rounding takes is arbitrary
    settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    loss, metrics = flat_loss("vanilla", torch.from_numpy(new), old, advantages, **settings)
    expected = [one_token_loss(r, a, low, high, c) for r, a in zip(ratio, advantages, strict=True)]
    assert_allclose(loss.numpy(), expected, rtol=1e-10, atol=1e-12)
    if c is not None:
        clipped_lower = metrics["actor/pg_clipfrac_lower"]
        assert_allclose(clipped_lower.numpy(), (advantages < 0) & (ratio > c))


@given(rows=tokens)
def test_the_gradient_is_cut_exactly_where_the_clip_is_reported(
    rows: list[tuple[float, float, float]],
) -> None:
    new, old, advantages = columns(rows)
    ratio = np.exp(new - old)
    assume((np.abs(ratio[:, None] - [0.8, 1.28, 3.0]) > 1e-9).all())
    assume(advantages.all())
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, metrics = flat_loss("vanilla", log_probs, old, advantages, clip_ratio_c=3.0)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    cut = (metrics["actor/pg_clipfrac"] | metrics["actor/pg_clipfrac_lower"]).numpy()
    assert_allclose(cut, np.where(advantages > 0, ratio > 1.28, (ratio < 0.8) | (ratio > 3.0)))
    assert_allclose(gradient.numpy(), np.where(cut, 0.0, -advantages * ratio), rtol=1e-10)


@given(rows=tokens)
def test_kl_penalties(rows: list[tuple[float, float, float]]) -> None:
    p, q, _ = columns(rows)
    expected: dict[KLPenalty, Array] = {
        "k1": p - q,
        "k2": 0.5 * (p - q) ** 2,
        "k3": np.minimum(np.exp(q) / np.exp(p) - 1 - np.log(np.exp(q) / np.exp(p)), 10.0),
    }
    for kind, values in expected.items():
        result = kl_penalty(torch.from_numpy(p), torch.from_numpy(q), kind)
        assert_allclose(result.numpy(), values, rtol=1e-9, atol=1e-12)


@given(rows=tokens)
def test_the_gradient_of_k3(rows: list[tuple[float, float, float]]) -> None:
    """d/d log p of q/p - 1 - log(q/p) is 1 - q/p, and 0 where the bound holds."""
    p, q, _ = columns(rows)
    k3 = np.exp(q - p) - 1 - (q - p)
    assume((np.abs(k3 - 10.0) > 1e-9).all())
    log_probs = torch.from_numpy(p).requires_grad_()
    (gradient,) = torch.autograd.grad(
        kl_penalty(log_probs, torch.from_numpy(q), "k3").sum(), log_probs
    )
    assert_allclose(
        gradient.numpy(), np.where(k3 > 10.0, 0.0, 1 - np.exp(q - p)), rtol=1e-10, atol=1e-12
    )


@given(rows=tokens)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(
    rows: list[tuple[float, float, float]],
) -> None:
    p, q, _ = columns(rows)
    kinds: dict[KLPenalty, KLPenalty] = {"k1+": "k1", "k3+": "k3"}
    for kind, plain in kinds.items():
        log_probs = torch.from_numpy(p).requires_grad_()
        result = kl_penalty(log_probs, torch.from_numpy(q), kind)
        expected = kl_penalty(torch.from_numpy(p), torch.from_numpy(q), plain)
        assert_allclose(result.detach().numpy(), expected.numpy(), rtol=1e-9, atol=1e-9)
        (gradient,) = torch.autograd.grad(result.sum(), log_probs)
        assert_allclose(gradient.numpy(), p - q, rtol=1e-9, atol=1e-9)


def test_k1_and_k3_are_unbiased() -> None:
    """Their mean over p is KL(p || q), where no token reaches the bound of k3."""
    logits = 0.5 * torch.randn(
        2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    p, q = logits.log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close(
            (p.exp() * kl_penalty(p, q, kind)).sum(), exact, rtol=1e-12, atol=0.0
        )


def test_extreme_ratios_stay_finite() -> None:
    far, near = torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0])
    loss, _ = flat_loss("vanilla", far, near.numpy(), np.ones(2, np.float32))
    assert loss.isfinite().all()
    assert kl_penalty(far, near, "k3").isfinite().all()


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6)


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@given(masks=masks, seed=st.integers(0, 1000))
def test_aggregation(mode: LossAggMode, masks: list[list[bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses: list[Any] = [rng.normal(size=len(m)) for m in masks]
    kept = [loss[np.array(m)] for loss, m in zip(losses, masks, strict=True)]
    match mode:
        case "token-mean":
            joined = np.concatenate(kept)
            expected = joined.mean() if joined.size else 0.0
        case "seq-mean-token-sum":
            expected = np.mean([x.sum() for x in kept])
        case "seq-mean-token-mean":
            expected = np.mean([x.mean() if x.size else 0.0 for x in kept])
        case "seq-mean-token-sum-norm":
            expected = np.mean([x.sum() / 13 for x in kept])
    arrays = [np.array(m) for m in masks]
    weights = aggregation_weights(
        arrays, mode, totals=BatchTotals.of(arrays), max_response_length=13
    )
    assert all(w.dtype == np.float32 for w in weights)
    total = sum((w * loss).sum() for w, loss in zip(weights, losses, strict=True))
    assert_allclose(total, expected, rtol=1e-6, atol=1e-6)


def test_the_norm_needs_its_divisor() -> None:
    masks = [np.ones(3, np.bool_)]
    with pytest.raises(
        ConfigError, match="max_response_length is None; expected 1 or more for loss_agg_mode"
    ):
        aggregation_weights(masks, "seq-mean-token-sum-norm", totals=BatchTotals.of(masks))


def test_a_dual_clip_that_the_loss_does_not_read_is_refused() -> None:
    PolicyObjective(PolicyLossConfig(clip_ratio_c=3.0))
    with pytest.raises(
        ConfigError, match=r"^clip_ratio_c is 3.0; expected None with loss_mode 'gspo'$"
    ):
        PolicyObjective(PolicyLossConfig(loss_mode="gspo", clip_ratio_c=3.0))
