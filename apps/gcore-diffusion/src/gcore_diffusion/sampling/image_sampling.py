"""Sampling and scoring of images: the roles, groups of those of one prompt, and held-out evaluation without noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, DeviceTimers, TrainerClient
from gcore_diffusion.config import NOISELESS, DiffusionConfig
from gcore_diffusion.sampling.prompts import ImagePrompt
from gcore_diffusion.sampling.services import ImageRewards, takes_latents
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

TRAINED = "val/score/mean"
"""Metric of evaluations: mean of the reward that is trained on."""
HELD_OUT = "val/held_out/mean"
"""Metric of evaluations: mean of a reward that is not trained on."""
DIVERSITY = "val/diversity"
"""Metric of evaluations: see `ImageEvaluation.diversity`."""
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
        tensors: dict[int, Any] = {}
        samples: list[Any] = []
        for sample in self.samples:
            fields = {**vars(sample), "trajectory": vars(sample.trajectory)}
            samples.append(with_tensors(fields, tensors))
        return {
            "ticket": self.prompt_index,
            "text": self.prompt.text,
            "row": dict(self.prompt.row),
            "images": [
                image if isinstance(image, bytes) else str(image) for image in self.prompt.images
            ],
            "scores": self.scores,
            "parts": [dict(parts) for parts in self.parts],
            "samples": samples,
            "ref_means": self.ref_means,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ImageGroup":
        """Return the group that `state` gave this state for."""
        arrays: dict[int, NDArray[Any]] = {}
        samples: list[ImageSample] = []
        for saved in state["samples"]:
            fields = with_arrays(saved, arrays)
            fields["trajectory"] = Trajectory(**fields["trajectory"])
            samples.append(ImageSample(**fields))
        images: list[bytes | Path | str] = []
        for image in state["images"]:
            is_path = isinstance(image, str) and "://" not in image
            images.append(Path(image) if is_path else image)
        ref_means = state["ref_means"]
        if ref_means is not None:
            ref_means = [np.asarray(means, np.float32) for means in ref_means]
        return cls(
            prompt_index=state["ticket"],
            prompt=ImagePrompt(text=state["text"], row=state["row"], images=tuple(images)),
            samples=samples,
            scores=np.asarray(state["scores"], np.float64),
            parts=state["parts"],
            ref_means=ref_means,
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
        indices: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            indices.setdefault(prompt, []).append(index)
        deviations = [(self.images[rows] / 255).std(0).mean() for rows in indices.values()]
        return float(np.mean(deviations))

    def metrics(self) -> dict[str, float]:
        """Return the means by their names in metrics.jsonl."""
        means = {TRAINED: float(self.scores.mean()), DIVERSITY: self.diversity(), **self.parts}
        if self.held_out is not None:
            means[HELD_OUT] = float(self.held_out.mean())
        return means

    def doubts(self, earlier: Sequence[Mapping[str, float]]) -> str | None:
        """Return the reason, in words, to doubt that a higher reward means better images; None: there is none.

        ``earlier`` are the metrics of earlier evaluations. The reward that is not trained on has fallen if it is lower
        than once before by three standard errors, and the images of a prompt have become alike if less than 70 % of
        the initial diversity is left.
        """
        now = self.metrics()
        first = earlier[0]
        reasons: list[str] = []
        if self.held_out is not None:
            best = max(earlier, key=lambda row: row[HELD_OUT])
            error = self.held_out.std() / len(self.held_out) ** 0.5
            if now[TRAINED] > best[TRAINED] and now[HELD_OUT] < best[HELD_OUT] - 3 * error:
                reasons.append(
                    f"the reward rose from {best[TRAINED]:.3g} at step {best['step']} to {now[TRAINED]:.3g}, while the "
                    f"reward that is not trained on fell from {best[HELD_OUT]:.3g} to {now[HELD_OUT]:.3g}"
                )
        if now[TRAINED] > first[TRAINED] and now[DIVERSITY] < KEPT_DIVERSITY * first[DIVERSITY]:
            reasons.append(
                f"the reward rose from {first[TRAINED]:.3g} to {now[TRAINED]:.3g}, while the images of a prompt became "
                f"alike: {now[DIVERSITY] / first[DIVERSITY]:.0%} of the initial diversity is left"
            )
        if not reasons:
            return None
        hint = "look at samples/; a larger actor.loss.kl-loss-coef, or another reward, keeps images closer to the start"
        return f"{', and '.join(reasons)}; {hint}"


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
    return config.algorithm.name not in (*NOISELESS, "opd")


def has_reference_pass(config: DiffusionConfig) -> bool:
    """Return whether the reference's means, or a teacher's, are needed before the first update of a step."""
    has_kl = bool(config.actor.loss.kl_loss_coef) and has_log_probs(config)
    return has_kl or config.algorithm.name == "opd"


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
        return (
            rollout.num_inference_steps - config.algorithm.reward_gradient_steps,
            rollout.num_inference_steps,
        )
    if config.algorithm.name == "opd" and rollout.kernel == "ode":
        # Steps without noise are recorded in windows alone.
        return (0, rollout.num_inference_steps)
    return rollout.range_of_window if rollout.window_size else None


def image_sampling(config: DiffusionConfig, *, step: int, prompt_index: int) -> ImageSampling:
    """Return how a prompt's images are sampled at a training step; the first step is 1."""
    rollout = config.rollout
    window = window_range(config)
    if window is not None and rollout.window_size:
        first, end = window
        num_windows = end - first - rollout.window_size + 1
        if rollout.window_steps:
            start = first + ((step - 1) // rollout.window_steps) % num_windows
        else:
            start = first + int(
                np.random.default_rng([config.seed, prompt_index]).integers(num_windows)
            )
        window = (start, start + rollout.window_size)
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
        num_inference_steps=num_inference_steps
        or rollout.eval_num_inference_steps
        or rollout.num_inference_steps,
        guidance_scale=guidance_scale or rollout.eval_guidance_scale or rollout.guidance_scale,
        size=rollout.image_size,
        negative_prompt=rollout.negative_prompt,
    )


def image_request(
    prompt: ImagePrompt, name: str, sampling: ImageSampling, *, n: int = 1, seed: int = 0
) -> ImageRequest:
    """Return a request for images of a prompt, with its own images."""
    return ImageRequest(
        request_id=name,
        prompt=prompt.text,
        images=prompt.pixels(),
        sampling=sampling,
        n=n,
        seed=seed,
    )


async def images(
    engine: Engine[ImageRequest, ImageSample], requests: Sequence[ImageRequest]
) -> list[ImageSample]:
    """Sample all images of some requests; return them in the requests' order."""
    order = {request.request_id: index for index, request in enumerate(requests)}
    samples = [sample async for sample in engine.generate(requests)]
    return sorted(samples, key=lambda sample: (order[sample.request_id], sample.index))


def inputs_of(reward: Callable[..., Any], samples: Sequence[ImageSample]) -> NDArray[Any]:
    """Return what a reward scores: images [B, H, W, 3] or videos [B, F, H, W, 3], or latents [B, ...]."""
    field_name = "latents" if takes_latents(reward) else "image"
    return np.stack([getattr(sample, field_name) for sample in samples])


async def score_images(
    ctx: Context[ImageRoles],
    reward: Callable[..., Any],
    samples: Sequence[ImageSample],
    prompts: Sequence[ImagePrompt],
) -> list[Scored]:
    """Score images of some prompts."""
    names: list[str] = []
    if not getattr(reward, "uses_engine", False):
        # The engines of a judge time their own work.
        names.append(f"reward {ctx.rank if ctx.roles.owns_process else 0}")
    inputs = inputs_of(reward, samples)
    with ctx.roles.devices.stage("reward", *names):
        return await evaluate_images(
            reward, inputs, [p.text for p in prompts], [p.row for p in prompts]
        )


async def evaluate(
    ctx: Context[ImageRoles], config: DiffusionConfig, prompts: Sequence[ImagePrompt]
) -> ImageEvaluation:
    """Sample and score held-out images, divided among the controllers; the result is the same on each of them."""
    rewards = ctx.roles.rewards
    n = config.rollout.eval_n
    sampling = evaluation_sampling(config)
    own_indices = range(ctx.rank, len(prompts), ctx.world_size)
    requests = [
        image_request(prompts[index], f"val/{index}", sampling, n=n, seed=index)
        for index in own_indices
    ]
    entries: list[tuple[int, NDArray[np.uint8], Scored, Scored]] = []
    if requests:
        with ctx.timer.stage("gen"):
            samples = await images(ctx.roles.policy, requests)
        indices = np.repeat(own_indices, n).tolist()
        repeated = [prompts[index] for index in indices]
        with ctx.timer.stage("reward"):
            scores = await score_images(ctx, rewards.trained, samples, repeated)
            held_out = scores
            if rewards.held_out is not None:
                held_out = await score_images(ctx, rewards.held_out, samples, repeated)
        entries = list(
            zip(indices, [sample.image for sample in samples], scores, held_out, strict=True)
        )
    entries = list(chain.from_iterable(await ctx.group.all_gather(entries)))
    entries.sort(key=lambda entry: entry[0])
    indices, pixels, scores, held_out = zip(*entries, strict=True)
    means = part_means(score.parts for score in scores)
    parts = {f"val/{name}": value for name, value in means.items()}
    held_out_scores = None
    if rewards.held_out is not None:
        held_out_scores = np.array([score.score for score in held_out])
        for name, value in part_means(score.parts for score in held_out).items():
            parts[name.replace("reward", "val/held_out", 1)] = value
    return ImageEvaluation(
        prompts=[prompts[index].text for index in indices],
        images=np.stack(pixels),
        scores=np.array([score.score for score in scores]),
        held_out=held_out_scores,
        parts=parts,
    )
