"""`TorchTrainer` against plain PyTorch and transformers on padded batches, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_oracles import (
    Group,
    deviation,
    gradients,
    left_out,
    load_padded,
    make_samples,
    off_policy,
    padded_loss,
    padded_scores,
    split,
    truncated,
)
from transformers import AutoConfig, AutoModelForCausalLM

from gcore_trainer import (
    BatchError,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    SFTObjective,
    TorchTrainer,
    TrainerError,
)

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7]), Group(3, [25])]
LOSS = PolicyLossConfig()


def make_trainer(path: Path, *, loss: PolicyLossConfig = LOSS, **optimizer: Any) -> TorchTrainer:
    return TorchTrainer(
        PackedModel.from_pretrained(path),
        optimizer=OptimizerConfig(**optimizer),
        objective=PolicyObjective(loss),
    )


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export_weights()}


def exploding(samples: list[Sample]) -> list[Sample]:
    """The samples with advantages that are finite, and whose gradient is not."""
    return [replace(s, advantages=np.full(s.response_ids.size, 3e38, np.float32)) for s in samples]


def test_five_steps_are_those_of_plain_adamw(llama: Path) -> None:
    """Warm-up, weight decay and gradient clipping included."""
    config = OptimizerConfig(
        lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, lr_warmup_steps=3, grad_clip=0.05
    )
    loss = PolicyLossConfig(kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
    packed = PackedModel.from_pretrained(llama, dtype=torch.float64)
    trainer = TorchTrainer(packed, optimizer=config, objective=PolicyObjective(loss))
    model = load_padded(llama, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for step in range(5):
        samples = off_policy(make_samples(GROUPS, seed=step), packed, seed=step)
        metrics = trainer.train_step(split(samples, seed=step))
        optimizer.zero_grad()
        padded_loss(model, samples, loss).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 3)
        optimizer.step()
        assert metrics["actor/grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-5)
        assert metrics["actor/grad_norm"] > 0.05
    assert trainer.step == 5
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed.model.get_parameter(name), parameter, rtol=0, atol=1e-6)


def test_the_rate_warms_up_to_a_constant(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, lr=1e-3, lr_warmup_steps=4)
    samples = make_samples(GROUPS, seed=0)
    rates = [trainer.train_step([samples])["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_metrics_of_a_first_update(qwen2: Path) -> None:
    trainer = make_trainer(qwen2)
    samples = make_samples(GROUPS, seed=0)
    with torch.no_grad():
        scores = padded_scores(load_padded(qwen2), samples)
    metrics = trainer.train_step(split(samples, seed=0))
    mean_entropy = (scores.entropies * scores.mask).sum() / scores.mask.sum()
    assert metrics["actor/entropy"] == pytest.approx(mean_entropy.item(), rel=1e-5)
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
    assert "training/rollout_probs_diff_mean" not in metrics


def test_metrics_of_an_off_policy_update(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    loss = PolicyLossConfig(clip_ratio_c=1.3)
    trainer = TorchTrainer(packed, optimizer=OptimizerConfig(), objective=PolicyObjective(loss))
    samples = off_policy(make_samples(GROUPS, seed=0), packed, seed=0)
    (log_probs,) = packed.log_probs([samples])

    def column(arrays: list[Any]) -> Any:
        kept = [
            a[True if s.response_mask is None else s.response_mask]
            for a, s in zip(arrays, samples, strict=True)
        ]
        return np.concatenate([np.ravel(a) for a in kept]).astype(np.float64)

    new, old = column(log_probs), column([s.old_log_probs for s in samples])
    rollout, advantages = (
        column([s.rollout_log_probs for s in samples]),
        column([s.advantages for s in samples]),
    )
    ratio = np.exp(new - old)
    metrics = trainer.train_step(split(samples, seed=0))
    assert metrics["actor/ppo_kl"] == pytest.approx((old - new).mean(), abs=1e-5)
    clipped = np.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped.mean(), abs=1e-6)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(
        ((advantages < 0) & (ratio > 1.3)).mean(), abs=1e-6
    )
    difference = np.abs(np.exp(new) - np.exp(rollout)).mean()
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(difference, abs=1e-6)


def test_a_batch_without_a_signal_computes_nothing(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, lr=1e-2)
    before = weights(trainer)
    samples = [
        replace(s, advantages=np.zeros(s.response_ids.size, np.float32))
        for s in make_samples(GROUPS, seed=0)
    ]
    metrics = trainer.train_step([samples])
    assert metrics["perf/computed_tokens"] == 0
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())


def test_a_step_without_a_finite_gradient_is_skipped(
    qwen2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(qwen2, lr=1e-3)
    good = make_samples(GROUPS, seed=0)
    trainer.train_step([good])
    before = weights(trainer)
    moments = {name: tensor.clone() for name, tensor in trainer.state()["exp_avg"].items()}
    for count in (1, 2):
        metrics = trainer.train_step([good[:3], exploding(good[3:])])
        assert not np.isfinite(metrics["actor/grad_norm"])
        assert metrics["actor/nonfinite_steps"] == count
        assert f"step {count}: the gradient norm is " in caplog.text
        assert f"the update is skipped ({count} in a row, of at most 10)" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())
    assert all(
        torch.equal(moments[name], tensor) for name, tensor in trainer.state()["exp_avg"].items()
    )
    assert trainer.train_step([good])["actor/nonfinite_steps"] == 0
    assert not all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())
    assert all(tensor.isfinite().all() for _, tensor in trainer.export_weights())


def test_too_many_skipped_steps_in_a_row_end_the_run(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_trainer.trainer.MAX_NONFINITE_STEPS", 2)
    trainer = make_trainer(qwen2)
    bad = exploding(make_samples(GROUPS, seed=0))
    trainer.train_step([bad])
    with pytest.raises(TrainerError, match="in 2 steps in a row: try a lower lr"):
        trainer.train_step([bad])


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
def test_exported_weights_load_into_transformers(
    folders: dict[str, Path], architecture: str
) -> None:
    path = folders[architecture]
    trainer = make_trainer(path, lr=1e-3)
    samples = make_samples(GROUPS, seed=0)
    trainer.train_step([samples])
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    missing, unexpected = model.load_state_dict(dict(trainer.export_weights()), strict=False)
    assert unexpected == []
    assert missing == (
        ["lm_head.weight"] if architecture == "qwen2" else []
    )  # tied to the embedding
    model.tie_weights()
    with torch.no_grad():
        expected = padded_scores(model, samples).log_probs
    for row, log_probs in zip(expected, trainer.log_probs([samples])[0], strict=True):
        np.testing.assert_allclose(log_probs, row[: log_probs.size], rtol=0, atol=1e-5)


def test_a_saved_folder_loads_into_transformers(qwen2: Path, tmp_path: Path) -> None:
    trainer = make_trainer(qwen2, lr=1e-3)
    trainer.train_step([make_samples(GROUPS, seed=0)])
    trainer.save_pretrained(tmp_path / "model")
    loaded = dict(load_padded(tmp_path / "model").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.export_weights())


def test_supervision_is_the_labels_loss_of_transformers(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    optimizer = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))
    trainer = TorchTrainer(packed, optimizer=optimizer, objective=SFTObjective())
    samples = make_samples(GROUPS, seed=0)
    metrics = trainer.train_step(split(samples, seed=0))

    def padded(rows: list[Any], value: int) -> torch.Tensor:
        tensors = [torch.from_numpy(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    model = load_padded(qwen2)
    ids = [np.concatenate([s.prompt_ids, s.response_ids]) for s in samples]
    targets = [
        np.where(True if s.response_mask is None else s.response_mask, s.response_ids, -100)
        for s in samples
    ]
    labels = [
        np.concatenate([np.full(s.prompt_ids.size, -100), t])
        for s, t in zip(samples, targets, strict=True)
    ]
    output = model(
        input_ids=padded(ids, 0),
        attention_mask=padded([np.ones_like(x) for x in ids], 0),
        labels=padded(labels, -100),
    )
    output.loss.backward()
    assert metrics["sft/loss"] == pytest.approx(output.loss.item(), rel=1e-6)
    assert deviation(gradients(packed.model), gradients(model)) < 1e-5


def test_supervision_drives_the_loss_down(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    trainer = TorchTrainer(packed, optimizer=OptimizerConfig(lr=1e-2), objective=SFTObjective())
    samples = [replace(s, advantages=None) for s in make_samples(GROUPS, seed=0)]
    losses = [trainer.train_step([samples])["sft/loss"] for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0]


def test_policy_gradient_raises_what_was_rewarded(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, lr=1e-3)
    samples = make_samples(GROUPS, seed=0)
    (before,) = trainer.log_probs([samples])
    for _ in range(5):
        trainer.train_step([samples])
    (after,) = trainer.log_probs([samples])
    for sample, x, y in zip(samples, before, after, strict=True):
        assert sample.advantages is not None
        kept = np.ones(x.size, np.bool_) if sample.response_mask is None else sample.response_mask
        assert (y - x)[kept].mean() * sample.advantages[0] > 0


def without(samples: list[Sample], field: str, *indices: int) -> list[Sample]:
    nothing: dict[str, Any] = {field: None}
    return [replace(s, **nothing) if i in indices else s for i, s in enumerate(samples)]


def test_an_incomplete_batch_is_refused_and_changes_nothing(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, lr=1e-2, loss=PolicyLossConfig(kl_loss_coef=0.1))
    before = weights(trainer)
    samples = off_policy(make_samples(GROUPS, seed=0), PackedModel.from_pretrained(qwen2), seed=0)
    with pytest.raises(BatchError, match=r"^advantages is None"):
        trainer.train_step([without(samples, "advantages", 3)])
    with pytest.raises(BatchError, match=r"^ref_log_probs is None; .* which kl_loss_coef=0\.1"):
        trainer.train_step([without(samples, "ref_log_probs", 0)])
    for field in ("old_log_probs", "rollout_log_probs"):
        with pytest.raises(BatchError, match=f"^{field} is None for some samples"):
            trainer.train_step([[s] for s in without(samples, field, 0)])
    for empty in ([], [[]]):
        with pytest.raises(BatchError, match=r"^micro_batches holds no sample"):
            trainer.train_step(empty)
    assert trainer.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())


def test_log_probs_at_half_the_temperature_give_sums_of_squared_probabilities(
    qwen2: Path,
) -> None:
    """As a run computes the squared norms of OTB, and afterwards the temperature is what it was."""
    samples = make_samples([Group(7, [20, 9]), Group(4, [13])], seed=0)
    samples[1:] = truncated(samples[1:], seed=0)
    packed = PackedModel.from_pretrained(qwen2, temperature=0.7)
    trainer = TorchTrainer(
        packed, optimizer=OptimizerConfig(), objective=PolicyObjective(PolicyLossConfig())
    )
    [log_probs] = trainer.log_probs([samples])
    [sharp] = trainer.log_probs([samples], temperature_scale=0.5)
    model = load_padded(qwen2, dtype=torch.float64)
    for sample, own, other in zip(samples, log_probs, sharp, strict=True):
        ids = torch.from_numpy(np.append(sample.prompt_ids, sample.response_ids))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, sample.prompt_ids.size - 1 : -1]
        logits[left_out(sample, logits)] = -torch.inf
        probs = (logits / 0.7).softmax(-1)
        np.testing.assert_allclose(np.exp(2 * own - other), probs.square().sum(-1), rtol=1e-4)
    assert packed.temperature == 0.7
