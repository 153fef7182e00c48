"""Every family of pipelines: sampled by the engine, computed again and trained by the trainer; tiny, random weights."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, REFUSED, Family

from gcore_rollout import DDIM, FlowSDE, ImageRequest, ImageSample, ImageSampling, Kernel, UnsupportedModelError
from gcore_rollout.engines.diffusion.engine import DiffusersEngine
from gcore_trainer import (
    DDPMProcess,
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionDPOConfig,
    DiffusionDPOObjective,
    DiffusionObjective,
    DiffusionSample,
    DiffusionTrainer,
    FlowProcess,
    LoRAConfig,
    NFTConfig,
    NFTObjective,
    OptimizerConfig,
)

README = Path(__file__).parents[2] / "apps/gcore-diffusion/README.md"
TOLERANCE = {"Lumina 2": 1e-5, "Wan 2.1": 1e-5}
"""Of ratios; others 1e-6. These pipelines call their model with and without the prompt, and training once for both."""
MODEL_INPUTS = ("conditions", "negative_conditions", "shared_conditions", "guidance_scale", "keeps_norm", "is_negated")


def kernel_of(family: Family) -> Kernel:
    return FlowSDE(noise_level=0.7) if family.is_flow else DDIM(eta=1.0)


async def sampled(family: Family, path: Path, guidance_scale: float) -> tuple[Any, list[ImageSample]]:
    """Make images of prompts of two lengths; return the pipeline's model and the images."""
    engine = DiffusersEngine(family.make(path), options=family.options, size=family.size)
    sampling = ImageSampling(
        num_inference_steps=3, guidance_scale=guidance_scale, kernel=kernel_of(family), size=family.size
    )
    prompts = {"a": ("red 7", 2), "b": ("blue 11", 2)}
    requests = [
        ImageRequest(request_id=name, prompt=prompt, sampling=sampling, n=n, seed=3)
        for name, (prompt, n) in prompts.items()
    ]
    samples = [sample async for sample in engine.generate(requests)]
    await engine.close()
    return engine._recorded.denoiser, sorted(samples, key=lambda s: (s.request_id, s.index))  # pyright: ignore[reportPrivateUsage]


def trained_on(made: ImageSample, index: int) -> DiffusionSample:
    t = made.trajectory
    return DiffusionSample(
        clean_latents=made.latents,
        **{name: getattr(made, name) for name in (*MODEL_INPUTS, "timestep_map")},
        **{name: getattr(t, name) for name in ("latents", "next_latents", "levels", "next_levels", "timesteps")},
        old_means=t.means,
        old_log_probs=t.log_probs,
        advantage=1.0 - 2.0 * (index % 2),
        noise_seed=index,
    )


def objectives(family: Family, scheduler: Any) -> dict[str, DiffusionObjective]:
    policy = DenoisingPolicyObjective(DenoisingPolicyConfig(clip_ratio=0.01), kernel_of(family))
    if family.is_flow:
        return {"flow_grpo": policy, "nft": NFTObjective(NFTConfig(num_timesteps=1), FlowProcess())}
    process = DDPMProcess(alphas_cumprod=scheduler.alphas_cumprod.tolist())
    return {"ddpo": policy, "dpo": DiffusionDPOObjective(DiffusionDPOConfig(beta=20.0), process)}


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family_is_sampled_computed_again_and_trained(name: str, guidance_scale: float, tmp_path: Path) -> None:
    """The ratio is 1 before the first update, and an update of each objective moves the weights, whole or adapters."""
    family = FAMILIES[name]
    model, made = await sampled(family, tmp_path, guidance_scale)
    samples = [trained_on(each, index) for index, each in enumerate(made)]
    assert {tuple(s.trajectory.steps) for s in made} <= {(0, 1, 2), (0, 1)}
    scheduler = family.make(tmp_path / "again").scheduler
    for objective in objectives(family, scheduler).values():
        for lora in (None, LoRAConfig(rank=2, alpha=4.0)):
            denoiser = Denoiser(copy.deepcopy(model).requires_grad_(lora is None), lora=lora)
            reference = denoiser.copied() if objective.needs_reference else None
            optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0)
            trainer = DiffusionTrainer(denoiser, optimizer=optimizer, objective=objective, reference=reference)
            before = {name: p.detach().clone() for name, p in denoiser.trained_parameters().items()}
            metrics = trainer.train_step([samples])
            if isinstance(objective, DenoisingPolicyObjective):
                assert metrics["actor/ratio_dev"] <= TOLERANCE.get(name, 1e-6)
            assert metrics["actor/grad_norm"] > 0
            moved = [n for n, p in denoiser.trained_parameters().items() if not torch.equal(p, before[n])]
            assert moved
            assert all(np.isfinite(value) for value in metrics.values())
