"""NaN and infinities: at masked-out tokens they change nothing, at tokens that count they are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from megatron_oracles import CP, save_megatron_model
from numpy.typing import NDArray
from rank_pool import RankServer
from trainer_oracles import Group, gradients, make_samples, off_policy, split

from gcore_trainer import (
    BatchError,
    DPOConfig,
    DPOObjective,
    LossAggMode,
    Objective,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    PolicyLossConfig,
    PolicyObjective,
    RewardModelLossConfig,
    RewardModelObjective,
    RolloutCorrectionConfig,
    Sample,
    SFTObjective,
    TorchTrainer,
    ValueLossConfig,
    ValueObjective,
    gae_advantages,
    kl_rewards,
    policy_loss,
    rollout_correction,
    scored_at_end,
)
from gcore_trainer.advantages.estimator import whiten, whitening_moments
from gcore_trainer.advantages.estimators.reinforce.reinforce_plus_plus import discounted_returns
from gcore_trainer.advantages.reward_shaping import kl_estimates
from gcore_trainer.advantages.rollout_correction import weight_moments
from gcore_trainer.config import (
    POLICY_LOSSES,
    DPOLossType,
    KLPenalty,
    RewardKL,
    RolloutIS,
    RolloutRS,
)

GROUPS = [Group(7, [9, 1, 5]), Group(3, [6])]
STILL = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))
FIELDS = (
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "rollout_is_weights",
    "values",
    "returns",
)
OPTIONS = {
    "dro": {"dro_beta": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.5},
    "clip_cov": {"clip_cov_lb": 0.01},
}
"""Options of policy losses with which most of their formula is computed."""
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)
few = settings(max_examples=8)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def policy(qwen2: Path) -> PackedModel:
    return PackedModel.from_pretrained(qwen2)


@pytest.fixture(scope="module")
def critic(qwen2: Path) -> PackedValueModel:
    packed = PackedValueModel.from_pretrained(qwen2)
    torch.nn.init.normal_(packed.model.get_parameter("score.weight"), std=0.5)
    return packed


def poison(values: NDArray[Any], mask: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[Any]:
    """The values, with NaN and infinities at the tokens that do not count."""
    return np.where(mask, values, rng.choice(BAD, values.shape)).astype(values.dtype)


def poisoned(samples: list[Sample], rng: np.random.Generator) -> list[Sample]:
    return [
        replace(
            s,
            **{f: poison(getattr(s, f), s.mask, rng) for f in FIELDS if getattr(s, f) is not None},
        )
        for s in samples
    ]


def complete(samples: list[Sample], packed: PackedModel, rng: np.random.Generator) -> list[Sample]:
    """The samples with every array, some with no token that counts, one idle but for what is masked out."""

    def drawn(size: int) -> NDArray[np.float32]:
        return rng.normal(size=size).astype(np.float32)

    samples = off_policy(samples, packed, seed=int(rng.integers(1000)))
    samples = [
        replace(
            s,
            response_mask=rng.random(s.response_ids.size) < 0.6,
            rollout_is_weights=np.abs(drawn(s.response_ids.size)),
            values=drawn(s.response_ids.size),
            returns=drawn(s.response_ids.size),
        )
        for s in samples
    ]
    samples[-1] = replace(
        samples[-1], advantages=np.zeros(samples[-1].response_ids.size, np.float32)
    )
    return samples


def outcome(
    packed: Any, objective: Objective[Any], micro_batches: list[list[Sample]]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of a step that changes nothing."""
    metrics = TorchTrainer(packed, optimizer=STILL, objective=objective).train_step(micro_batches)
    return metrics, gradients(packed.model)


def assert_poison_changes_nothing(
    packed: Any, objective: Objective[Any], samples: list[Sample], rng: np.random.Generator
) -> None:
    seed = int(rng.integers(1000))
    metrics, gradient = outcome(packed, objective, split(samples, seed=seed))
    found, found_gradient = outcome(packed, objective, split(poisoned(samples, rng), seed=seed))
    assert found == metrics
    assert all(np.isfinite(list(metrics.values())))
    assert all(torch.equal(found_gradient[name], tensor) for name, tensor in gradient.items())


@pytest.mark.parametrize("mode", POLICY_LOSSES.names)
@few
@given(
    seed=seeds,
    agg=st.sampled_from(LossAggMode.__args__),
    kl=st.none() | st.sampled_from(KLPenalty.__args__),
    entropy=st.booleans(),
    is_first_update=st.booleans(),
)
def test_a_policy(
    policy: PackedModel,
    mode: str,
    seed: int,
    agg: LossAggMode,
    kl: KLPenalty | None,
    entropy: bool,
    is_first_update: bool,
) -> None:
    rng = np.random.default_rng(seed)
    samples = complete(make_samples(GROUPS, seed=seed % 1000), policy, rng)
    if is_first_update:
        samples = [replace(s, old_log_probs=None) for s in samples]
    config = PolicyLossConfig(
        loss_mode=mode,
        loss_agg_mode=agg,
        clip_ratio_c=3.0 if mode == "vanilla" else None,
        kl_loss_coef=0.0 if kl is None else 0.1,
        kl_loss_type=kl or "k3",
        entropy_coeff=0.01 * entropy,
        max_response_length=40,
    )
    objective = PolicyObjective(config, OPTIONS.get(mode))
    assert_poison_changes_nothing(policy, objective, samples, rng)


@pytest.mark.parametrize("mode", POLICY_LOSSES.names)
@given(seed=seeds)
def test_a_policy_loss_alone(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(9) < 0.6
    arrays = rng.normal(size=(3, 9))
    found: list[torch.Tensor] = []
    for log_probs, old, advantages in (arrays, [poison(a, mask, rng) for a in arrays]):
        current = torch.from_numpy(log_probs).requires_grad_()
        loss, _ = policy_loss(
            PolicyLossConfig(loss_mode=mode),
            current,
            torch.from_numpy(old),
            torch.from_numpy(advantages),
            mask=torch.from_numpy(mask),
            lengths=[5, 1, 3],
            **OPTIONS.get(mode, {}),
        )
        found += [loss, *torch.autograd.grad(loss.sum(), current)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not found[1][torch.from_numpy(~mask)].any()


@few
@given(
    seed=seeds, agg=st.sampled_from(LossAggMode.__args__), clip=st.sampled_from([0.2, float("inf")])
)
def test_a_critic(
    policy: PackedModel, critic: PackedValueModel, seed: int, agg: LossAggMode, clip: float
) -> None:
    rng = np.random.default_rng(seed)
    samples = complete(make_samples(GROUPS, seed=seed % 1000), policy, rng)
    config = ValueLossConfig(cliprange_value=clip, loss_agg_mode=agg, max_response_length=40)
    assert_poison_changes_nothing(critic, ValueObjective(config), samples, rng)


@few
@given(seed=seeds, loss_type=st.sampled_from(DPOLossType.__args__))
def test_preferences_and_supervision(
    policy: PackedModel, critic: PackedValueModel, seed: int, loss_type: DPOLossType
) -> None:
    rng = np.random.default_rng(seed)
    samples = complete(make_samples(GROUPS, seed=seed % 1000), policy, rng)
    assert_poison_changes_nothing(policy, SFTObjective(), samples, rng)
    for s in samples:
        assert s.response_mask is not None
        s.response_mask[-1] = True
    for packed, objective, pairs in (
        (policy, DPOObjective(DPOConfig(loss_type=loss_type)), samples),
        (
            critic,
            RewardModelObjective(RewardModelLossConfig()),
            [scored_at_end(s) for s in samples],
        ),
    ):
        clean = outcome(packed, objective, [pairs])
        dirty = outcome(packed, objective, [poisoned(pairs, rng)])
        assert clean[0] == dirty[0]
        assert all(torch.equal(dirty[1][name], tensor) for name, tensor in clean[1].items())


@pytest.mark.slow
def test_megatron(rank_server: RankServer, tmp_path: Path) -> None:
    path = save_megatron_model("qwen3_tied", tmp_path)
    rng = np.random.default_rng(0)
    samples = complete(make_samples(GROUPS, seed=0), PackedModel.from_pretrained(path), rng)
    options = {"objective": PolicyObjective(PolicyLossConfig(kl_loss_coef=0.1, entropy_coeff=0.01))}
    results = [
        rank_server.shared(2).run(
            "megatron_trains", str(path), {CP: 2}, options, [[[batch]]], size=2
        )[0]
        for batch in (samples, poisoned(samples, rng))
    ]
    (metrics, weights, _), (found, found_weights, _) = results
    assert found == metrics
    assert all(np.isfinite(list(metrics[0].values())))
    assert all(torch.equal(found_weights[name], tensor) for name, tensor in weights.items())


def rows(
    rng: np.random.Generator,
) -> tuple[list[NDArray[Any]], list[NDArray[Any]], list[NDArray[np.bool_]]]:
    """Two per-token arrays of some responses, and their masks, of which one at least has a token."""
    lengths = rng.integers(1, 9, rng.integers(1, 5))
    masks = [rng.random(n) < 0.6 for n in lengths]
    masks[0][0] = True
    first, second = ([-np.abs(rng.normal(size=n)) for n in lengths] for _ in range(2))
    return first, second, masks


Outcome = tuple[list[NDArray[Any]], dict[str, float]]


def assert_function_of_counted(function: Callable[[Any, Any, Any], Outcome], seed: int) -> None:
    """Arrays equal to the bit, and equal metrics, whatever the masked-out entries of two arrays of the samples are."""
    rng = np.random.default_rng(seed)
    first, second, masks = rows(rng)
    dirty = [
        [poison(a, m, rng) for a, m in zip(column, masks, strict=True)]
        for column in (first, second)
    ]
    (arrays, metrics), (found, found_metrics) = (
        function(first, second, masks),
        function(dirty[0], dirty[1], masks),
    )
    for array, other in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(array, other)
    assert metrics == found_metrics
    assert all(np.isfinite(list(metrics.values())))


@given(seed=seeds, gamma=st.sampled_from([1.0, 0.9]))
def test_advantages_along_tokens(seed: int, gamma: float) -> None:
    def of_all(rewards: Any, values: Any, masks: Any) -> Outcome:
        arrays: list[Any] = []
        for r, v, m in zip(rewards, values, masks, strict=True):
            arrays += [
                discounted_returns(r, m, gamma=gamma),
                *gae_advantages(r, v, m, gamma=gamma, lam=0.95),
            ]
        batch = whitening_moments(rewards, masks)
        return [
            *arrays,
            batch,
            *(whiten(r, m, batch) for r, m in zip(rewards, masks, strict=True)),
        ], {}

    assert_function_of_counted(of_all, seed)


@pytest.mark.parametrize("kind", RewardKL.__args__)
@given(seed=seeds)
def test_divergence_in_the_reward(kind: RewardKL, seed: int) -> None:
    def of_all(log_probs: Any, reference: Any, masks: Any) -> Outcome:
        found: list[Any] = []
        for p, q, m in zip(log_probs, reference, masks, strict=True):
            if m.any():
                found += [
                    kl_estimates(p, q, m, kind),
                    kl_rewards(1.0, p, q, m, coef=0.1, kind=kind),
                ]
        return found, {}

    assert_function_of_counted(of_all, seed)


CORRECTIONS = [
    *({"rollout_is": level} for level in RolloutIS.__args__),
    *({"rollout_is": level, "rollout_is_threshold_lower": 0.5} for level in RolloutIS.__args__),
    *({"rollout_is": level, "rollout_is_batch_normalize": True} for level in RolloutIS.__args__),
    *({"rollout_rs": rule, "rollout_rs_threshold": 1.5} for rule in RolloutRS.__args__),
    {"rollout_token_veto_threshold": 0.4},
    {},
]


@pytest.mark.parametrize(
    "options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())) or "measured"
)
@settings(max_examples=25)
@given(seed=seeds)
def test_rollout_correction(options: dict[str, Any], seed: int) -> None:
    config = RolloutCorrectionConfig(**options)

    def corrected(old: Any, rollout: Any, masks: Any) -> Outcome:
        weights, kept, metrics = rollout_correction(old, rollout, masks, config)
        batch = [weight_moments(old, rollout, masks, config)] if config.rollout_is else []
        return [*(weights or []), *kept, *batch], metrics

    assert_function_of_counted(corrected, seed)


def with_bad(
    sample: Sample, field: str, value: float, rng: np.random.Generator
) -> tuple[Sample, int]:
    """The sample with the value at one token that counts, and that token."""
    token = int(rng.choice(np.flatnonzero(sample.mask)))
    values = getattr(sample, field).copy()
    values[token] = value
    return replace(sample, **{field: values}), token


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_a_token_that_counts_is_named_before_anything_is_learned(
    policy: PackedModel, critic: PackedValueModel, field: str, value: float
) -> None:
    rng = np.random.default_rng(0)
    samples = complete(make_samples(GROUPS, seed=0), policy, rng)
    samples = [replace(s, response_mask=None) for s in samples]
    is_policy = field not in ("values", "returns")
    objective: Objective[Any] = PolicyObjective(PolicyLossConfig(kl_loss_coef=0.1))
    if not is_policy:
        objective = ValueObjective(ValueLossConfig())
    trainer = TorchTrainer(
        policy if is_policy else critic, optimizer=OptimizerConfig(lr=1e-2), objective=objective
    )
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    bad, token = with_bad(samples[3], field, value, rng)
    with pytest.raises(
        BatchError,
        match=rf"^micro_batches\[1\]\[1\]\.{field}\[{token}\] is {value}; expected a finite float32",
    ):
        trainer.train_step([samples[:2], [samples[2], bad]])
    assert trainer.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())


def test_what_the_loss_does_not_read_is_not_refused(policy: PackedModel) -> None:
    rng = np.random.default_rng(0)
    samples = complete(make_samples(GROUPS, seed=0), policy, rng)
    bad, _ = with_bad(replace(samples[0], response_mask=None), "ref_log_probs", np.nan, rng)
    metrics, _ = outcome(policy, PolicyObjective(PolicyLossConfig()), [[bad, *samples[1:]]])
    assert all(np.isfinite(list(metrics.values())))


def test_numbers_beyond_float32_and_references_of_pairs_are_named(policy: PackedModel) -> None:
    sample = make_samples(GROUPS, seed=0)[0]
    huge: Any = np.full(sample.response_ids.size, 1e39)
    with pytest.raises(
        BatchError,
        match=r"^micro_batches\[0\]\[0\]\.advantages\[\d+\] is 1e\+39; expected a finite fl",
    ):
        outcome(policy, PolicyObjective(PolicyLossConfig()), [[replace(sample, advantages=huge)]])
    pair = [
        replace(sample, response_mask=None, ref_log_probs=x)
        for x in (np.zeros(huge.size), np.full(huge.size, np.nan))
    ]
    with pytest.raises(BatchError, match=r"^micro_batches\[0\]\[1\]\.ref_log_probs\[0\] is nan"):
        outcome(policy, DPOObjective(DPOConfig()), [pair])


def test_arrays_before_training_are_named() -> None:
    good, bad, mask = np.zeros(3), np.array([0.0, np.nan, 0.0]), np.ones(3, np.bool_)
    for field, function in (
        ("rewards", lambda: discounted_returns(bad, mask, gamma=1.0)),
        ("rewards", lambda: gae_advantages(bad, good, mask, gamma=1.0, lam=1.0)),
        ("values", lambda: gae_advantages(good, bad, mask, gamma=1.0, lam=1.0)),
        (r"values\[1\]", lambda: whitening_moments([good, bad], [mask, mask])),
        ("log_probs", lambda: kl_estimates(bad, good, mask, "k1")),
        ("ref_log_probs", lambda: kl_rewards(1.0, good, bad, mask, coef=0.1)),
        (
            r"old_log_probs\[1\]",
            lambda: rollout_correction(
                [good, bad], [good, good], [mask, mask], RolloutCorrectionConfig()
            ),
        ),
    ):
        with pytest.raises(BatchError, match=rf"^{field}\[1\] is nan; expected a finite float32"):
            function()
