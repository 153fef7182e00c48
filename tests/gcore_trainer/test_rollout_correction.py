"""Rollout correction: small cases by hand, parts of a batch against the whole, and what is refused."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from torch.distributions import Bernoulli, Categorical, kl_divergence

from gcore_trainer import (
    BatchError,
    ConfigError,
    RolloutCorrectionConfig,
    rollout_correction,
    rollout_mismatch,
)
from gcore_trainer.advantages.rollout_correction import weight_moments
from gcore_trainer.config import RolloutIS, RolloutRS

Array = NDArray[np.float64]

RATIOS = [np.array([1.5, 4.0, 0.5]), np.array([0.1, 1.0])]
MASKS = [np.array([True, True, True]), np.array([True, True])]


def correct(
    ratios: list[Array], masks: list[NDArray[np.bool_]], **settings: Any
) -> tuple[list[NDArray[np.float32]] | None, list[NDArray[np.bool_]], dict[str, float]]:
    """With log-probabilities of these ratios."""
    rollout = [np.linspace(-3.0, -1.0, r.size) for r in ratios]
    old = [np.log(r) + q for r, q in zip(ratios, rollout, strict=True)]
    return rollout_correction(old, rollout, masks, RolloutCorrectionConfig(**settings))


def assert_rows(actual: list[NDArray[Any]] | None, expected: list[list[float]]) -> None:
    assert actual is not None
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert_allclose(a, e, rtol=1e-6)


def test_token_weights_are_truncated() -> None:
    weights, masks, metrics = correct(RATIOS, MASKS, rollout_is="token", rollout_is_threshold=2.5)
    assert_rows(weights, [[1.5, 2.5, 0.5], [0.1, 1.0]])
    assert weights is not None
    assert weights[0].dtype == np.float32
    assert_array_equal(np.concatenate(masks), True)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(5.6 / 5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        (5.6 / 5) ** 2 / (9.76 / 5)
    )
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)


def test_a_sequence_has_the_product_of_its_ratios() -> None:
    weights, _, _ = correct(RATIOS, MASKS, rollout_is="sequence", rollout_is_threshold=5.0)
    assert_rows(weights, [[3.0] * 3, [0.1] * 2])
    weights, _, metrics = correct(RATIOS, MASKS, rollout_is="sequence", rollout_is_threshold=2.0)
    assert_rows(weights, [[2.0] * 3, [0.1] * 2])
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(3.0)


def test_icepop_makes_weights_outside_zero() -> None:
    weights, _, metrics = correct(
        RATIOS, MASKS, rollout_is="token", rollout_is_threshold=2.0, rollout_is_threshold_lower=0.4
    )
    assert_rows(weights, [[1.5, 0.0, 0.5], [0.0, 1.0]])
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def test_tokens_outside_the_mask_have_no_part() -> None:
    masks = [np.array([True, False, True]), np.array([False, False]), np.array([True])]
    ratios = [*RATIOS, np.array([3.0])]
    weights, kept, metrics = correct(
        ratios, masks, rollout_is="sequence", rollout_rs="seq_sum_k2", rollout_rs_threshold=0.5
    )
    assert_rows(weights, [[0.75, 0.0, 0.75], [0.0, 0.0], [2.0]])
    assert_rows(kept, [[1, 0, 1], [0, 0], [0]])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


def test_without_rules_a_batch_is_only_measured() -> None:
    weights, masks, metrics = correct(RATIOS, MASKS)
    assert weights is None
    assert_array_equal(np.concatenate(masks), True)
    log_ratio = np.log(np.concatenate(RATIOS))
    assert metrics["rollout_corr/kl"] == pytest.approx(-log_ratio.mean())
    assert metrics["rollout_corr/log_ppl_diff"] == pytest.approx(
        -(np.log(3.0) / 3 + np.log(0.1) / 2) / 2
    )
    assert not [name for name in metrics if "rollout_is" in name or "rollout_rs" in name]


@pytest.mark.parametrize(
    ("rule", "upper", "kept"),
    [
        ("token_k1", 2.5, [[1, 0, 1], [0, 1]]),
        ("token_k2", 0.3, [[1, 0, 1], [0, 1]]),
        ("token_k3", 0.5, [[1, 0, 1], [0, 1]]),
        ("seq_sum_k1", 4.0, [[1, 1, 1], [0, 0]]),
        ("seq_mean_k1", 2.0, [[1, 1, 1], [0, 0]]),
        ("seq_mean_k1", 1.4, [[0, 0, 0], [0, 0]]),
        ("seq_max_k2", 1.0, [[1, 1, 1], [0, 0]]),
        ("seq_max_k3", 1.5, [[0, 0, 0], [1, 1]]),
    ],
)
def test_rejection(rule: RolloutRS, upper: float, kept: list[list[float]]) -> None:
    _, masks, _ = correct(RATIOS, MASKS, rollout_rs=rule, rollout_rs_threshold=upper)
    assert_rows(masks, kept)


@pytest.mark.parametrize("rule", ["token_kl", "token_tv", "seq_mean_kl", "seq_mean_tv"])
def test_rejection_by_the_divergence_between_a_token_and_all_others(rule: RolloutRS) -> None:
    """Those of the distributions of torch: sum of p |log p / q| and half the sum of |p - q| over the two outcomes."""
    rollout = [np.linspace(-3.0, -1.0, ratio.size) for ratio in RATIOS]
    expected: list[Array] = []
    for ratio, log_q in zip(RATIOS, rollout, strict=True):
        q = Bernoulli(probs=torch.from_numpy(np.exp(log_q)))
        p = Bernoulli(probs=torch.from_numpy(np.exp(log_q) * ratio).clamp(max=1 - 1e-12))
        divergence = kl_divergence(q, p) if rule.endswith("kl") else (q.probs - p.probs).abs()
        if rule.startswith("seq"):
            divergence = divergence.mean().expand_as(divergence)
        expected.append(divergence.numpy())
    values = np.concatenate(expected)
    # Between the two largest ones.
    upper = float(np.unique(values)[-2:].mean())
    _, masks, metrics = correct(RATIOS, MASKS, rollout_rs=rule, rollout_rs_threshold=upper)
    assert_rows(masks, [(divergence <= upper).astype(float).tolist() for divergence in expected])
    assert metrics[f"rollout_corr/rollout_rs_{rule}_max"] == pytest.approx(values.max(), rel=1e-6)
    assert metrics[f"rollout_corr/rollout_rs_{rule}_mean"] == pytest.approx(values.mean(), rel=1e-6)


def test_a_bound_of_k1_is_one_of_the_inverse_ratio() -> None:
    _, masks, _ = correct(
        RATIOS,
        MASKS,
        rollout_rs="token_k1",
        rollout_rs_threshold=12.0,
        rollout_rs_threshold_lower=0.9,
    )
    assert_rows(masks, [[0, 0, 1], [1, 1]])


def test_one_vetoed_token_rejects_its_sequence() -> None:
    _, masks, metrics = correct(RATIOS, MASKS, rollout_token_veto_threshold=0.2)
    assert_rows(masks, [[1, 1, 1], [0, 0]])
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 2)
    _, masks, _ = correct(
        RATIOS,
        MASKS,
        rollout_token_veto_threshold=0.2,
        rollout_rs="token_k1",
        rollout_rs_threshold=2.5,
    )
    assert_rows(masks, [[1, 0, 1], [0, 0]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 4))
def test_parts_of_a_batch_are_normalised_like_the_whole(
    level: RolloutIS, seed: int, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 5)
    masks = [np.append(rng.random(n - 1) < 0.6, True) for n in lengths]
    old, rollout = ([-rng.random(n) * 2 for n in lengths] for _ in range(2))
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    whole, _, _ = rollout_correction(old, rollout, masks, config)
    assert whole is not None
    parts = [(old[part], rollout[part], masks[part]) for part in (slice(0, cut), slice(cut, 5))]
    batch = np.sum([weight_moments(*part, config) for part in parts], axis=0)
    together: list[NDArray[np.float32]] = []
    for part in parts:
        weights, _, _ = rollout_correction(*part, config, batch=batch)
        assert weights is not None
        together += weights
    for a, b in zip(together, whole, strict=True):
        assert_allclose(a, b, rtol=1e-6)
    per_sequence = [w[m].mean() for w, m in zip(whole, masks, strict=True)]
    tokens = np.concatenate([w[m] for w, m in zip(whole, masks, strict=True)])
    assert np.mean(per_sequence if level == "sequence" else tokens) == pytest.approx(1.0, rel=1e-5)


def test_ratios_too_large_for_a_float_are_bounded() -> None:
    old, rollout, masks = (
        [np.array([0.0, -900.0])],
        [np.array([-900.0, 0.0])],
        [np.array([True, True])],
    )
    for level in ("token", "sequence"):
        config = RolloutCorrectionConfig(
            rollout_is=level, rollout_rs="seq_mean_k3", rollout_rs_threshold=1.0
        )
        weights, kept, metrics = rollout_correction(old, rollout, masks, config)
        assert weights is not None
        assert np.isfinite(weights[0]).all()
        assert not kept[0].any()
        assert all(math.isfinite(value) for value in metrics.values())


def test_all_weights_zero_is_no_division_by_zero() -> None:
    settings: dict[str, Any] = {
        "rollout_is_threshold_lower": 1.9,
        "rollout_is_batch_normalize": True,
    }
    weights, _, metrics = correct([np.array([1.0, 1.0])], MASKS[1:], rollout_is="token", **settings)
    assert_rows(weights, [[0.0, 0.0]])
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollout_is": "group"},
            "rollout_is is 'group'; expected one of token, sequence, or none",
        ),
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold is 0.0"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold is nan"),
        (
            {"rollout_is": "token", "rollout_is_threshold_lower": 3.0},
            "rollout_is_threshold_lower is 3.0",
        ),
        (
            {"rollout_is_threshold_lower": 0.5},
            "rollout_is_threshold_lower is 0.5.* and a rollout_is",
        ),
        (
            {"rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize is True; expected a rollout_is",
        ),
        ({"rollout_rs": "seq_max_k1"}, "rollout_rs is 'seq_max_k1'; expected one of token_k1"),
        (
            {"rollout_rs": "token_k2"},
            "rollout_rs_threshold is None; expected a finite number above 0",
        ),
        (
            {"rollout_rs_threshold": 1.0},
            "rollout_rs_threshold is 1.0; expected none without a rollout_rs",
        ),
        (
            {"rollout_rs_threshold_lower": 1.0},
            "rollout_rs_threshold_lower is 1.0; expected none without a rollout_rs",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
            "rollout_rs_threshold is 0.5; expected 1 or more",
        ),
        (
            {
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 0.5,
                "rollout_rs_threshold_lower": 0.6,
            },
            "rollout_rs_threshold_lower is 0.6; expected a number above 0 and up to rollout_rs_threshold=0.5",
        ),
        (
            {
                "rollout_rs": "token_k3",
                "rollout_rs_threshold": 0.5,
                "rollout_rs_threshold_lower": 0.1,
            },
            r"rollout_rs_threshold_lower is 0.1; expected none \(rollout_rs is 'token_k3', which has no lower bound\)",
        ),
        ({"rollout_token_veto_threshold": 1.0}, "rollout_token_veto_threshold is 1.0"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutCorrectionConfig(**settings)


def test_batches_that_cannot_be_corrected_are_refused() -> None:
    config = RolloutCorrectionConfig(rollout_is="token")
    two, mask = np.zeros(2), np.ones(2, np.bool_)
    with pytest.raises(
        BatchError,
        match=r"have shapes \[\[\(2,\)\], \[\(3,\)\], \[\(2,\)\]\]; expected equal shapes",
    ):
        rollout_correction([two], [np.zeros(3)], [mask], config)
    with pytest.raises(BatchError, match="have shapes"):
        rollout_correction([two, two], [two], [mask], config)
    with pytest.raises(BatchError, match="masks of 1 samples have no token that counts"):
        rollout_correction([two], [two], [~mask], config)
    with pytest.raises(
        BatchError, match=r"^rollout_log_probs\[0\]\[1\] is -inf; expected a finite float32"
    ):
        rollout_correction([two], [np.array([0.0, -np.inf])], [mask], config)
    with pytest.raises(ConfigError, match="rollout_is is None; expected token or sequence"):
        weight_moments([two], [two], [mask], RolloutCorrectionConfig())


def mismatch_of_two(differences: list[Array], distributions: list[list[Array]]) -> dict[str, float]:
    """Of two processes, of which the first has the differences, and each a list of distributions."""

    async def main() -> list[dict[str, float]]:
        gathered: list[Any] = []
        both = asyncio.Event()

        async def all_gather(part: Any) -> list[Any]:
            gathered.append(part)
            if len(gathered) == 2:
                both.set()
            await both.wait()
            return gathered

        calls = [
            rollout_mismatch(own, all_gather, distributions=kept)
            for own, kept in zip([differences, []], distributions, strict=True)
        ]
        return await asyncio.gather(*calls)

    first, second = asyncio.run(main())
    assert first == second
    return first


def test_distributions_are_compared_over_the_given_tokens_and_the_rest() -> None:
    """Against torch's divergence of the same distributions, in which the other tokens are one."""
    logits = torch.randn(3, 2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_probs = (3 * logits).log_softmax(-1)
    parts = [pair[:, : 4 + 20 * i].numpy() for i, pair in enumerate(log_probs)]
    expected: list[float] = []
    for part in parts:
        probs = torch.from_numpy(np.exp(part))
        p, q = torch.cat([probs, 1 - probs.sum(1, keepdim=True)], 1)
        expected.append(kl_divergence(Categorical(p), Categorical(q)).item())
    metrics = mismatch_of_two([], [[parts[0]], parts[1:]])
    assert metrics == {
        "training/rollout_probs_diff_valid": 0.0,
        "training/rollout_distribution_kl": pytest.approx(np.mean(expected), rel=1e-9),
    }


def test_a_tail_that_is_never_drawn() -> None:
    """The engine draws from 99 % of the distribution: the divergence is 0.01 nats, and the estimate next to 0."""
    trainer = np.log(np.array([0.6, 0.3, 0.09]))
    engine = trainer - math.log(0.99)
    metrics = mismatch_of_two([trainer - engine], [[np.stack([engine, trainer])], []])
    assert metrics["training/rollout_k3_kl"] < 1e-4
    assert metrics["training/rollout_distribution_kl"] == pytest.approx(-math.log(0.99), rel=1e-2)
    same = mismatch_of_two([np.zeros(3)], [[np.stack([trainer, trainer])], []])
    assert same["training/rollout_k3_kl"] == same["training/rollout_distribution_kl"] == 0.0
