"""On-policy distillation, against the gradient of the divergence itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_oracles import Group, load_padded, make_samples, padded_scores

from gcore_trainer import (
    BatchError,
    FrozenModel,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    ScoredGroup,
    TorchTrainer,
    add_distillation,
    get_advantage_estimator,
    policy_loss,
)
from gcore_trainer.advantages.distillation import distillation_advantages

RNG = np.random.default_rng(0)
LOSS = PolicyLossConfig()


class Alone:
    """The collectives of one process."""

    async def all_gather(self, value: Any) -> list[Any]:
        return [value]


class Both(Alone):
    """The collectives of one of two processes with the same values."""

    async def all_gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_its_expected_gradient_is_that_of_the_divergence() -> None:
    """Every token of the vocabulary once, weighed by its probability: nothing is left to chance."""
    logits = torch.randn(7, 32, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, 32, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (log_probs.exp() * (log_probs - teacher)).sum().backward()
    expected, logits.grad = logits.grad, None
    flat = logits.log_softmax(-1).flatten()
    everything = np.ones(flat.shape, np.bool_)
    advantages = distillation_advantages(
        flat.detach().numpy(), teacher.flatten().numpy(), everything
    )
    loss, _ = policy_loss(
        LOSS,
        flat,
        flat.detach(),
        torch.from_numpy(advantages),
        mask=torch.from_numpy(everything),
        lengths=[flat.numel()],
    )
    (flat.detach().exp() * loss).sum().backward()
    torch.testing.assert_close(logits.grad, expected)


def test_a_step_follows_two_teachers(qwen2: Path, llama: Path) -> None:
    """The gradient norm is that of torch alone, of padded batches; the advantages are of the policy's own samples."""
    samples = make_samples([Group(12, [20, 1, 9]), Group(3, [25, 6])], seed=0)
    policy = PackedModel.from_pretrained(qwen2)
    teacher = FrozenModel(PackedModel.from_pretrained(llama))
    [own] = policy.log_probs([samples])
    # The other teacher is the policy itself, half of the weight: the divergence is half as large.
    taught = [0.5 * (a + b) for a, b in zip(teacher.scores([samples])[0], own, strict=True)]
    given = [
        replace(s, rollout_log_probs=x, advantages=np.zeros_like(x))
        for s, x in zip(samples, own, strict=True)
    ]
    metrics = asyncio.run(add_distillation([given], [taught], Alone().all_gather, coef=0.5))
    trainer = TorchTrainer(
        policy, optimizer=OptimizerConfig(lr=1e-3), objective=PolicyObjective(LOSS)
    )
    grad_norm = trainer.train_step([given])["actor/grad_norm"]

    model, other = load_padded(qwen2), load_padded(llama)
    log_probs = padded_scores(model, samples).log_probs
    with torch.no_grad():
        others = padded_scores(other, samples).log_probs
    total = torch.zeros(())
    divergence, count = 0.0, 0
    for sample, p, q in zip(samples, log_probs, others, strict=True):
        size = sample.response_ids.size
        mask = torch.tensor(sample.mask)
        difference = 0.5 * (p[:size].detach() - q[:size])
        total = total + (0.5 * difference * p[:size])[mask].sum()
        divergence, count = divergence + float(difference[mask].sum()), count + int(mask.sum())
    (total / count).backward()
    expected = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert grad_norm == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["distillation/reverse_kl"] == pytest.approx(divergence / count, rel=1e-4)
    assert metrics["distillation/taught"] == 1


def test_rewards_and_teachers_add_up() -> None:
    """A sample without a teacher keeps its advantages; old log-probs go before those of the engine."""
    samples = make_samples([Group(2, [4, 6, 5])], seed=1)
    samples = [
        replace(
            s,
            old_log_probs=RNG.normal(size=s.response_ids.size).astype(np.float32),
            rollout_log_probs=None,
        )
        for s in samples
    ]
    teacher: Sequence[Any] = [None, *(RNG.normal(size=s.response_ids.size) for s in samples[1:])]
    found = [replace(s) for s in samples]
    metrics = asyncio.run(add_distillation([found], [teacher], Both().all_gather, coef=2.0))
    np.testing.assert_array_equal(found[0].advantages, samples[0].advantages)
    counted: list[Any] = (
        [found[0].advantages[found[0].mask]] if found[0].advantages is not None else []
    )
    for sample, q, own in zip(samples[1:], teacher[1:], found[1:], strict=True):
        assert sample.advantages is not None
        assert sample.old_log_probs is not None
        assert own.advantages is not None
        expected = sample.advantages + 2 * np.where(sample.mask, q - sample.old_log_probs, 0)
        np.testing.assert_allclose(own.advantages, expected, rtol=1e-6)
        counted.append(own.advantages[own.mask])
    assert metrics["distillation/taught"] == pytest.approx(2 / 3)
    assert metrics["critic/advantages/mean"] == pytest.approx(np.concatenate(counted).mean())
    assert metrics["critic/advantages/max"] == pytest.approx(np.concatenate(counted).max())


def test_its_estimator_reads_no_scores() -> None:
    mask = np.ones(3, np.bool_)
    group = ScoredGroup(rewards=[np.array([0.0, 0.0, 5.0])], masks=[mask])
    advantages, returns = get_advantage_estimator("distillation")(group)
    assert returns is None
    assert not np.concatenate(advantages).any()


def test_samples_without_what_it_needs_are_refused() -> None:
    samples = make_samples([Group(2, [4])], seed=1)
    with pytest.raises(BatchError, match="advantages or log-probs is None"):
        asyncio.run(add_distillation([samples], [[np.zeros(4)]], Alone().all_gather))
    given = [replace(samples[0], rollout_log_probs=np.zeros(4, np.float32))]
    with pytest.raises(BatchError, match="teacher_log_probs"):
        asyncio.run(add_distillation([given], [[np.full(4, np.nan)]], Alone().all_gather))
