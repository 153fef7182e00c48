"""Sampling and scoring of images: the roles, groups of those of one prompt, and held-out evaluation without noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, DeviceTimers, TrainerClient
from gcore_diffusion.config import NOISELESS, DiffusionConfig
from gcore_diffusion.sampling.prompts import ImagePrompt
from gcore_diffusion.sampling.services import ImageRewards
from gcore_diffusion.sampling.shared_arrays import with_arrays, with_tensors
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
    Scored,
    Trajectory,
    evaluate_images,
    part_means,
)
from gcore_trainer import DiffusionMicroBatch

TRAINED, HELD_OUT, DIVERSITY = "val/score/mean", "val/held_out/mean", "val/diversity"
"""Metrics of evaluations: mean of the reward trained on, mean of one that is not, and `ImageEvaluation.diversity`."""
KEPT_DIVERSITY = 0.7
"""Share of the initial diversity below which a run is warned about."""
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class ImageSamplingRoles:
    """The roles that sample and score images."""

    policy: Engine[ImageRequest, ImageSample]
    rewards: ImageRewards
    devices: DeviceTimers


@dataclass(frozen=True, kw_only=True)
class ImageRoles(ImageSamplingRoles):
    """The roles that a controller holds."""

    learner: TrainerClient[DiffusionMicroBatch]
    owns_process: bool = False
    """Whether only the controller computes in its process."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageGroup:
    """One prompt's images."""

    prompt_index: int
    """Position of the prompt in the global order, unique in the run."""
    prompt: ImagePrompt
    samples: list[ImageSample]
    scores: NDArray[np.float64]
    """[n]."""
    parts: list[Mapping[str, float]]
    """Numbers that the reward returned with each score; see `Scored`."""
    ref_means: list[NDArray[np.float32]] | None = None
    """The reference's means of each image's recorded steps, [K, ...]; None: the algorithm does not need them."""

    @property
    def has_signal(self) -> bool:
        """True if the scores differ, so that something can be learned from them."""
        return differ(self.scores)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that generated an image."""
        return min(sample.weight_version for sample in self.samples)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint; what images share is one tensor."""
        kept: dict[int, Any] = {}
        return {
            "ticket": self.prompt_index,
            "text": self.prompt.text,
            "row": dict(self.prompt.row),
            "images": [image if isinstance(image, bytes) else str(image) for image in self.prompt.images],
            "scores": self.scores,
            "parts": [dict(parts) for parts in self.parts],
            "samples": [with_tensors({**vars(s), "trajectory": vars(s.trajectory)}, kept) for s in self.samples],
            "ref_means": self.ref_means,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ImageGroup":
        """Return the group that `state` gave this state for."""
        known: dict[int, NDArray[Any]] = {}
        samples: list[dict[str, Any]] = [
            {**saved, "trajectory": Trajectory(**saved["trajectory"])}
            for saved in (with_arrays(sample, known) for sample in state["samples"])
        ]
        means = state["ref_means"]
        images = (Path(image) if isinstance(image, str) and "://" not in image else image for image in state["images"])
        return cls(
            prompt_index=state["ticket"],
            prompt=ImagePrompt(text=state["text"], row=state["row"], images=tuple(images)),
            samples=[ImageSample(**fields) for fields in samples],
            scores=np.asarray(state["scores"], np.float64),
            parts=state["parts"],
            ref_means=None if means is None else [np.asarray(m, np.float32) for m in means],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageEvaluation:
    """Images and scores of all held-out prompts, in their order."""

    prompts: list[str]
    """[P * n], each prompt n times."""
    images: NDArray[np.uint8]
    """[P * n, H, W, 3]."""
    scores: NDArray[np.float64]
    """[P * n], by the reward that is trained on."""
    held_out: NDArray[np.float64] | None
    """[P * n], by a reward that is not trained on."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Means of the rewards of sums, and of numbers that rewards returned, by their names in metrics.jsonl."""

    def diversity(self) -> float:
        """Return the standard deviation, from 0 to 1, of a pixel over the images of a prompt, on average."""
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            places.setdefault(prompt, []).append(place)
        return float(np.mean([(self.images[own] / 255).std(0).mean() for own in places.values()]))

    def metrics(self) -> dict[str, float]:
        """Return the means by their names in metrics.jsonl."""
        found = {TRAINED: float(self.scores.mean()), DIVERSITY: self.diversity(), **self.parts}
        if self.held_out is not None:
            found[HELD_OUT] = float(self.held_out.mean())
        return found

    def doubts(self, earlier: Sequence[Mapping[str, float]]) -> str | None:
        """Return the reason, in words, to doubt that a higher reward means better images; None: there is none.

        ``earlier`` are the metrics of earlier evaluations. The reward that is not trained on has fallen if it is lower
        than once before by three standard errors, and the images of a prompt have become alike if less than 70 % of
        the initial diversity is left.
        """
        now, first = self.metrics(), earlier[0]
        found: list[str] = []
        if self.held_out is not None:
            best, error = max(earlier, key=lambda row: row[HELD_OUT]), self.held_out.std() / len(self.held_out) ** 0.5
            if now[TRAINED] > best[TRAINED] and now[HELD_OUT] < best[HELD_OUT] - 3 * error:
                found.append(
                    f"the reward rose from {best[TRAINED]:.3g} at step {best['step']} to {now[TRAINED]:.3g}, while the "
                    f"reward that is not trained on fell from {best[HELD_OUT]:.3g} to {now[HELD_OUT]:.3g}"
                )
        if now[TRAINED] > first[TRAINED] and now[DIVERSITY] < KEPT_DIVERSITY * first[DIVERSITY]:
            found.append(
                f"the reward rose from {first[TRAINED]:.3g} to {now[TRAINED]:.3g}, while the images of a prompt became "
                f"alike: {now[DIVERSITY] / first[DIVERSITY]:.0%} of the initial diversity is left"
            )
        hint = "look at samples/; a larger actor.loss.kl-loss-coef, or another reward, keeps images closer to the start"
        return f"{', and '.join(found)}; {hint}" if found else None


def differ(scores: NDArray[np.float64]) -> bool:
    """Return whether scores differ by more than float32 rounds."""
    return bool(np.ptp(scores) > _ROUNDING * np.abs(scores).max())


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


def has_log_probs(config: DiffusionConfig) -> bool:
    """Return whether the algorithm trains on log-probabilities of the sampler's steps."""
    return config.algorithm.name not in NOISELESS


def has_reference_pass(config: DiffusionConfig) -> bool:
    """Return whether the reference's means are needed before the first update of a step."""
    return bool(config.actor.loss.kl_loss_coef) and has_log_probs(config)


def has_old_pass(config: DiffusionConfig) -> bool:
    """Return whether the trainer computes the old log-probs and means, before the first update of a step."""
    setting = config.algorithm.old_log_probs
    # Engines have weights of their type, the trainer has float32 ones: two in bfloat16 differ, too.
    is_rounded = (config.rollout.dtype, config.actor.dtype) != ("float32", "float32")
    return has_log_probs(config) and (setting == "trainer" or (setting == "auto" and is_rounded))


def window_range(config: DiffusionConfig) -> tuple[int, int] | None:
    """Return the first step that a window may have and the one after the last; None: all steps are recorded."""
    rollout = config.rollout
    if config.algorithm.name == "reward_gradient":
        return rollout.num_inference_steps - config.algorithm.reward_gradient_steps, rollout.num_inference_steps
    return rollout.range_of_window if rollout.window_size else None


def image_sampling(config: DiffusionConfig, *, step: int, prompt_index: int) -> ImageSampling:
    """Return how a prompt's images are sampled at a training step; the first step is 1."""
    rollout, window = config.rollout, window_range(config)
    if window is not None and config.algorithm.name != "reward_gradient":
        first, end = window
        places = end - first - rollout.window_size + 1
        if rollout.window_schedule == "sliding":
            place = ((step - 1) // rollout.window_steps) % places
        else:
            place = int(np.random.default_rng([config.seed, prompt_index]).integers(places))
        window = first + place, first + place + rollout.window_size
    return ImageSampling(
        num_inference_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        kernel=kernel_of(config),
        window=window,
        size=rollout.image_size,
        shared_noise=rollout.shared_noise,
        negative_prompt=rollout.negative_prompt,
    )


def evaluation_sampling(
    config: DiffusionConfig, *, num_inference_steps: int = 0, guidance_scale: float = 0.0
) -> ImageSampling:
    """Return how held-out images are sampled, without noise; steps and guidance of 0 are the evaluation's."""
    rollout = config.rollout
    return ImageSampling(
        num_inference_steps=num_inference_steps or rollout.eval_num_inference_steps or rollout.num_inference_steps,
        guidance_scale=guidance_scale or rollout.eval_guidance_scale or rollout.guidance_scale,
        size=rollout.image_size,
        negative_prompt=rollout.negative_prompt,
    )


def image_request(
    prompt: ImagePrompt, name: str, sampling: ImageSampling, *, n: int = 1, seed: int = 0
) -> ImageRequest:
    """Return a request for images of a prompt, with its own images."""
    return ImageRequest(request_id=name, prompt=prompt.text, images=prompt.pixels(), sampling=sampling, n=n, seed=seed)


async def images(engine: Engine[ImageRequest, ImageSample], requests: Sequence[ImageRequest]) -> list[ImageSample]:
    """Sample all images of some requests; return them in the requests' order."""
    order = {request.request_id: place for place, request in enumerate(requests)}
    found = [sample async for sample in engine.generate(requests)]
    return sorted(found, key=lambda s: (order[s.request_id], s.index))


def inputs_of(reward: Callable[..., Any], samples: Sequence[ImageSample]) -> NDArray[Any]:
    """Return what a reward scores: images [B, H, W, 3] or videos [B, F, H, W, 3], or latents [B, ...]."""
    if getattr(reward, "takes_latents", False):
        return np.stack([sample.latents for sample in samples])
    return np.stack([sample.image for sample in samples])


async def scored(
    ctx: Context[ImageRoles], reward: Callable[..., Any], samples: Sequence[ImageSample], prompts: Sequence[ImagePrompt]
) -> list[Scored]:
    """Score images of some prompts."""
    roles = ctx.roles
    # The engines of a judge time their own work.
    names = [] if getattr(reward, "uses_engine", False) else [f"reward {ctx.rank if roles.owns_process else 0}"]
    inputs = inputs_of(reward, samples)
    with roles.devices.stage("reward", *names):
        return await evaluate_images(reward, inputs, [p.text for p in prompts], [p.row for p in prompts])


async def evaluate(
    ctx: Context[ImageRoles], config: DiffusionConfig, prompts: Sequence[ImagePrompt]
) -> ImageEvaluation:
    """Sample and score held-out images, divided among the controllers; the result is the same on each of them."""
    rollout, rewards = config.rollout, ctx.roles.rewards
    sampling = evaluation_sampling(config)
    requests = [
        image_request(prompts[i], f"val/{i}", sampling, n=rollout.eval_n, seed=i)
        for i in range(ctx.rank, len(prompts), ctx.world_size)
    ]
    own: list[tuple[int, NDArray[np.uint8], Scored, Scored]] = []
    if requests:
        with ctx.timer.stage("gen"):
            samples = await images(ctx.roles.policy, requests)
        indices = [request.seed for request in requests for _ in range(rollout.eval_n)]
        repeated, pixels = [prompts[i] for i in indices], [sample.image for sample in samples]
        with ctx.timer.stage("reward"):
            scores = others = await scored(ctx, rewards.trained, samples, repeated)
            if rewards.held_out is not None:
                others = await scored(ctx, rewards.held_out, samples, repeated)
        own = list(zip(indices, pixels, scores, others, strict=True))
    everyones = sorted((entry for part in await ctx.group.all_gather(own) for entry in part), key=lambda e: e[0])
    indices, pixels, scores, others = zip(*everyones, strict=True)
    has_other = rewards.held_out is not None
    parts = part_means(one.parts for one in scores)
    of_other = part_means(one.parts for one in others) if has_other else {}
    return ImageEvaluation(
        prompts=[prompts[i].text for i in indices],
        images=np.stack(pixels),
        scores=np.array([one.score for one in scores]),
        held_out=np.array([one.score for one in others]) if has_other else None,
        parts={f"val/{name}": value for name, value in parts.items()}
        | {name.replace("reward", "val/held_out", 1): value for name, value in of_other.items()},
    )
