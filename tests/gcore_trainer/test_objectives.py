"""Critics, reward models and DPO through `TorchTrainer`, against transformers and formulas written out."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_oracles import Group, load_padded, make_samples, padded_scores, split
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from gcore_trainer import (
    BatchError,
    ConfigError,
    DPOConfig,
    DPOObjective,
    Objective,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    PolicyLossConfig,
    PolicyObjective,
    RewardModelLossConfig,
    RewardModelObjective,
    Sample,
    SFTObjective,
    TorchTrainer,
    TrainerError,
    ValueLossConfig,
    ValueObjective,
    scored_at_end,
)

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7]), Group(3, [25, 8])]
STILL = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))


@pytest.fixture
def classifier(llama: Path, tmp_path: Path) -> Path:
    """A reward model of transformers."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def padded_values(path: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """Of every place of a prompt and its response, [P + R] each."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        path, attn_implementation="eager"
    )
    values: list[torch.Tensor] = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
        values.append(model.score(model.model(ids).last_hidden_state)[0, :, 0])
    return values


def make_trainer(
    path: Path, objective: Objective[Any], optimizer: OptimizerConfig = STILL
) -> TorchTrainer:
    kind = PackedModel if objective.scores == "tokens" else PackedValueModel
    return TorchTrainer(kind.from_pretrained(path), optimizer=optimizer, objective=objective)


def test_values_are_those_of_transformers(classifier: Path) -> None:
    samples = make_samples(GROUPS, seed=0)
    trainer = make_trainer(classifier, ValueObjective(ValueLossConfig()))
    found = [v for batch in trainer.values(split(samples, seed=1)) for v in batch]
    for sample, values, expected in zip(
        samples, found, padded_values(classifier, samples), strict=True
    ):
        start = sample.prompt_ids.size - 1
        wanted = expected[start : start + sample.response_ids.size].detach().numpy()
        np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


def test_a_new_critic_starts_at_zero(llama: Path) -> None:
    packed = PackedValueModel.from_pretrained(llama)
    [values] = packed.values([make_samples(GROUPS, seed=0)])
    assert not any(v.any() for v in values)


def with_targets(samples: list[Sample], trainer: TorchTrainer, *, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    [values] = trainer.values([samples])
    return [
        replace(
            s,
            values=(v + rng.normal(0, 0.3, v.shape)).astype(np.float32),
            returns=(v + rng.normal(0, 1, v.shape)).astype(np.float32),
        )
        for s, v in zip(samples, values, strict=True)
    ]


def test_the_value_loss_and_what_it_reports(classifier: Path) -> None:
    trainer = make_trainer(classifier, ValueObjective(ValueLossConfig(cliprange_value=0.2)))
    samples = with_targets(make_samples(GROUPS, seed=0), trainer, seed=1)
    [current] = trainer.values([samples])
    metrics = trainer.train_step(split(samples, seed=2))

    def column(arrays: list[Any]) -> Any:
        return np.concatenate([a[s.mask] for a, s in zip(arrays, samples, strict=True)]).astype(
            np.float64
        )

    new, old = column(current), column([s.values for s in samples])
    returns = column([s.returns for s in samples])
    clipped = old + np.clip(new - old, -0.2, 0.2)
    loss = 0.5 * np.maximum((new - returns) ** 2, (clipped - returns) ** 2).mean()
    assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-5)
    explained = 1 - (returns - old).var(ddof=1) / returns.var(ddof=1)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic/vpred_mean"] == pytest.approx(new.mean(), abs=1e-5)
    assert 0 < metrics["critic/vf_clipfrac"] < 1


def test_a_critic_learns_its_returns(llama: Path) -> None:
    trainer = make_trainer(
        llama, ValueObjective(ValueLossConfig(cliprange_value=1e6)), OptimizerConfig(lr=3e-3)
    )
    samples = with_targets(make_samples(GROUPS, seed=0), trainer, seed=1)
    losses = [trainer.train_step(split(samples, seed=step))["critic/vf_loss"] for step in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def make_pairs(seed: int) -> list[Sample]:
    samples = [
        replace(s, response_mask=None)
        for s in make_samples([Group(9, [12, 5]), Group(4, [7, 21])], seed=seed)
    ]
    return sorted(samples, key=lambda s: s.prompt_ids.tobytes())


def test_the_reward_model_loss(classifier: Path) -> None:
    pairs = make_pairs(0)
    rewards = torch.stack([v[-1] for v in padded_values(classifier, pairs)]).double()
    chosen, rejected = rewards[0::2], rewards[1::2]
    expected = (-(chosen - rejected).sigmoid().log() + 0.01 * (chosen + rejected) ** 2).mean()
    trainer = make_trainer(
        classifier, RewardModelObjective(RewardModelLossConfig(center_rewards_coefficient=0.01))
    )
    scored = [scored_at_end(s) for s in pairs]
    metrics = trainer.train_step([scored[:2], scored[2:]])
    assert metrics["rm/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["rm/accuracy"] == (chosen > rejected).double().mean()
    assert metrics["rm/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)


def test_a_reward_model_learns_to_rank(llama: Path) -> None:
    objective = RewardModelObjective(RewardModelLossConfig())
    trainer = make_trainer(llama, objective, OptimizerConfig(lr=1e-2))
    scored = [scored_at_end(s) for s in make_pairs(0)]
    first = trainer.train_step([scored])
    assert first["rm/loss"] == pytest.approx(math.log(2), rel=1e-5)
    last = [trainer.train_step([scored[:2], scored[2:]]) for _ in range(20)][-1]
    assert last["rm/loss"] < 0.1
    assert last["rm/accuracy"] == 1


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_the_dpo_loss(llama: Path, loss_type: Any) -> None:
    pairs = make_pairs(0)
    rng = np.random.default_rng(1)
    packed = PackedModel.from_pretrained(llama)
    [current] = packed.log_probs([pairs])
    pairs = [
        replace(s, ref_log_probs=(x + rng.normal(0, 0.2, x.shape)).astype(np.float32))
        for s, x in zip(pairs, current, strict=True)
    ]
    with torch.no_grad():
        scores = padded_scores(load_padded(llama), pairs)
    sums = [
        (lp[: s.response_ids.size] - torch.from_numpy(s.ref_log_probs))
        for lp, s in zip(scores.log_probs, pairs, strict=True)
    ]  # pyright: ignore[reportArgumentType]
    h = torch.stack([x.mean() if loss_type == "ipo" else x.sum() for x in sums])
    margin = h[0::2] - h[1::2]
    expected = {
        "sigmoid": -(0.3 * margin).sigmoid().log(),
        "ipo": (margin - 1 / 0.6) ** 2,
        "hinge": (1 - 0.3 * margin).clamp(min=0),
    }[loss_type].mean()
    trainer = TorchTrainer(
        packed, optimizer=STILL, objective=DPOObjective(DPOConfig(beta=0.3, loss_type=loss_type))
    )
    metrics = trainer.train_step([pairs[:2], pairs[2:]])
    assert metrics["dpo/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["dpo/margin"] == pytest.approx(0.3 * margin.mean().item(), rel=1e-3, abs=1e-5)
    assert metrics["dpo/accuracy"] == (margin > 0).float().mean()


def test_importance_weights_scale_the_policy_gradient(llama: Path) -> None:
    trainer = make_trainer(llama, PolicyObjective(PolicyLossConfig()))
    samples = make_samples(GROUPS, seed=0)
    plain = trainer.train_step([samples])
    half = [
        replace(s, rollout_is_weights=np.full(s.response_ids.size, 0.5, np.float32))
        for s in samples
    ]
    weighted = trainer.train_step([half])
    assert weighted["actor/pg_loss"] == pytest.approx(0.5 * plain["actor/pg_loss"], rel=1e-5)
    assert weighted["actor/grad_norm"] == pytest.approx(0.5 * plain["actor/grad_norm"], rel=1e-5)


def test_what_an_objective_lacks_is_named(llama: Path, classifier: Path) -> None:
    samples = make_samples(GROUPS, seed=0)
    with pytest.raises(
        BatchError,
        match=r"^values is None; expected an array for every sample, which the value loss",
    ):
        make_trainer(classifier, ValueObjective(ValueLossConfig())).train_step([samples])
    dpo = make_trainer(llama, DPOObjective(DPOConfig()))
    with pytest.raises(
        BatchError, match=r"^micro-batch 1 holds 1 samples; expected chosen and rejected"
    ):
        dpo.train_step([samples[:2], samples[:1]])
    with pytest.raises(
        BatchError, match=r"^ref_log_probs is None; expected an array for every sample, which DPO"
    ):
        dpo.train_step([samples[:2]])
    reward = make_trainer(classifier, RewardModelObjective(RewardModelLossConfig()))
    with pytest.raises(BatchError, match=r"^response_mask has 33 tokens; expected exactly one"):
        reward.train_step([[replace(s, response_mask=None) for s in samples[:2]]])
    with pytest.raises(
        ConfigError, match=r"^objective is ValueObjective; expected one that reads tokens"
    ):
        TorchTrainer(
            PackedModel.from_pretrained(llama),
            optimizer=STILL,
            objective=ValueObjective(ValueLossConfig()),
        )
    with pytest.raises(TrainerError, match=r"the trainer's model gives tokens; expected values"):
        dpo.values([samples])


def test_a_pad_token_learns_like_any_other(qwen2: Path, tmp_path: Path) -> None:
    """transformers gives the embedding of the pad token no gradient; in a packed row none of them is padding."""
    config: Any = AutoConfig.from_pretrained(qwen2)
    config.pad_token_id = 5
    model: Any = AutoModelForCausalLM.from_pretrained(qwen2, config=config)
    model.save_pretrained(tmp_path / "padded")
    ids = np.array([5, 7, 5, 9])
    sample = Sample(prompt_ids=ids, response_ids=ids)
    gradients: list[torch.Tensor] = []
    for path in (qwen2, tmp_path / "padded"):
        packed = PackedModel.from_pretrained(path)
        TorchTrainer(packed, optimizer=STILL, objective=SFTObjective()).train_step([[sample]])
        gradients.append(packed.model.get_input_embeddings().weight.grad[5].clone())
    assert torch.equal(gradients[0], gradients[1])
