"""`TorchTrainer` over several processes against one process: FSDP2, on real gloo ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankServer
from trainer_oracles import Group, make_samples, off_policy, split

from gcore_trainer import MicroBatch, OptimizerConfig, PolicyLossConfig, Sample
from gcore_trainer.objectives import Objective, PolicyObjective
from gcore_trainer.packed_model import PackedModel
from gcore_trainer.parallel import ParallelConfig
from gcore_trainer.torch_trainer import TorchTrainer

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7]), Group(3, [25]), Group(9, [4, 18])]
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, grad_clip=0.5, lr_warmup_steps=3)


def steps_of(path: Path, count: int) -> list[list[Sample]]:
    packed = PackedModel.from_pretrained(path)
    return [off_policy(make_samples(GROUPS, seed=i), packed, seed=i) for i in range(count)]


def dealt(samples: list[Sample], size: int, *, seed: int) -> list[list[MicroBatch]]:
    """Each replica's micro-batches: uneven in number, and none for the last of several replicas in some steps."""
    owners = np.random.default_rng(seed).integers(0, size if seed % 2 else max(1, size - 1), len(samples))
    parts = [[s for s, owner in zip(samples, owners, strict=True) if owner == r] for r in range(size)]
    return [split(part, seed=seed) if part else [] for part in parts]


def train_alone(
    path: Path, objective: Objective[Any], optimizer: OptimizerConfig, steps: list[list[Sample]]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer = TorchTrainer(PackedModel.from_pretrained(path), optimizer=optimizer, objective=objective)
    metrics = [trainer.train_step([samples]) for samples in steps]
    return metrics, dict(trainer.export_weights())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ten_steps_are_those_of_one_process(rank_server: RankServer, qwen2: Path, size: int) -> None:
    """Uneven parts, dual clip, KL and entropy terms, warm-up, weight decay and clipping included."""
    objective = PolicyObjective(PolicyLossConfig(clip_ratio_c=2.0, kl_loss_coef=0.05, entropy_coeff=0.01))
    steps = steps_of(qwen2, 10)
    expected, weights = train_alone(qwen2, objective, OPTIMIZER, steps)
    parts = [dealt(samples, size, seed=i) for i, samples in enumerate(steps)]
    arguments = (str(qwen2), objective, OPTIMIZER, ParallelConfig(), parts, {})
    for metrics, sharded in rank_server.shared(size).run("train", *arguments, size=size):
        for own, alone in zip(metrics, expected, strict=True):
            own, alone = replace_tokens(own), replace_tokens(alone)
            assert own == pytest.approx(alone, rel=1e-4, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=1e-5)


def replace_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """Without the number of computed tokens: prompts are shared within a replica only."""
    return {name: value for name, value in metrics.items() if name != "perf/computed_tokens"}
