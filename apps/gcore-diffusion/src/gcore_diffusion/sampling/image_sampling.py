"""Sampling and scoring of images."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gcore_controller import Context
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.roles import Roles
from gcore_diffusion.sampling.prompts import Prompt
from gcore_rollout import (
    DDIM,
    DanceSDE,
    Engine,
    FlowCPS,
    FlowODE,
    FlowSDE,
    ImageRequest,
    ImageSample,
    ImageSampling,
    Kernel,
    evaluate_images,
)


def kernel_of(config: DiffusionConfig) -> Kernel:
    """Return the config's kernel, which engines and the trainer share."""
    level = config.rollout.noise_level
    match config.rollout.kernel:
        case "flow_sde":
            return FlowSDE(noise_level=level)
        case "dance_sde":
            return DanceSDE(noise_level=level)
        case "cps":
            return FlowCPS(noise_level=level)
        case "ddim":
            return DDIM(eta=level)
        case "ode":
            return FlowODE()


def has_reference_pass(config: DiffusionConfig) -> bool:
    """Return whether the reference's means are needed before the first update of a step."""
    return bool(config.actor.loss.kl_loss_coef) and config.algorithm.name not in ("nft", "dpo")


def image_sampling(config: DiffusionConfig, *, step: int, prompt_index: int) -> ImageSampling:
    """Return how a prompt's images are sampled at a training step."""
    rollout = config.rollout
    window: tuple[int, int] | None = None
    if config.algorithm.name == "reward_gradient":
        window = rollout.num_inference_steps - config.algorithm.reward_gradient_steps, rollout.num_inference_steps
    elif rollout.window_size:
        first, end = rollout.range_of_window
        places = end - first - rollout.window_size + 1
        if rollout.window_schedule == "sliding":
            place = (step // rollout.window_steps) % places
        else:
            place = int(np.random.default_rng([config.seed, prompt_index]).integers(places))
        window = first + place, first + place + rollout.window_size
    return ImageSampling(
        num_inference_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        kernel=kernel_of(config),
        window=window,
        size=rollout.size if rollout.size != (0, 0) else None,
    )


async def images(engine: "Engine[ImageRequest, ImageSample]", requests: Sequence[ImageRequest]) -> list[ImageSample]:
    """Sample all images of some requests; return them in the requests' order."""
    order = {request.request_id: place for place, request in enumerate(requests)}
    found = [sample async for sample in engine.generate(requests)]
    return sorted(found, key=lambda s: (order[s.request_id], s.index))


async def scored(
    ctx: Context[Roles], reward: Callable[..., Any], samples: Sequence[ImageSample], prompts: Sequence[Prompt]
) -> list[float]:
    """Score images of some prompts."""
    pixels, roles = np.stack([s.image for s in samples]), ctx.roles
    # The engines of a judge time their own work.
    names = [] if roles.rewards.is_judged else [f"reward {ctx.rank if roles.owns_process else 0}"]
    with roles.devices.stage("reward", *names):
        return await evaluate_images(reward, pixels, [p.text for p in prompts], [p.row for p in prompts])
