"""What `docs/reference/verl.md` says: where an algorithm differs from verl's on purpose, both results."""

import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from by_name import group_advantages
from hypothesis import given, strategies as st

from gcore_trainer import (
    BatchError,
    BatchTotals,
    ConfigError,
    KLControlConfig,
    KLController,
    LossAggMode,
    PolicyLossConfig,
    PolicyObjective,
    RolloutCorrectionConfig,
    Sample,
    TokenScores,
    aggregation_weights,
    grpo_advantages,
    kl_penalty,
    policy_loss,
    rollout_correction,
)
from gcore_trainer.advantages.estimator import ESTIMATORS, whiten, whitening_moments
from gcore_trainer.advantages.estimators.remax import remax_advantages
from gcore_trainer.config import POLICY_LOSSES, KLPenalty
from gcore_trainer.objectives.value import explained_variance, value_moments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/verl.md").read_text()
SEQ_MEANS: list[LossAggMode] = [
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def test_every_difference_names_its_tests_and_every_test_is_named() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| what ")
    ]
    assert rows
    named: set[str] = set()
    for row in rows:
        found = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", row.rpartition(" | ")[2])
        assert found, row
        for path, name in found:
            source = ROOT / path if path else Path(__file__)
            assert f"def {name}(" in source.read_text(), (source, name)
            named |= {name} if not path else set()
    own = set(re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.MULTILINE))
    assert own - named == {"test_every_difference_names_its_tests_and_every_test_is_named"}


def verl_advantages(
    verl: Any, name: str, scores: list[float], *, mask: Any = None, **options: Any
) -> torch.Tensor:
    """[n, R] of one group, in float32 as verl's trainers have it; scores are on the last token."""
    mask = torch.ones(len(scores), 2) if mask is None else torch.tensor(mask)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(scores)
    if name.startswith(("grpo", "rloo")):
        options["index"] = np.zeros(len(scores), np.int64)
    return verl.algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, **options
    )[0]


def test_equal_scores(verl: Any) -> None:
    assert verl_advantages(verl, "grpo", [9.9] * 10).abs().min() > 0.4
    for value in range(1, 100):
        assert not grpo_advantages([0.1 * value] * 10).any()


def test_whitening_without_two_tokens(verl: Any) -> None:
    config = SimpleNamespace(gamma=1.0)
    for mask, message in (
        ([[1.0, 0.0]], "sum of the mask is one"),
        ([[0.0, 0.0]], "At least one element in the mask"),
    ):
        with pytest.raises(ValueError, match=message):
            verl_advantages(verl, "reinforce_plus_plus", [1.0], mask=mask, config=config)
        returns, own = np.array([1.0, 0.0]), np.array(mask[0], np.bool_)
        assert not whiten(returns, own, whitening_moments([returns], [own])).any()


def test_a_score_on_a_masked_out_token(verl: Any) -> None:
    mask, config = [[1.0, 0.0], [1.0, 1.0]], SimpleNamespace(gamma=1.0)
    plus_plus = [
        verl_advantages(verl, "reinforce_plus_plus", [s, 0.5], mask=mask, config=config)
        for s in (1.0, -1.0)
    ]
    assert torch.equal(*plus_plus)
    baselines = {"reward_baselines": torch.tensor([0.25, 0.25])}
    remax = verl_advantages(verl, "remax", [1.0, 1.0], mask=mask, **baselines)
    assert remax[:, 0].tolist() == [-0.25, 0.75]
    assert remax_advantages([1.0, 1.0], 0.25).tolist() == [0.75, 0.75]


def test_scores_that_are_not_finite(verl: Any) -> None:
    assert verl_advantages(verl, "grpo", [1.0, float("nan"), 0.0]).isnan().all()
    with pytest.raises(BatchError, match=r"^scores is "):
        grpo_advantages([1.0, float("nan"), 0.0])


def test_names_that_verl_alone_has(verl: Any) -> None:
    estimators = {getattr(name, "value", name) for name in verl.algos.ADV_ESTIMATOR_REGISTRY}
    ours = set(ESTIMATORS.names) & estimators
    assert len(ours) == 10
    losses = set(verl.algos.POLICY_LOSS_REGISTRY)
    assert set(POLICY_LOSSES.names) - losses == {"m2po"}
    for name in (estimators - ours) | (losses - set(POLICY_LOSSES.names)):
        assert f"`{name}`" in PAGE, name
    for name in ("grpo", "rloo"):
        vectorized = verl_advantages(verl, f"{name}_vectorized", [1.0, 0.0, 0.25])
        torch.testing.assert_close(vectorized, verl_advantages(verl, name, [1.0, 0.0, 0.25]))
    assert verl_advantages(verl, "rloo", [0.5])[0, 0] == 0.5
    assert not verl_advantages(verl, "rloo_vectorized", [0.5]).any()
    assert verl.algos.agg_loss(torch.ones(2, 3), torch.ones(2, 3), "token-sum") == 6.0
    for settings in (
        {"loss_agg_mode": "token-sum"},
        {"loss_mode": "bypass_mode"},
        {"kl_loss_type": "abs"},
    ):
        with pytest.raises(ConfigError, match="one of"):
            PolicyLossConfig(**settings)  # pyright: ignore[reportArgumentType]


@given(values=st.lists(st.floats(-30, 30), min_size=1, max_size=9))
def test_other_names_of_the_kl_penalties(verl: Any, values: list[float]) -> None:
    log_probs, reference = (
        torch.tensor(values, dtype=torch.float64),
        torch.zeros(len(values), dtype=torch.float64),
    )
    names: dict[str, KLPenalty] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    for theirs, ours in names.items():
        expected = verl.algos.kl_penalty(log_probs, reference, theirs)
        torch.testing.assert_close(
            kl_penalty(log_probs, reference, ours), expected, rtol=1e-12, atol=1e-12
        )
    assert torch.equal(verl.algos.kl_penalty(log_probs, reference, "abs"), log_probs.abs())
    with pytest.raises(NotImplementedError):
        verl.algos.kl_penalty(log_probs, reference, "full")


def actor_of(verl: Any, **settings: Any) -> Any:
    return verl.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)


def test_defaults(verl: Any) -> None:
    theirs, ours = actor_of(verl), PolicyLossConfig()
    assert (theirs.clip_ratio_low, theirs.clip_ratio_high, theirs.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (ours.clip_ratio_low, ours.clip_ratio_high, ours.clip_ratio_c) == (0.2, 0.28, None)
    assert (theirs.loss_agg_mode, theirs.entropy_coeff) == (ours.loss_agg_mode, ours.entropy_coeff)
    assert (theirs.kl_loss_type, ours.kl_loss_type) == ("low_var_kl", "k3")


def verl_loss(
    verl: Any, actor: Any, arrays: Any, mode: str, loss: str = "vanilla"
) -> tuple[torch.Tensor, Any]:
    """Of log-probs, old log-probs, advantages and mask, [B, R] each."""
    log_probs, old, advantages, mask = arrays
    return verl.algos.get_policy_loss_fn(loss)(old, log_probs, advantages, mask, mode, actor)


def test_sapo_is_aggregated_as_asked(verl: Any) -> None:
    """Rows of one and of three tokens."""
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    arrays = torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([[1.0] * 3, [-2.0] * 3]), mask
    actor = actor_of(verl)
    token_mean, seq_mean = (
        verl_loss(verl, actor, arrays, m, "sapo")[0] for m in ("token-mean", "seq-mean-token-mean")
    )
    assert token_mean == seq_mean
    masks = [row.bool().numpy() for row in mask]
    ours: dict[LossAggMode, float] = {}
    for mode in get_args(LossAggMode)[::2]:
        weights = aggregation_weights(
            masks, mode, totals=BatchTotals.of(masks), max_response_length=3
        )
        flat = [x.flatten() for x in arrays]
        loss, _ = policy_loss(
            PolicyLossConfig(loss_mode="sapo"), *flat[:3], mask=flat[3].bool(), lengths=[3, 3]
        )
        ours[mode] = float((torch.from_numpy(np.concatenate(weights)) * loss).sum())
    assert ours["seq-mean-token-mean"] == pytest.approx(seq_mean.item())
    assert ours["token-mean"] != pytest.approx(seq_mean.item())


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_ratios_are_bounded(verl: Any, loss_mode: str) -> None:
    log_probs, old = torch.zeros(1, 2), torch.full((1, 2), -30.0)
    advantages = torch.tensor([[-1.0, -1.0]])
    arrays = log_probs, old, advantages, torch.ones(1, 2)
    theirs, _ = verl_loss(verl, actor_of(verl), arrays, "token-mean", loss_mode)
    flat = [x.flatten() for x in arrays]
    ours, _ = policy_loss(
        PolicyLossConfig(loss_mode=loss_mode), *flat[:3], mask=flat[3].bool(), lengths=[2]
    )
    assert theirs > np.exp(29.9)
    assert np.exp(19.9) < float(ours.mean()) < np.exp(20.1)


def own_metrics(log_probs: torch.Tensor, samples: list[list[Sample]]) -> dict[str, float]:
    """The objective's, of micro-batches whose tokens have these log-probs in turn."""
    objective = PolicyObjective(PolicyLossConfig())
    totals = BatchTotals.of([s.mask for batch in samples for s in batch])
    sums: dict[str, float] = {}
    begin = 0
    for batch in samples:
        end = begin + sum(s.response_ids.size for s in batch)
        scores = TokenScores(log_probs=log_probs[begin:end], entropies=torch.zeros(end - begin))
        for name, value in objective.partial_loss(scores, batch, totals)[1].items():
            sums[name] = sums.get(name, 0.0) + float(value)
        begin = end
    return objective.metrics(sums)


def sample_of(num_tokens: int, old_log_prob: float) -> Sample:
    return Sample(
        prompt_ids=np.zeros(1, np.int64),
        response_ids=np.zeros(num_tokens, np.int64),
        advantages=np.ones(num_tokens, np.float32),
        old_log_probs=np.full(num_tokens, old_log_prob, np.float32),
    )


def test_ppo_kl_is_not_bounded(verl: Any) -> None:
    log_probs = torch.full((1, 2), -100.0)
    _, metrics = verl_loss(
        verl,
        actor_of(verl),
        (log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)),
        "token-mean",
    )
    assert metrics["actor/ppo_kl"] == pytest.approx(20.0)
    assert own_metrics(log_probs[0], [[sample_of(2, 0.0)]])["actor/ppo_kl"] == pytest.approx(100.0)


def test_metrics_do_not_depend_on_micro_batches(verl: Any) -> None:
    """One token of ratio 1, and three of ratio e."""
    log_probs, old = torch.zeros(4), torch.tensor([0.0, -1.0, -1.0, -1.0])
    rows = [
        (log_probs[None, part], old[None, part], torch.ones(1, n), torch.ones(1, n))
        for part, n in ((slice(1), 1), (slice(1, 4), 3))
    ]
    theirs = [verl_loss(verl, actor_of(verl), row, "token-mean")[1]["actor/ppo_kl"] for row in rows]
    assert np.mean(theirs) == pytest.approx(-0.5)
    first, second = sample_of(1, 0.0), sample_of(3, -1.0)
    whole, parts = (
        own_metrics(log_probs, [[first, second]]),
        own_metrics(log_probs, [[first], [second]]),
    )
    assert whole == pytest.approx(parts, rel=1e-6)
    assert whole["actor/ppo_kl"] == pytest.approx(-0.75)


def aggregated(losses: torch.Tensor, mask: torch.Tensor, mode: LossAggMode) -> float:
    masks = [row.bool().numpy() for row in mask]
    weights = aggregation_weights(masks, mode, totals=BatchTotals.of(masks), max_response_length=5)
    return float((torch.from_numpy(np.stack(weights)) * losses).sum())


def test_the_divisor_of_seq_mean_token_sum_norm(verl: Any) -> None:
    losses, mask = torch.ones(2, 5), torch.ones(2, 5)
    wide, wide_mask = (torch.nn.functional.pad(x, (0, 5)) for x in (losses, mask))
    mode = SEQ_MEANS[2]
    assert verl.algos.agg_loss(losses, mask, mode) == 1.0
    assert verl.algos.agg_loss(wide, wide_mask, mode) == 0.5
    assert verl.algos.agg_loss(wide, wide_mask, mode, loss_scale_factor=5) == 1.0
    for arrays in ((losses, mask), (wide, wide_mask)):
        assert aggregated(*arrays, mode) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", SEQ_MEANS)
def test_rows_without_a_token_count(verl: Any, mode: LossAggMode) -> None:
    losses, mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)), torch.ones(4, 5)
    mask[1] = 0.0
    alone = verl.algos.agg_loss(losses, mask, mode).item()
    in_a_trainer = verl.algos.agg_loss(losses, mask, mode, global_batch_size=4).item()
    assert aggregated(losses, mask, mode) == pytest.approx(in_a_trainer)
    assert in_a_trainer == pytest.approx(alone * 3 / 4)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_batch_without_a_token(verl: Any, mode: LossAggMode) -> None:
    losses, mask = torch.ones(2, 5), torch.zeros(2, 5)
    assert verl.algos.agg_loss(losses, mask, mode).isnan()
    assert aggregated(losses, mask, mode) == 0.0


def test_nan_at_a_masked_out_token(verl: Any) -> None:
    mask, advantages = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[1.0, float("nan"), 1.0]])
    log_probs = torch.zeros(1, 3)
    theirs, _ = verl_loss(
        verl, actor_of(verl), (log_probs, log_probs, advantages, mask), "seq-mean-token-mean"
    )
    assert theirs.isnan()
    flat = log_probs[0], log_probs[0], advantages[0]
    ours, _ = policy_loss(PolicyLossConfig(), *flat, mask=mask[0].bool(), lengths=[3])
    assert ours.tolist() == [-1.0, 0.0, -1.0]


def test_kl_controllers_refuse_what_would_break_them(verl: Any) -> None:
    for current_kl, n_steps in ((float("nan"), 1), (0.0, 500)):
        theirs = verl.algos.AdaptiveKLController(0.2, 6.0, 100)
        theirs.update(current_kl, n_steps)
        assert not theirs.value > 0
        settings = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
        ours = KLController(settings)
        with pytest.raises(BatchError, match="expected"):
            ours.update(current_kl, n_steps)
        assert ours.value == 0.2


def verl_explained_variance(
    verl: Any, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> float:
    zeros, ones = torch.zeros_like(values), torch.ones_like(values)
    batch = dict.fromkeys(
        ("token_level_scores", "token_level_rewards", "advantages", "prompts", "responses"), zeros
    )
    batch |= {
        "attention_mask": torch.cat([ones, ones], -1),
        "response_mask": mask,
        "values": values,
        "returns": returns,
    }
    metrics = verl.metrics.compute_data_metrics(
        SimpleNamespace(batch=batch, non_tensor_batch={}), use_critic=True
    )
    return metrics["critic/vf_explained_var"]


def test_the_explained_variance_of_one_token(verl: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    expected = verl_explained_variance(verl, values, returns, mask)
    assert explained_variance(value_moments(values, returns, mask)) == pytest.approx(expected)
    one = torch.arange(15).reshape(3, 5) == 7
    with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        assert np.isnan(verl_explained_variance(verl, values, returns, one))
    assert explained_variance(value_moments(values, returns, one)) == 0.0


def correction(
    verl: Any, old: list[list[float]], mask: list[list[float]], **settings: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """verl's metrics and ours, where the rollout's log-probs are 0."""
    theirs = dict(settings)
    if lower := theirs.pop("rollout_is_threshold_lower", None):
        theirs["rollout_is_threshold"] = f"{lower}_{theirs['rollout_is_threshold']}"
    rows, masks = torch.tensor(old, dtype=torch.float64), torch.tensor(mask)
    _, _, expected = verl.helper.compute_rollout_correction_and_rejection_mask(
        rows, torch.zeros_like(rows), masks, **theirs
    )
    arrays, own_masks = list(rows.numpy()), [m.bool().numpy() for m in masks]
    config = RolloutCorrectionConfig(**settings)
    _, _, actual = rollout_correction(arrays, [np.zeros_like(a) for a in arrays], own_masks, config)
    return expected, actual


def test_rows_without_a_token_are_left_out_of_the_correction_metrics(verl: Any) -> None:
    theirs, ours = correction(verl, [[-2.0, -2.0], [-9.0, -9.0]], [[1.0, 1.0], [0.0, 0.0]])
    name = "rollout_corr/training_log_ppl"
    assert theirs[name] == pytest.approx(1.0)
    assert ours[name] == pytest.approx(2.0)


def test_correction_metrics_of_extreme_ratios(verl: Any) -> None:
    theirs, ours = correction(
        verl, [[800.0, 0.0], [-30.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]], rollout_is="sequence"
    )
    assert theirs["rollout_corr/k3_kl"] == float("inf")
    assert theirs["rollout_corr/rollout_is_min"] == pytest.approx(np.exp(-30.0))
    assert ours["rollout_corr/k3_kl"] < np.exp(20.0)
    assert ours["rollout_corr/rollout_is_min"] == pytest.approx(np.exp(-20.0))


def test_weights_that_are_all_zero(verl: Any) -> None:
    settings: dict[str, Any] = {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_threshold_lower": 0.5,
    }
    with pytest.raises(ZeroDivisionError):
        correction(verl, [[3.0, 3.0]], [[1.0, 1.0]], **settings)
    _, _, ours = rollout_correction(
        [np.full(2, 3.0)],
        [np.zeros(2)],
        [np.ones(2, np.bool_)],
        RolloutCorrectionConfig(**settings),
    )
    assert np.isfinite(list(ours.values())).all()


def test_settings_of_the_correction(verl: Any) -> None:
    mask, log_ratio = torch.ones(1, 2), torch.zeros(1, 2)
    kept, _ = verl.helper.compute_rollout_rejection_mask(
        log_ratio, mask, "token_k1,seq_mean_k3", "0.5_2.0,0.1"
    )
    assert torch.equal(kept, mask)
    for settings in ({"rollout_rs": "token_k1,seq_mean_k3"}, {"rollout_is_threshold": "0.5_2.0"}):
        with pytest.raises((ConfigError, TypeError)):
            RolloutCorrectionConfig(**settings)  # pyright: ignore[reportArgumentType]
    correct = verl.helper.compute_rollout_correction_and_rejection_mask
    assert not any("veto" in name for name in signature(correct).parameters)
    _, masks, _ = rollout_correction(
        [np.array([0.0, -9.0])],
        [np.zeros(2)],
        [np.ones(2, np.bool_)],
        RolloutCorrectionConfig(rollout_token_veto_threshold=1e-3),
    )
    assert not masks[0].any()


def test_dr_grpo_has_a_name(verl: Any) -> None:
    scores = [1.0, 0.0, 0.5]
    expected = verl_advantages(verl, "grpo", scores, norm_adv_by_std_in_grpo=False)[:, 0]
    np.testing.assert_allclose(group_advantages(scores, "dr_grpo"), expected, rtol=1e-6, atol=1e-7)
