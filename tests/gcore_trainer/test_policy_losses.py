"""GSPO, CISPO and SAPO against their formulas in float64 numpy, sequence by sequence; PPO's clip is in test_losses."""

import re
from pathlib import Path

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
    PolicyLossConfig,
    PolicyObjective,
    PolicyTokens,
    Sample,
    TokenScores,
    policy_loss,
)
from gcore_trainer.losses.policy.gspo import gspo
from gcore_trainer.objectives.policy import clipped_surrogate

Array = NDArray[np.float64]

log_prob = st.floats(-8.0, 0.0)
advantage = st.integers(-3000, 3000).map(lambda n: n / 1000)
token = st.tuples(log_prob, log_prob, advantage, st.booleans())
sequences = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4)


def columns(
    rows: list[list[tuple[float, float, float, bool]]],
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    table = np.array([token for sequence in rows for token in sequence], np.float64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(bool)


def gradient(loss: torch.Tensor, log_probs: torch.Tensor) -> Array:
    return torch.autograd.grad(loss.sum(), log_probs)[0].numpy()


@given(rows=sequences)
def test_gspo(rows: list[list[tuple[float, float, float, bool]]]) -> None:
    new, old, advantages, mask = columns(rows)
    lengths = [len(sequence) for sequence in rows]
    ratios: list[float] = []
    for sequence in rows:
        counted = [p - q for p, q, _, is_counted in sequence if is_counted]
        ratios += [np.exp(sum(counted) / len(counted)) if counted else 1.0] * len(sequence)
    ratio = np.array(ratios)
    assume((np.abs(ratio[:, None] - [0.7, 1.3]) > 1e-9).all())
    log_probs = torch.from_numpy(new).requires_grad_()
    tokens = PolicyTokens(
        log_probs=log_probs,
        old_log_probs=torch.from_numpy(old),
        advantages=torch.from_numpy(advantages),
        mask=torch.from_numpy(mask),
        lengths=lengths,
    )
    loss, metrics = gspo(tokens, PolicyLossConfig(clip_ratio_low=0.3, clip_ratio_high=0.3))
    clipped = ratio.clip(0.7, 1.3)
    assert_allclose(
        loss.detach().numpy(), np.maximum(-advantages * ratio, -advantages * clipped), atol=1e-9
    )
    cut = np.where(advantages > 0, ratio > 1.3, (ratio < 0.7) & (advantages < 0))
    assert_allclose(metrics["actor/pg_clipfrac"].numpy(), cut)
    assert_allclose(
        gradient(loss, log_probs),
        np.where(cut, 0.0, -advantages * ratio),
        rtol=1e-9,
        atol=1e-12,
    )


@given(rows=sequences, low=st.floats(0.0, 1.0), high=st.floats(0.0, 5.0))
def test_cispo(rows: list[list[tuple[float, float, float, bool]]], low: float, high: float) -> None:
    new, old, advantages, _ = columns(rows)
    weight = np.exp(new - old).clip(1 - low, 1 + high)
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, _ = flat_loss(
        "cispo", log_probs, old, advantages, clip_ratio_low=low, clip_ratio_high=high
    )
    assert_allclose(loss.detach().numpy(), -weight * advantages * new, rtol=1e-9, atol=1e-12)
    assert_allclose(gradient(loss, log_probs), -weight * advantages, rtol=1e-9, atol=1e-12)


@given(rows=sequences, tau_pos=st.floats(0.1, 5.0), tau_neg=st.floats(0.1, 5.0))
def test_sapo(
    rows: list[list[tuple[float, float, float, bool]]], tau_pos: float, tau_neg: float
) -> None:
    new, old, advantages, _ = columns(rows)
    ratio = np.exp(new - old)
    tau = np.where(advantages > 0, tau_pos, tau_neg)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, _ = flat_loss("sapo", log_probs, old, advantages, tau_pos=tau_pos, tau_neg=tau_neg)
    # float32 in where()'s scalars would show here
    assert_allclose(loss.detach().numpy(), -advantages * gate * 4 / tau, rtol=1e-9, atol=1e-9)
    expected = -advantages * 4 * gate * (1 - gate) * ratio
    assert_allclose(gradient(loss, log_probs), expected, rtol=1e-9, atol=1e-9)


@given(rows=sequences, beta=st.floats(0.01, 5.0))
def test_dro(rows: list[list[tuple[float, float, float, bool]]], beta: float) -> None:
    new, old, advantages, _ = columns(rows)
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, _ = flat_loss("dro", log_probs, old, advantages, dro_beta=beta)
    assert_allclose(
        loss.detach().numpy(), beta / 2 * (new - old) ** 2 - advantages * new, atol=1e-9
    )
    assert_allclose(gradient(loss, log_probs), beta * (new - old) - advantages, atol=1e-9)


@given(rows=sequences, threshold=st.floats(0.01, 20.0))
def test_m2po(rows: list[list[tuple[float, float, float, bool]]], threshold: float) -> None:
    """Tokens are left out one after the other, from the furthest on, until the mean is below the threshold."""
    new, old, advantages, mask = columns(rows)
    distances = (new - old) ** 2
    kept = list(np.flatnonzero(mask))
    kept.sort(key=lambda i: distances[i])
    assume(len(set(distances[kept])) == len(kept))
    while len(kept) > 1 and distances[kept].mean() >= threshold:
        kept.pop()
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, metrics = policy_loss(
        PolicyLossConfig(loss_mode="m2po"),
        log_probs,
        torch.from_numpy(old),
        torch.from_numpy(advantages),
        mask=torch.from_numpy(mask),
        lengths=[len(new)],
        m2_threshold=threshold,
    )
    is_kept = np.zeros(len(new), bool)
    is_kept[kept] = True
    expected = np.where(is_kept, -advantages * np.exp(new - old), 0.0)
    assert_allclose(loss.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    assert_allclose(gradient(loss, log_probs), expected, rtol=1e-9, atol=1e-12)
    assert (metrics["actor/pg_clipfrac"].numpy() == ~is_kept)[mask].all()


@given(rows=sequences, ratio=st.floats(0.01, 1.0), low=st.floats(-2.0, 2.0))
def test_clip_cov_cuts_a_share_of_the_tokens_in_the_range(
    rows: list[list[tuple[float, float, float, bool]]], ratio: float, low: float
) -> None:
    new, old, advantages, _ = columns(rows)
    covariances = (advantages - advantages.mean()) * (new - new.mean())
    assume((np.abs(covariances - low) > 1e-9).all())
    assume((np.abs(covariances - low - 1.0) > 1e-9).all())
    arrays = (torch.from_numpy(new), old, advantages)
    whole, is_clipped = clipped_surrogate(
        torch.from_numpy(np.exp(new - old)), torch.from_numpy(advantages), low=0.2, high=0.28
    )
    options = {"clip_cov_ratio": ratio, "clip_cov_lb": low, "clip_cov_ub": low + 1.0}
    loss, metrics = flat_loss("clip_cov", *arrays, **options)
    is_cut = metrics["actor/pg_clipfrac"].numpy()
    can_be_cut = (covariances > low) & (covariances < low + 1.0) & ~is_clipped.numpy()
    assert not is_cut[~can_be_cut].any()
    assert is_cut.sum() == min(can_be_cut.sum(), max(1, int(ratio * len(new))))
    assert_allclose(loss.numpy(), np.where(is_cut, 0.0, whole.numpy()), rtol=1e-12)
    assert torch.equal(flat_loss("clip_cov", *arrays, **options)[0], loss)


@pytest.mark.parametrize(
    "mode", ["vanilla", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg", "m2po"]
)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(mode: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    loss, _ = policy_loss(
        PolicyLossConfig(loss_mode=mode),
        log_probs,
        log_probs.detach(),
        advantages,
        mask=torch.ones(3, dtype=torch.bool),
        lengths=[2, 1],
    )
    assert_allclose(gradient(loss, log_probs), -advantages.numpy(), rtol=1e-12)


def test_a_loss_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"loss_mode is 'ppo'; expected one of cispo, clip_cov, .*, vanilla, or PATH\.py:function",
    ):
        PolicyLossConfig(loss_mode="ppo")


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("sapo", {"tau_neg": 0.0}, "tau_neg is 0.0; expected a finite number above 0"),
        ("sapo", {"tau": 1.0}, "an option is 'tau'; expected tau_pos, tau_neg, echo_coef"),
        ("gpg", {"tau_neg": 1.0}, "an option is 'tau_neg'; expected echo_coef"),
        ("dro", {}, "dro_beta is 0.0; expected a finite number above 0"),
        ("kl_cov", {"kl_cov_ratio": 0.0}, "kl_cov_ratio is 0.0; expected a number in (0, 1]"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(
    mode: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        PolicyObjective(PolicyLossConfig(loss_mode=mode), options)


def test_metrics_of_a_loss_are_means_over_the_tokens_that_count(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(
        "def reinforce(tokens, config):\n"
        "    return -tokens.advantages * tokens.log_probs, {'own/log_prob': tokens.log_probs}\n"
    )
    objective = PolicyObjective(PolicyLossConfig(loss_mode=f"{file}:reinforce"))
    sample = Sample(
        prompt_ids=np.array([1]),
        response_ids=np.array([2, 3, 4]),
        response_mask=np.array([True, False, True]),
        advantages=np.ones(3, np.float32),
    )
    log_probs = torch.tensor([-1.0, -5.0, -3.0], requires_grad=True)
    scores = TokenScores(log_probs=log_probs, entropies=torch.zeros(3))
    totals = BatchTotals(num_sequences=1, num_tokens=2)
    _, sums = objective.partial_loss(scores, [sample], totals)
    metrics = objective.metrics({name: total.item() for name, total in sums.items()})
    assert metrics["own/log_prob"] == -2.0
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0
