"""Sampling and scoring of images, and groups of those of one prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    Trajectory,
    evaluate_images,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt's images."""

    prompt_index: int
    """Position of the prompt in the global order, unique in the run."""
    prompt: Prompt
    samples: list[ImageSample]
    scores: NDArray[np.float64]
    """[n]."""
    ref_means: list[NDArray[np.float32]] | None = None
    """The reference's means of each image's recorded steps, [K, ...]; None: the algorithm does not need them."""

    @property
    def has_signal(self) -> bool:
        """True if the scores differ, so that something can be learned from them."""
        return bool(np.ptp(self.scores) > 0)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that generated an image."""
        return min(sample.weight_version for sample in self.samples)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        samples = [
            {
                **vars(s),
                "conditions": dict(s.conditions),
                "shared_conditions": dict(s.shared_conditions),
                "trajectory": dict(vars(s.trajectory)),
            }
            for s in self.samples
        ]
        return {
            "ticket": self.prompt_index,
            "text": self.prompt.text,
            "row": dict(self.prompt.row),
            "scores": self.scores,
            "samples": samples,
            "ref_means": self.ref_means,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """Return the group that `state` gave this state for."""
        samples: list[ImageSample] = []
        for saved in state["samples"]:
            fields: dict[str, Any] = {**saved, "trajectory": Trajectory(**saved["trajectory"])}
            samples.append(ImageSample(**fields))
        return cls(
            prompt_index=state["ticket"],
            prompt=Prompt(text=state["text"], row=state["row"]),
            samples=samples,
            scores=np.asarray(state["scores"], np.float64),
            ref_means=None if state["ref_means"] is None else [np.asarray(m, np.float32) for m in state["ref_means"]],
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
