"""Every family of pipelines: sampled by the engine, computed again and trained by the trainer; tiny, random weights."""

import copy
import re
from collections.abc import Mapping
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
    BatchError,
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
    NoiseProcess,
    OptimizerConfig,
)
from gcore_trainer.diffusion.objectives import drawn_at, model_timesteps
from gcore_trainer.diffusion.sample import stacked

README = Path(__file__).parents[2] / "apps/gcore-diffusion/README.md"
RATIO_TOLERANCE = 1e-6
TWO_CALLS_TOLERANCE = 1e-5
"""Of pipelines that call their model once with and once without the prompt, where training has one call for both."""
_FIELDS = ("conditions", "negative_conditions", "shared_conditions", "guidance_scale", "keeps_norm", "is_negated")


def kernel_of(family: Family) -> Kernel:
    return FlowSDE(noise_level=0.7) if family.is_flow else DDIM(eta=1.0)


async def sampled(
    family: Family, path: Path, guidance_scale: float, *, max_num_images: int = 64
) -> tuple[DiffusersEngine, list[ImageSample]]:
    """Make two images of each of two prompts, which have different lengths."""
    pipeline, size = family.make(path), family.size
    engine = DiffusersEngine(pipeline, options=family.options, size=size, max_num_images=max_num_images)
    sampling = ImageSampling(num_inference_steps=3, guidance_scale=guidance_scale, kernel=kernel_of(family), size=size)
    requests = [
        ImageRequest(request_id=prompt, prompt=prompt, sampling=sampling, n=2, seed=3) for prompt in ("red 7", "blue 1")
    ]
    samples = [sample async for sample in engine.generate(requests)]
    await engine.close()
    return engine, sorted(samples, key=lambda s: (s.request_id, s.index))


def denoiser_of(engine: DiffusersEngine, lora: LoRAConfig | None = None) -> Denoiser:
    """Return the engine's model in training."""
    model = getattr(engine.pipeline, "transformer", None) or engine.pipeline.unet
    return Denoiser(copy.deepcopy(model).requires_grad_(lora is None), lora=lora)


def in_training(made: ImageSample, index: int = 0) -> DiffusionSample:
    t = made.trajectory
    return DiffusionSample(
        clean_latents=made.latents,
        **{name: getattr(made, name) for name in (*_FIELDS, "timestep_map")},
        **{name: getattr(t, name) for name in ("latents", "next_latents", "levels", "next_levels", "timesteps")},
        old_means=t.means,
        old_log_probs=t.log_probs,
        advantage=1.0 - 2.0 * (index % 2),
        noise_seed=index,
    )


def process_of(family: Family, engine: DiffusersEngine) -> NoiseProcess:
    scheduler = engine.pipeline.scheduler
    return FlowProcess() if family.is_flow else DDPMProcess(alphas_cumprod=scheduler.alphas_cumprod.tolist())


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the conditions are the same."""
    return one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())


@torch.no_grad()
def ratios(denoiser: Denoiser, kernel: Kernel, samples: list[DiffusionSample]) -> torch.Tensor:
    """Return the ratios [K, B] of the trainer's density of each recorded step to the engine's."""
    found: list[torch.Tensor] = []
    for step in range(samples[0].num_steps):
        following, old_log_probs = stacked(samples, denoiser.device, "next_latents", "old_log_probs", step=step)
        drawn, _ = drawn_at(denoiser, kernel, samples, step)
        found.append(torch.exp(drawn.log_prob(following) - old_log_probs))
    return torch.stack(found)


@pytest.mark.parametrize("guidance_scale", [pytest.param(1.0, marks=pytest.mark.slow), 2.5])
@pytest.mark.parametrize("name", FAMILIES)
async def test_what_was_sampled_is_computed_again(name: str, guidance_scale: float, tmp_path: Path) -> None:
    """The trainer's density of every step is the engine's, and so is the timestep of its level."""
    family = FAMILIES[name]
    engine, made = await sampled(family, tmp_path, guidance_scale)
    samples = [in_training(each) for each in made]
    assert samples[0].num_steps >= 2
    found = ratios(denoiser_of(engine), kernel_of(family), samples)
    tolerance = TWO_CALLS_TOLERANCE if family.has_two_calls and guidance_scale > 1 else RATIO_TOLERANCE
    assert (found - 1).abs().max() <= tolerance
    assert not same(made[0].conditions, made[2].conditions)
    if made[0].negative_conditions is not None:
        assert not same(made[0].conditions, made[0].negative_conditions)
        assert made[0].keeps_norm == (name in ("Qwen-Image", "Lumina 2"))
    assert (made[0].guidance_scale is None) == (guidance_scale == 1 or not family.has_guidance)
    assert made[0].image.ndim == (4 if family.makes_videos else 3)
    if family.is_flow:
        times = FlowProcess().timesteps(torch.from_numpy(made[0].trajectory.levels))
        mapped = model_timesteps([samples[0]] * len(times), times)
        np.testing.assert_allclose(mapped, made[0].trajectory.timesteps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Z-Image", "Qwen-Image", "FLUX.1 dev"])
async def test_images_of_several_batches_are_computed_at_once(name: str, tmp_path: Path) -> None:
    """Even if their prompts have other lengths: the model is called for each shape."""
    family = FAMILIES[name]
    engine, made = await sampled(family, tmp_path, 2.5, max_num_images=2)
    found = ratios(denoiser_of(engine), kernel_of(family), [in_training(each) for each in made])
    assert (found - 1).abs().max() <= TWO_CALLS_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4)], ids=["full", "lora"])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize("name", FAMILIES)
async def test_an_update(name: str, guidance_scale: float, lora: LoRAConfig | None, tmp_path: Path) -> None:
    """Flow-GRPO and NFT train every family of flow matching, DDPO and DPO those of DDPM's kind."""
    family = FAMILIES[name]
    engine, made = await sampled(family, tmp_path, guidance_scale)
    samples = [in_training(each, index) for index, each in enumerate(made)]
    process, policy = process_of(family, engine), DenoisingPolicyConfig(clip_ratio=0.01)
    objectives: list[DiffusionObjective] = [DenoisingPolicyObjective(policy, kernel_of(family))]
    if isinstance(process, FlowProcess):
        objectives.append(NFTObjective(NFTConfig(num_timesteps=1), process))
    else:
        objectives.append(DiffusionDPOObjective(DiffusionDPOConfig(beta=20.0), process))
    for objective in objectives:
        denoiser = denoiser_of(engine, lora)
        reference = denoiser.initial() if objective.needs_reference else None
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0)
        trainer = DiffusionTrainer(denoiser, optimizer=optimizer, objective=objective, reference=reference)
        before = {name: p.detach().clone() for name, p in denoiser.trained_parameters().items()}
        metrics = trainer.train_step([samples])
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] > 0
        assert any(not torch.equal(p, before[name]) for name, p in denoiser.trained_parameters().items())


async def test_guidance_that_ends_early_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["Lumina 2"]
    family = replace(family, options={**family.options, "cfg_trunc_ratio": 0.5})
    with pytest.raises(UnsupportedModelError, match="calls its model otherwise in later steps than in the first"):
        await sampled(family, tmp_path, 2.5)


def test_timesteps_that_training_cannot_give_are_refused(tmp_path: Path) -> None:
    """The model is given a root of the time; objectives that draw levels need a multiple of it, or of the rest."""

    def of_root(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, {**named, "timestep": named["timestep"] ** 0.5}

    family = FAMILIES["Stable Diffusion 3 and 3.5"]
    pipeline = family.make(tmp_path)
    pipeline.transformer.register_forward_pre_hook(of_root, with_kwargs=True)
    engine = DiffusersEngine(pipeline, size=family.size)
    assert engine._timestep_map is None  # pyright: ignore[reportPrivateUsage]
    made = DiffusionSample(clean_latents=np.zeros(1, np.float32), conditions={}, advantage=0.0, timestep_map=None)
    with pytest.raises(BatchError, match="timestep_map is None"):
        NFTObjective(NFTConfig()).check([made])


def test_it_is_tried_in_the_size_that_will_be_used(tmp_path: Path) -> None:
    """And images are decoded one by one."""
    family = FAMILIES["Stable Diffusion 3 and 3.5"]
    pipeline = family.make(tmp_path)
    seen: list[torch.Size] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["hidden_states"].shape), with_kwargs=True
    )
    decoded: list[int] = []
    decode = pipeline.vae.decoder.forward
    pipeline.vae.decoder.forward = lambda latents, *rest: (decoded.append(len(latents)), decode(latents, *rest))[1]
    DiffusersEngine(pipeline, size=(8, 16))
    assert {tuple(shape[1:]) for shape in seen} == {(4, 4, 8)}
    assert set(decoded) == {1}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    family = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(family.refusal)) as found:
        DiffusersEngine(family.make(tmp_path), options=family.options, size=family.size)
    assert "\n" not in str(found.value)


def table() -> str:
    """Return the README's table of families."""
    rows = ["| family | | guidance | makes | scheduler |", "|---|---|---|---|---|"]
    for name, family in (FAMILIES | REFUSED).items():
        verdict = f"refused: {family.refusal}" if family.refusal else "works"
        guidance = (
            "two calls" if family.has_two_calls else "one call" if family.has_guidance else "an input of the model"
        )
        made = "videos" if family.makes_videos else "images"
        scheduler = "flow matching" if family.is_flow else "DDIM"
        rows.append(f"| {name} | {verdict} | {'' if family.refusal else guidance} | {made} | {scheduler} |")
    return "\n".join(rows)


def test_the_readme_lists_the_families() -> None:
    """The rows of its table are what the tests above show."""
    assert table() in README.read_text(), table()
