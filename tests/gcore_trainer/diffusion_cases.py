"""What the ranks do in `test_diffusion_ranks.py`: `DiffusionTrainer` on the first ranks, sharded by FSDP2 or whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers.models.transformers.transformer_sd3
import numpy as np
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from memory_growth import PRIVATE, growing
from numpy.typing import NDArray
from rank import Rank

from gcore_trainer import (
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionMicroBatch,
    DiffusionObjective,
    DiffusionTrainer,
    LoRAConfig,
    OptimizerConfig,
    ParallelConfig,
    TorchParallel,
)
from gcore_trainer.torch.host_memory import local

PRELOADED = (diffusers.models.transformers.transformer_sd3,)
"""What a rank would import on its first use; imported here, once."""

Weights = dict[str, torch.Tensor]


def train_images(
    rank: Rank,
    path: str,
    objective: DiffusionObjective,
    steps: Sequence[Sequence[Sequence[DiffusionMicroBatch]]],
    lora: LoRAConfig | None,
    fsdp_size: int,
) -> tuple[list[dict[str, float]], Weights, Weights]:
    """Metrics of each step, the weights in the end, and their average. `steps` holds each replica's micro-batches."""
    del rank
    return trained(
        path,
        objective,
        steps,
        lora,
        parallel=TorchParallel.join(ParallelConfig(fsdp_size=fsdp_size)),
    )


def train_both_ways(
    rank: Rank,
    path: str,
    objective: DiffusionObjective,
    steps: Sequence[Sequence[Sequence[DiffusionMicroBatch]]],
    lora: LoRAConfig | None,
    fsdp_size: int,
) -> list[tuple[list[dict[str, float]], Weights, Weights]]:
    """What `train_images` gives of a model that diffusers loads, and of one that is read by slices."""
    del rank
    parallel = TorchParallel.join(ParallelConfig(fsdp_size=fsdp_size))
    whole = SD3Transformer2DModel.from_pretrained(Path(path) / "transformer", dtype=torch.float32)
    denoisers = [
        Denoiser(whole, lora=lora),
        Denoiser.from_pretrained(path, lora=lora, sharded=True),
    ]
    return [
        trained(path, objective, steps, lora, parallel=parallel, denoiser=denoiser)
        for denoiser in denoisers
    ]


def peak_bytes_of_images(
    rank: Rank, path: str, sharded: bool, options: dict[str, Any]
) -> tuple[int, int]:
    """The most memory that a rank has until a policy and its reference are sharded, and their shards' bytes."""
    del rank
    parallel = TorchParallel.join(ParallelConfig())
    with growing(PRIVATE) as peak:
        denoiser = Denoiser.from_pretrained(path, sharded=sharded, **options)
        models = [denoiser, denoiser.initial()]
        for model in models[: 1 if denoiser.lora else 2]:
            model.shard(parallel.mesh)
            model.load_weights()
    shards = {id(p): local(p).nbytes for m in models for p in m.model.parameters()}
    return peak[0], sum(shards.values())


def score_images(
    rank: Rank, path: str, parts: Sequence[Sequence[DiffusionMicroBatch]], fsdp_size: int
) -> list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]:
    """Scores of this rank's micro-batches, by the reference, sharded or whole, of a policy with changed adapters."""
    del rank
    objective = DenoisingPolicyObjective(DenoisingPolicyConfig(), kernel)
    options: dict[str, Any] = {"optimizer": OptimizerConfig(), "objective": objective}
    policy = Denoiser.from_pretrained(path, lora=LoRAConfig(rank=2))
    for adapter in policy.trained_parameters().values():
        torch.nn.init.constant_(adapter, 0.1)
    parallel = TorchParallel.join(ParallelConfig(fsdp_size=fsdp_size))
    trainer = DiffusionTrainer(policy, reference=policy.initial(), parallel=parallel, **options)
    return trainer.score_steps(parts[trainer.data_parallel_rank], kernel, by_reference=True)


@dataclass(frozen=True)
class Step:
    """A Gaussian of a fixed std."""

    mean: torch.Tensor
    std: torch.Tensor

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        return -((next_latents - self.mean) ** 2).flatten(1).mean(1)


def kernel(
    output: torch.Tensor, latents: torch.Tensor, level: torch.Tensor, next_level: torch.Tensor
) -> Step:
    dt = (next_level - level).reshape(-1, 1, 1, 1)
    return Step(latents + output * dt, 0.3 * torch.sqrt(-dt))


def trained(
    path: str,
    objective: DiffusionObjective,
    steps: Sequence[Sequence[Sequence[DiffusionMicroBatch]]],
    lora: LoRAConfig | None,
    *,
    parallel: TorchParallel | None = None,
    denoiser: Denoiser | None = None,
) -> tuple[list[dict[str, float]], Weights, Weights]:
    """The same of a rank, or alone."""
    options: dict[str, Any] = {
        "optimizer": OptimizerConfig(lr=2e-3),
        "objective": objective,
        "ema_decay": 0.9,
    }
    denoiser = denoiser or Denoiser.from_pretrained(path, lora=lora)
    reference = denoiser.initial() if objective.needs_reference else None
    trainer = DiffusionTrainer(denoiser, reference=reference, parallel=parallel, **options)
    metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return metrics, dict(trainer.export_weights()), dict(trainer.export_weights(averaged=True))
