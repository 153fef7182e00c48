"""Advantages, losses and rollout correction against verl's own functions, on random batches in float64.

Shapes: B sequences, R padded response tokens, N response tokens end to end without padding.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from by_name import group_advantages
from hypothesis import assume, given, strategies as st
from numpy.typing import NDArray

from gcore_trainer import (
    BatchTotals,
    KLControlConfig,
    KLController,
    LossAggMode,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    aggregation_weights,
    gae_advantages,
    kl_penalty,
    kl_rewards,
    policy_loss,
    rollout_correction,
)
from gcore_trainer.advantages.estimator import (
    ScoredGroup,
    get_advantage_estimator,
    whiten,
    whitening_moments,
)
from gcore_trainer.advantages.estimators.reinforce.reinforce_plus_plus import discounted_returns
from gcore_trainer.advantages.estimators.remax import remax_advantages
from gcore_trainer.config import (
    POLICY_LOSSES as BUILT_IN,
    KLPenalty,
    RewardKL,
    RolloutIS,
    RolloutRS,
)
from gcore_trainer.objectives.value import value_loss

TOLERANCE = 1e-6
"""Of a difference, relative to the largest expected entry; our advantages and weights are float32."""
AGG_MODES: list[LossAggMode] = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Batch:
    """Sequences of different lengths, some tokens masked out; of the first two at least one counts."""

    rng: np.random.Generator
    lengths: list[int]
    mask: torch.Tensor
    """[B, R], of float64; 0 in the padding."""

    @classmethod
    def of(cls, seed: int, *, has_empty: bool = True) -> "Batch":
        """Draw a batch; a sequence in five has no token that counts, unless they are not wanted."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 12, rng.integers(3, 9)).tolist()
        mask = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
        for i, (row, length) in enumerate(zip(mask, lengths, strict=True)):
            row[:length] = torch.from_numpy((rng.random(length) < 0.7).astype(np.float64))
            row[rng.integers(length)] = 1.0
            if has_empty and i > 1 and rng.random() < 0.2:
                row[:] = 0.0
        return cls(rng=rng, lengths=lengths, mask=mask)

    def normal(self, scale: float = 1.0) -> torch.Tensor:
        """[B, R], in the padding too."""
        return torch.from_numpy(self.rng.normal(0.0, scale, self.mask.shape))

    def rows(self, values_BR: torch.Tensor) -> list[NDArray[np.float64]]:
        """[R_i] of each sequence."""
        return [row[:length].numpy() for row, length in zip(values_BR, self.lengths, strict=True)]

    def flat(self, values_BR: torch.Tensor) -> torch.Tensor:
        """[N], through which gradients flow."""
        return torch.cat(
            [row[:length] for row, length in zip(values_BR, self.lengths, strict=True)]
        )

    @property
    def masks(self) -> list[NDArray[np.bool_]]:
        return [row.astype(np.bool_) for row in self.rows(self.mask)]

    def weights(self, mode: LossAggMode) -> torch.Tensor:
        """[N], ours; verl takes the padded length for the longest response allowed."""
        totals = BatchTotals.of(self.masks)
        weights = aggregation_weights(
            self.masks, mode, totals=totals, max_response_length=self.mask.shape[1]
        )
        return torch.from_numpy(np.concatenate(weights)).double()

    def assert_equal(self, actual: list[NDArray[Any]], expected_BR: torch.Tensor) -> None:
        """Where a token counts; what the others get is of no meaning."""
        for a, e, m in zip(actual, self.rows(expected_BR), self.masks, strict=True):
            assert_near(a[m], e[m], scale=float(expected_BR.abs().max()))


def assert_near(actual: Any, expected: Any, *, scale: float | None = None) -> None:
    a, e = (np.asarray(x, np.float64) for x in (actual, expected))
    assert a.shape == e.shape
    largest = np.abs(e).max(initial=0.0) if scale is None else scale
    assert np.abs(a - e).max(initial=0.0) <= TOLERANCE * max(largest, 1e-3)


GROUP_ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
}


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(seed=seeds)
def test_group_advantages(verl: Any, estimator: str, seed: int) -> None:
    batch = Batch.of(seed)
    num = len(batch.lengths)
    index = batch.rng.integers(0, num, num)  # groups of one are among them
    scores = batch.rng.normal(size=num).round(1)
    rewards = batch_of_scores(batch, scores)
    name, settings = GROUP_ESTIMATORS[estimator]
    function = verl.algos.get_adv_estimator_fn(name)
    expected, _ = function(rewards, response_mask=batch.mask, index=index, **settings)
    advantages = np.zeros(num)
    for group in set(index.tolist()):
        advantages[index == group] = group_advantages(scores[index == group], estimator)
    actual = [np.full(length, a) for length, a in zip(batch.lengths, advantages, strict=True)]
    if estimator == "reinforce_plus_plus_baseline":
        counted = np.concatenate([row[mask] for row, mask in zip(actual, batch.masks, strict=True)])
        assume(np.std(counted) > 1e-3)  # what is divided by almost nothing is rounding
        actual = whitened(actual, batch)
    # Equal scores: their mean may be off by a rounding, which a standard deviation of 1e-6 makes visible in verl's.
    batch.assert_equal(actual, expected.where(expected.abs() > 1e-9, 0.0))


@pytest.mark.parametrize("name", ["opo", "grpo_passk"])
@given(seed=seeds)
def test_advantages_of_groups_that_are_compared(verl: Any, name: str, seed: int) -> None:
    batch = Batch.of(seed, has_empty=False)
    num = len(batch.lengths)
    index = np.arange(num) // 2
    index[-1] = index[-2]
    # No two are equal: which of them is the best would be anybody's choice.
    rewards = batch_of_scores(batch, batch.rng.permutation(num) / 4)
    config = {"norm_adv_by_std_in_grpo": True}
    function = verl.algos.get_adv_estimator_fn(name)
    expected, _ = function(rewards, response_mask=batch.mask, index=index, config=config)
    advantages: list[NDArray[Any]] = []
    for group in range(max(index) + 1):
        rows = np.flatnonzero(index == group)
        scored = ScoredGroup(
            rewards=[batch.rows(rewards)[row] for row in rows],
            masks=[batch.masks[row] for row in rows],
        )
        advantages += get_advantage_estimator(name)(scored)[0]
    batch.assert_equal(advantages, expected)


@pytest.mark.parametrize("name", ["tir_optimal_token_baseline", "optimal_token_baseline"])
@given(seed=seeds)
def test_optimal_token_baseline(verl: Any, name: str, seed: int) -> None:
    """Of responses that the policy wrote whole, verl's two functions are one."""
    batch = Batch.of(seed)
    if name == "optimal_token_baseline":
        for row, length in zip(batch.mask, batch.lengths, strict=True):
            row[:length] = 1.0
    num = len(batch.lengths)
    index = batch.rng.integers(0, 3, num)
    rewards = batch.normal() * batch.mask
    log_probs = -batch.normal().abs()
    # A distribution with this probability has at least this sum of squares.
    squares = log_probs.exp() ** 2 * (1 + batch.normal().abs().clamp(max=1))
    expected, _ = verl.algos.get_adv_estimator_fn(name)(
        rewards,
        response_mask=batch.mask,
        index=index,
        old_log_probs=log_probs,
        sum_pi_squared=squares,
    )
    norms = batch.rows(1 - 2 * log_probs.exp() + squares)
    advantages: list[NDArray[Any]] = [np.zeros(0)] * num
    for group in set(index.tolist()):
        members = np.flatnonzero(index == group).tolist()
        scored = ScoredGroup(
            rewards=[batch.rows(rewards)[row] for row in members],
            masks=[batch.masks[row] for row in members],
            squared_norms=[norms[row] for row in members],
        )
        own, _ = get_advantage_estimator("optimal_token_baseline")(scored)
        for row, values in zip(members, own, strict=True):
            advantages[row] = values
    batch.assert_equal(advantages, expected)


@given(seed=seeds, is_normed=st.booleans(), has_weights=st.booleans())
def test_gdpo(verl: Any, seed: int, is_normed: bool, has_weights: bool) -> None:
    batch = Batch.of(seed, has_empty=False)
    num = len(batch.lengths)
    index = np.arange(num) // 2
    index[-1] = index[-2]
    parts = {"right": batch.rng.normal(size=num), "short": 100 * batch.rng.normal(size=num)}
    weights = {"right": 1.0, "short": 0.25 if has_weights else 1.0}
    # verl writes a part on the last token that is no padding.
    batch.mask[range(num), [length - 1 for length in batch.lengths]] = 1.0
    padding = torch.tensor(
        [[float(t < n) for t in range(batch.mask.shape[1])] for n in batch.lengths]
    )
    expected, _ = verl.algos.get_adv_estimator_fn("gdpo")(
        torch.zeros_like(batch.mask),
        response_mask=batch.mask,
        index=index,
        norm_adv_by_std_in_grpo=is_normed,
        config={
            "gdpo_reward_keys": [*parts],
            "gdpo_reward_weights": [*weights.values()] if has_weights else None,
        },
        non_tensor_batch=parts,
        batch={"prompts": padding[:, :0], "attention_mask": padding.long()},
    )
    advantages: list[NDArray[Any]] = []
    for group in range(max(index) + 1):
        rows = np.flatnonzero(index == group)
        scored = ScoredGroup(
            rewards=[np.zeros(batch.lengths[row]) for row in rows],
            masks=[batch.masks[row] for row in rows],
            parts=[{name: float(values[row]) for name, values in parts.items()} for row in rows],
        )
        options = {"gdpo_rewards": weights, "norm_adv_by_std_in_grpo": is_normed}
        advantages += get_advantage_estimator("gdpo")(scored, **options)[0]
    # What is divided by almost nothing is rounding.
    assume(np.std([row[0] for row in advantages]) > 1e-2)
    batch.assert_equal(whitened(advantages, batch), expected)


def batch_of_scores(batch: Batch, scores: NDArray[np.float64]) -> torch.Tensor:
    """[B, R] rewards: the score on the last token that counts, or on the first where none does."""
    rewards = torch.zeros_like(batch.mask)
    for row, mask, score in zip(rewards, batch.masks, scores, strict=True):
        row[int(np.flatnonzero(mask)[-1]) if mask.any() else 0] = score
    return rewards


def whitened(values: list[NDArray[np.float64]], batch: Batch) -> list[NDArray[np.float32]]:
    whole = whitening_moments(values, batch.masks)
    return [whiten(v, m, whole) for v, m in zip(values, batch.masks, strict=True)]


@given(seed=seeds)
def test_remax(verl: Any, seed: int) -> None:
    batch = Batch.of(seed)
    scores, greedy = batch.rng.normal(size=(2, len(batch.lengths)))
    expected, _ = verl.algos.compute_remax_outcome_advantage(
        batch_of_scores(batch, scores), torch.from_numpy(greedy), batch.mask
    )
    advantages = [remax_advantages([s], g)[0] for s, g in zip(scores, greedy, strict=True)]
    batch.assert_equal(
        [np.full(n, a) for n, a in zip(batch.lengths, advantages, strict=True)], expected
    )


@given(seed=seeds, gamma=st.sampled_from([1.0, 0.97, 0.5]))
def test_reinforce_plus_plus(verl: Any, seed: int, gamma: float) -> None:
    batch = Batch.of(seed)
    rewards = batch.normal() * batch.mask
    advantages, returns = verl.algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.mask, config=SimpleNamespace(gamma=gamma)
    )
    ours = [
        discounted_returns(r, m, gamma=gamma)
        for r, m in zip(batch.rows(rewards), batch.masks, strict=True)
    ]
    batch.assert_equal(ours, returns)
    batch.assert_equal(whitened(ours, batch), advantages)


@given(seed=seeds, gamma=st.sampled_from([1.0, 0.97]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae(verl: Any, seed: int, gamma: float, lam: float) -> None:
    batch = Batch.of(seed)
    rewards, values = batch.normal() * batch.mask, batch.normal()
    advantages, returns = verl.algos.compute_gae_advantage_return(
        rewards, values, batch.mask, gamma, lam
    )
    rows = zip(batch.rows(rewards), batch.rows(values), batch.masks, strict=True)
    ours = [gae_advantages(r, v, m, gamma=gamma, lam=lam) for r, v, m in rows]
    batch.assert_equal([r for _, r in ours], returns)
    batch.assert_equal(whitened([a for a, _ in ours], batch), advantages)


@pytest.mark.parametrize("mode", AGG_MODES)
@given(seed=seeds)
def test_aggregation(verl: Any, mode: LossAggMode, seed: int) -> None:
    batch = Batch.of(seed)
    losses = batch.normal()
    # Without the count verl leaves a sequence out whose tokens are all masked out; its trainers pass it, as here.
    expected = verl.algos.agg_loss(losses, batch.mask, mode, global_batch_size=len(batch.lengths))
    shares = batch.weights(mode) * batch.flat(losses)
    assert_near(shares.sum(), expected, scale=float(shares.abs().sum()))


POLICY_LOSSES: dict[str, PolicyLossConfig] = {
    "vanilla": PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6),
    "vanilla with dual clip": PolicyLossConfig(
        clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.4
    ),
    "gspo": PolicyLossConfig(loss_mode="gspo", clip_ratio_low=0.05, clip_ratio_high=0.1),
    "cispo": PolicyLossConfig(loss_mode="cispo", clip_ratio_low=0.3, clip_ratio_high=0.4),
    "sapo": PolicyLossConfig(loss_mode="sapo"),
    "dppo_tv": PolicyLossConfig(
        loss_mode="dppo_tv", clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=4.0
    ),
    "dppo_kl": PolicyLossConfig(
        loss_mode="dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=4.0
    ),
    "geo_mean": PolicyLossConfig(loss_mode="geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.4),
    "gpg": PolicyLossConfig(loss_mode="gpg"),
    "dro": PolicyLossConfig(loss_mode="dro"),
    "clip_cov": PolicyLossConfig(loss_mode="clip_cov", clip_ratio_low=0.2, clip_ratio_high=0.3),
    "clip_cov, one of several": PolicyLossConfig(loss_mode="clip_cov"),
    "kl_cov": PolicyLossConfig(loss_mode="kl_cov"),
}
OPTIONS: dict[str, dict[str, float]] = {
    "sapo": {"tau_pos": 1.1, "tau_neg": 1.7},
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 3.0},
    "clip_cov, one of several": {"clip_cov_lb": 0.01},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=seeds, mode=st.sampled_from(AGG_MODES), scale=st.sampled_from([0.4, 4.0, 40.0]))
def test_policy_loss_and_gradient(
    verl: Any, name: str, seed: int, mode: LossAggMode, scale: float
) -> None:
    config, batch = POLICY_LOSSES[name], Batch.of(seed)
    old, advantages, weights = -batch.normal().abs(), batch.normal(), batch.normal().abs()
    if config.loss_mode in ("sapo", "geo_mean"):
        mode = "seq-mean-token-mean"  # whatever verl is asked for
    if config.loss_mode == "geo_mean":
        # verl takes those of a sequence.
        advantages = advantages[:, :1].expand_as(advantages)
        weights = weights[:, :1].expand_as(weights)
    if config.loss_mode in ("clip_cov", "kl_cov"):
        scale = min(scale, 2.0)  # verl does not bound their ratios
    log_probs = (old + batch.normal(scale)).requires_grad_()
    options = OPTIONS.get(name, {})
    if name == "clip_cov, one of several":
        # The draw is that of torch's generator, seeded with the number of tokens to choose from.
        whole = options | {"clip_cov_ratio": 1.0}
        _, candidates = our_policy_loss(config, batch, log_probs, old, advantages, whole)
        torch.manual_seed(int(candidates["actor/pg_clipfrac"].sum()))
    expected, metrics = verl.algos.get_policy_loss_fn(config.loss_mode)(
        old,
        log_probs,
        advantages,
        batch.mask,
        mode,
        verl_actor(verl, config, len(batch.lengths), **options),
        weights,
    )
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)

    loss, own_metrics = our_policy_loss(config, batch, log_probs, old, advantages, options)
    # The weights of rollout correction multiply the loss of each token, whatever the loss.
    shares = batch.weights(mode) * batch.flat(weights) * loss
    (gradient,) = torch.autograd.grad(shares.sum(), log_probs)
    assert_near(shares.sum().detach(), expected.detach(), scale=float(shares.detach().abs().sum()))
    assert_near(gradient, expected_gradient)
    counted = batch.flat(batch.mask).bool()
    nothing = torch.zeros_like(counted)
    for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert_near(
            own_metrics.get(metric, nothing)[counted].double().mean(), metrics.get(metric, 0.0)
        )


def verl_actor(verl: Any, config: PolicyLossConfig, num_sequences: int, **options: float) -> Any:
    temperatures = {name: options.pop(name) for name in ("tau_pos", "tau_neg") if name in options}
    actor = verl.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c or 3.0,
        policy_loss=verl.PolicyLossConfig(**options),
        **temperatures,
    )
    actor.global_batch_info["global_batch_size"] = num_sequences
    return actor


def our_policy_loss(
    config: PolicyLossConfig,
    batch: Batch,
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    options: dict[str, float],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return policy_loss(
        config,
        batch.flat(log_probs),
        batch.flat(old),
        batch.flat(advantages),
        mask=batch.flat(batch.mask).bool(),
        lengths=batch.lengths,
        **options,
    )


def test_every_policy_loss_is_compared() -> None:
    names = {config.loss_mode for config in POLICY_LOSSES.values()}
    assert names | {"m2po"} == set(BUILT_IN.names)  # which verl does not have


KL_KINDS: list[KLPenalty] = ["k1", "k2", "k3", "k1+", "k3+"]


@pytest.mark.parametrize("kind", KL_KINDS)
@given(seed=seeds, scale=st.sampled_from([0.5, 3.0, 30.0]))
def test_kl_penalty_and_gradient(verl: Any, kind: KLPenalty, seed: int, scale: float) -> None:
    batch = Batch.of(seed)
    reference = -batch.normal().abs()
    log_probs = (reference + batch.normal(scale)).requires_grad_()
    expected = verl.algos.kl_penalty(log_probs, reference, kind)
    actual = kl_penalty(log_probs, reference, kind)
    assert_near(actual.detach(), expected.detach())
    gradients = [torch.autograd.grad(x.sum(), log_probs)[0] for x in (actual, expected)]
    assert_near(*gradients)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@given(seed=seeds, coef=st.sampled_from([0.0, 0.05, 1.0]), scale=st.sampled_from([0.5, 3.0, 30.0]))
def test_kl_in_the_reward(verl: Any, kind: RewardKL, seed: int, coef: float, scale: float) -> None:
    batch = Batch.of(seed)
    reference = -batch.normal().abs()
    log_probs = reference + batch.normal(scale)
    scores = batch.rng.normal(size=len(batch.lengths))
    penalty = verl.algos.kl_penalty(log_probs, reference, kind) * batch.mask
    rows = zip(scores, batch.rows(log_probs), batch.rows(reference), batch.masks, strict=True)
    # Of a response without a token that counts nothing is read.
    actual = [
        kl_rewards(s, p, q, m, coef=coef, kind=kind) if m.any() else 0.0 * p for s, p, q, m in rows
    ]
    batch.assert_equal(actual, batch_of_scores(batch, scores) - coef * penalty)


@given(kls=st.lists(st.floats(-1.0, 50.0), min_size=1, max_size=20), n_steps=st.integers(0, 512))
def test_kl_controllers(verl: Any, kls: list[float], n_steps: int) -> None:
    theirs = verl.algos.AdaptiveKLController(0.2, 6.0, 10_000)
    settings = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=6.0, horizon=10_000)
    ours = KLController(settings)
    fixed = KLController(KLControlConfig(kl_coef=0.2))
    verl_fixed = verl.algos.FixedKLController(0.2)
    for kl in kls:
        for controller in (theirs, ours, fixed, verl_fixed):
            controller.update(kl, n_steps)
        assert ours.value == pytest.approx(theirs.value, rel=1e-12)
        assert fixed.value == verl_fixed.value


@given(seed=seeds, mode=st.sampled_from(AGG_MODES), cliprange=st.sampled_from([0.1, 0.5, 5.0]))
def test_value_loss_and_gradient(verl: Any, seed: int, mode: LossAggMode, cliprange: float) -> None:
    batch = Batch.of(seed)
    old, returns = batch.normal(), batch.normal()
    values = (old + batch.normal(0.5)).requires_grad_()
    expected, clip_fraction = verl.algos.compute_value_loss(
        values, returns, old, batch.mask, cliprange, mode, global_batch_size=len(batch.lengths)
    )
    (expected_gradient,) = torch.autograd.grad(expected, values)
    losses, clipped = value_loss(
        batch.flat(values), batch.flat(old), batch.flat(returns), cliprange_value=cliprange
    )
    actual = (batch.weights(mode) * losses).sum()
    (gradient,) = torch.autograd.grad(actual, values)
    assert_near(actual.detach(), expected.detach())
    assert_near(gradient, expected_gradient)
    assert_near(clipped[batch.flat(batch.mask).bool()].double().mean(), clip_fraction)


def verl_correction(
    verl: Any, batch: Batch, old: torch.Tensor, rollout: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    weights, mask, metrics = verl.helper.compute_rollout_correction_and_rejection_mask(
        old, rollout, batch.mask, **settings
    )
    return None if weights is None else weights.batch["rollout_is_weights"], mask, metrics


def assert_metrics(actual: dict[str, float], expected: dict[str, float]) -> None:
    """Each of ours is one of verl's; verl has more."""
    assert actual
    for name, value in actual.items():
        # verl's variance is a difference of two means, whose denominators have 1e-8 added: compared before the root.
        power = 2 if name.endswith("_std") else 1
        if name.endswith("_eff_sample_size"):
            # verl divides the weights, which may be small, by their mean plus 1e-8.
            value *= (1 + 1e-8 / actual["rollout_corr/rollout_is_mean"]) ** 2
        assert value**power == pytest.approx(
            expected[name] ** power, rel=TOLERANCE, abs=TOLERANCE
        ), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.6])
@given(seed=seeds, normalize=st.booleans(), scale=st.sampled_from([0.05, 0.4, 1.5]))
def test_importance_weights(
    verl: Any, level: RolloutIS, lower: float | None, seed: int, normalize: bool, scale: float
) -> None:
    batch = Batch.of(seed, has_empty=False)
    rollout = -batch.normal().abs()
    old = rollout + batch.normal(scale)
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=1.8,
        rollout_is_threshold_lower=lower,
        rollout_is_batch_normalize=normalize,
    )
    weights, masks, metrics = rollout_correction(
        batch.rows(old), batch.rows(rollout), batch.masks, config
    )
    assert weights is not None
    assume(any(w.any() for w in weights))  # verl divides by the weights' mean square
    expected_weights, expected_mask, expected_metrics = verl_correction(
        verl,
        batch,
        old,
        rollout,
        rollout_is=level,
        rollout_is_threshold=1.8 if lower is None else f"{lower}_1.8",
        rollout_is_batch_normalize=normalize,
    )
    assert expected_weights is not None
    batch.assert_equal(list(weights), expected_weights)
    batch.assert_equal([m.astype(np.float64) for m in masks], expected_mask)
    assert_metrics(metrics, expected_metrics)
    assert ("rollout_corr/rollout_is_batch_norm_factor" in metrics) == normalize


RULES: dict[RolloutRS, tuple[float, float | None]] = {
    "token_k1": (1.5, 0.5),
    "token_k2": (0.1, None),
    "token_k3": (0.1, None),
    "seq_sum_k1": (1.6, None),
    "seq_sum_k2": (0.4, None),
    "seq_sum_k3": (0.4, None),
    "seq_mean_k1": (1.2, 0.8),
    "seq_mean_k2": (0.08, None),
    "seq_mean_k3": (0.08, None),
    "seq_max_k2": (0.3, None),
    "seq_max_k3": (0.3, None),
}


@pytest.mark.parametrize("rule", RULES)
def test_rejection(verl: Any, rule: RolloutRS) -> None:
    upper, lower = RULES[rule]
    config = RolloutCorrectionConfig(
        rollout_rs=rule, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower
    )
    fractions: list[float] = []
    for seed in range(100):
        batch = Batch.of(seed, has_empty=False)
        rollout = -batch.normal().abs()
        old = rollout + batch.normal(0.4)
        weights, masks, metrics = rollout_correction(
            batch.rows(old), batch.rows(rollout), batch.masks, config
        )
        _, expected_mask, expected_metrics = verl_correction(
            verl,
            batch,
            old,
            rollout,
            rollout_rs=rule,
            rollout_rs_threshold=upper if lower is None else f"{lower}_{upper}",
        )
        assert weights is None
        for mask, expected in zip(masks, batch.rows(expected_mask), strict=True):
            np.testing.assert_array_equal(mask, expected.astype(np.bool_))
        assert_metrics(metrics, expected_metrics)
        fractions.append(metrics["rollout_corr/rollout_rs_masked_fraction"])
    assert 0.05 < np.mean(fractions) < 0.9


@given(seed=seeds)
def test_veto(verl: Any, seed: int) -> None:
    """Where no ratio is above 1, a veto on ratios below t is a bound of (log t)^2 / 2 on a sequence's largest k2."""
    batch = Batch.of(seed, has_empty=False)
    rollout = -batch.normal().abs()
    old = rollout - batch.normal(0.5).abs()
    config = RolloutCorrectionConfig(rollout_token_veto_threshold=0.4)
    _, masks, metrics = rollout_correction(
        batch.rows(old), batch.rows(rollout), batch.masks, config
    )
    _, expected_mask, expected_metrics = verl_correction(
        verl,
        batch,
        old,
        rollout,
        rollout_rs="seq_max_k2",
        rollout_rs_threshold=float(np.log(0.4) ** 2 / 2),
    )
    for mask, expected in zip(masks, batch.rows(expected_mask), strict=True):
        np.testing.assert_array_equal(mask, expected.astype(np.bool_))
    vetoed = expected_metrics["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(
        vetoed, rel=TOLERANCE, abs=TOLERANCE
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(seed=seeds, rule=st.sampled_from(list(RULES)), normalize=st.booleans())
def test_correction_of_extreme_ratios(
    verl: Any, level: RolloutIS, seed: int, rule: RolloutRS, normalize: bool
) -> None:
    """Weights and masks, with ratios far beyond e^20 and sequences of which no token counts."""
    batch = Batch.of(seed)
    rollout = -batch.normal().abs()
    old = rollout + batch.normal(30.0)
    upper, lower = RULES[rule]
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_batch_normalize=normalize,
        rollout_rs=rule,
        rollout_rs_threshold=upper,
        rollout_rs_threshold_lower=lower,
    )
    weights, masks, _ = rollout_correction(
        batch.rows(old), batch.rows(rollout), batch.masks, config
    )
    expected_weights, expected_mask, _ = verl_correction(
        verl,
        batch,
        old,
        rollout,
        rollout_is=level,
        rollout_is_batch_normalize=normalize,
        rollout_rs=rule,
        rollout_rs_threshold=upper if lower is None else f"{lower}_{upper}",
    )
    assert weights is not None
    assert expected_weights is not None
    batch.assert_equal(list(weights), expected_weights)
    batch.assert_equal([m.astype(np.float64) for m in masks], expected_mask)
