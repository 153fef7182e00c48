"""Every family of pipelines, sampled by the engine and computed again by the trainer; run it to print the table.

With names of families it prints their rows alone.
"""

import asyncio
import copy
import logging
import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tiny_families import FAMILIES, REFUSED, Family

from gcore_diffusion.modality import training_sample
from gcore_rollout import (
    DDIM,
    EngineModelError,
    FlowSDE,
    ImageRequest,
    ImageSample,
    ImageSampling,
    Kernel,
)
from gcore_rollout.engines.diffusion.engine import DiffusersEngine
from gcore_trainer import Denoiser, DiffusionSample, LoRAConfig
from gcore_trainer.diffusion.objectives import drawn_at
from gcore_trainer.diffusion.sample import stack_fields

_NUM_STEPS = 3
HEADER = "| family | | guidance | makes | scheduler | largest \\|ratio - 1\\| |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of a family with one guidance scale: two images of each of two prompts of different lengths."""

    engine: DiffusersEngine
    model: Any
    """The engine's denoiser."""
    samples: list[ImageSample]
    calls_per_step: int
    """Calls of the model."""
    scheduler: str

    @property
    def deviation(self) -> float:
        """Largest distance from 1 of the ratio of the trainer's density of a recorded step to the engine's."""
        kernel, samples = (
            kernel_of(self.engine.pipeline),
            [in_training(each) for each in self.samples],
        )
        return float((ratios(denoiser_of(self.model), kernel, samples) - 1).abs().max())

    @property
    def guidance(self) -> str:
        if self.samples[0].guidance_scale is None:
            return "an input of the model"
        return "two calls" if self.calls_per_step == 2 else "one call"

    @property
    def makes(self) -> str:
        return "videos" if self.samples[0].image.ndim == 4 else "images"


def kernel_of(pipeline: Any) -> Kernel:
    return (
        DDIM(eta=1.0) if hasattr(pipeline.scheduler, "alphas_cumprod") else FlowSDE(noise_level=0.7)
    )


def pictures(count: int, seed: int) -> tuple[Any, ...]:
    """Images for a prompt, of a shape that depends on the seed."""
    generator = np.random.default_rng(seed)
    return tuple(
        generator.integers(0, 256, (64, 64 + 16 * seed, 3), np.uint8) for _ in range(count)
    )


def requests(family: Family, kernel: Kernel, guidance_scale: float) -> list[ImageRequest]:
    sampling = ImageSampling(
        num_inference_steps=_NUM_STEPS,
        guidance_scale=guidance_scale,
        kernel=kernel,
        size=family.size,
        window=family.window,
    )
    return [
        ImageRequest(
            request_id=prompt,
            prompt=prompt,
            images=pictures(family.num_images, seed),
            sampling=sampling,
            n=2,
            seed=3,
        )
        for seed, prompt in enumerate(("blue 1", "red 7"))
    ]


async def measured(
    family: Family,
    path: Path,
    guidance_scale: float,
    *,
    max_num_images: int = 64,
    device: str = "cpu",
) -> Measured:
    pipeline = family.make(path)
    scheduler = "DDIM" if hasattr(pipeline.scheduler, "alphas_cumprod") else "flow matching"
    settings: dict[str, Any] = {
        "options": family.options,
        "size": family.size,
        "component": family.component,
    }
    engine = DiffusersEngine(pipeline, max_num_images=max_num_images, device=device, **settings)
    given = requests(family, kernel_of(pipeline), guidance_scale)
    calls, steps = [], []
    model = getattr(pipeline, family.component or "transformer", None) or pipeline.unet
    model.register_forward_hook(lambda *_: calls.append(0))
    step = pipeline.scheduler.step
    pipeline.scheduler.step = lambda *args, **named: (steps.append(0), step(*args, **named))[1]
    samples = [sample async for sample in engine.generate(given)]
    await engine.close()
    return Measured(
        model=model,
        engine=engine,
        samples=sorted(samples, key=lambda s: (s.request_id, s.index)),
        # What is tried of several images has no guidance.
        calls_per_step=math.ceil(len(calls) / len(steps)),
        scheduler=scheduler,
    )


def denoiser_of(
    model: Any, lora: LoRAConfig | None = None, compute_dtype: torch.dtype = torch.float32
) -> Denoiser:
    """Return an engine's model in training."""
    return Denoiser(
        copy.deepcopy(model).requires_grad_(lora is None), lora=lora, compute_dtype=compute_dtype
    )


def in_training(made: ImageSample, index: int = 0) -> DiffusionSample:
    return training_sample(made, advantage=1.0 - 2.0 * (index % 2), noise_seed=index)


@torch.no_grad()
def ratios(denoiser: Denoiser, kernel: Kernel, samples: list[DiffusionSample]) -> torch.Tensor:
    """Return the ratios [K, B] of the trainer's density of each recorded step to the engine's."""
    found: list[torch.Tensor] = []
    for step in range(samples[0].num_steps):
        following, old_log_probs = stack_fields(
            samples, denoiser.device, "next_latents", "old_log_probs", step=step
        )
        drawn, _ = drawn_at(denoiser, kernel, samples, step)
        found.append(torch.exp(drawn.log_prob(following) - old_log_probs))
    return torch.stack(found)


def row(name: str, found: Measured, *, has_guidance: bool, deviation: float = 0.0) -> str:
    """Return the table's row of a family."""
    guidance = found.guidance if has_guidance else "none"
    return f"| {name} | works | {guidance} | {found.makes} | {found.scheduler} | {deviation:.0g} |"


def refused_row(name: str, error: EngineModelError) -> str:
    return f"| {name} | refused: {error} | | | | |"


async def row_of(name: str, path: Path) -> str:
    family = (FAMILIES | REFUSED)[name]
    try:
        found = [
            await measured(family, path / str(scale), scale) for scale in family.guidance_scales
        ]
    except EngineModelError as error:
        return refused_row(name, error)
    deviation = max(each.deviation for each in found)
    return row(name, found[-1], has_guidance=len(found) > 1, deviation=deviation)


async def main(names: Iterable[str]) -> None:
    print(HEADER)
    for name in names:
        with TemporaryDirectory() as path:
            print(await row_of(name, Path(path)), flush=True)


if __name__ == "__main__":
    logging.disable()
    warnings.simplefilter("ignore")
    asyncio.run(main(sys.argv[1:] or FAMILIES | REFUSED))
