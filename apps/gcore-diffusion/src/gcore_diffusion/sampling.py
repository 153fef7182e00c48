"""The half of a controller that makes batches: images, and their scores."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives, Context, DynamicSampler, Harvest
from gcore_controller.prompts import PromptLoader
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.groups import Group
from gcore_diffusion.preparation import training_sample
from gcore_diffusion.prompts import Prompt, PromptSets
from gcore_diffusion.roles import Roles
from gcore_rollout import Engine
from gcore_rollout.diffusion import (
    DDIM,
    DanceSDE,
    FlowCPS,
    FlowODE,
    FlowSDE,
    ImageRequest,
    ImageSample,
    ImageSampling,
    Kernel,
)
from gcore_rollout.image_rewards import evaluate_images
from gcore_runs.learning_signal import SIGNAL

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step trains on."""

    share: list[Group]
    """This controller's groups, as many as any other's, or one more."""
    groups_of_all: int
    metrics: dict[str, float]
    std: float
    """Standard deviation of all scores of the batch."""
    state: State
    """Of the sampling, behind it."""


def kernel_of(config: DiffusionConfig) -> Kernel:
    """The config's, as it is handed to engines and to the training."""
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
    """Whether the reference's means are needed before the first update of a step."""
    return bool(config.actor.loss.kl_loss_coef) and config.algorithm.name not in ("nft", "dpo")


def image_sampling(config: DiffusionConfig, *, step: int, ticket: int) -> ImageSampling:
    """How a prompt's images are made at a training step."""
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
            place = int(np.random.default_rng([config.seed, ticket]).integers(places))
        window = first + place, first + place + rollout.window_size
    return ImageSampling(
        num_inference_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        kernel=kernel_of(config),
        window=window,
        size=rollout.size if rollout.size != (0, 0) else None,
    )


class Sampling:
    """Makes one batch after another; all controllers do so together."""

    def __init__(self, ctx: Context[Roles], config: DiffusionConfig, prompts: PromptSets, state: State | None) -> None:
        self._ctx = ctx
        self._config = config
        self._loader: PromptLoader[Prompt] = PromptLoader(
            prompts.train, seed=config.data.shuffle_seed, rank=ctx.rank, world_size=ctx.world_size, timer=ctx.timer
        )
        waves = config.algorithm.max_num_gen_batches if config.algorithm.filter_groups else 1
        self._sampler: DynamicSampler[Group] = DynamicSampler(group=ctx.group, max_waves=waves)
        self._wave_groups: list[Group] = []
        self._step = 0
        if state is not None:
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], Group.from_state)
            # Checkpoints of earlier releases hold groups by weights that are not the present ones any more.
            self._sampler.surplus = []

    async def next(self, step: int) -> Batch:
        """Sample until the step has its groups, and give every controller an even share of them.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        self._step, self._wave_groups = step, []
        harvest = await self._sampler.harvest(self._config.data.train_batch_size, self._sample_wave)
        self._check_versions(harvest.groups)
        # The next step has other weights.
        num_stale, self._sampler.surplus = len(self._sampler.surplus), []
        share = await exchange(harvest.groups, self._ctx.group)
        scores = [s for part in await self._ctx.group.all_gather([g.scores for g in share]) for s in part]
        # Advantages, and pairs of better and worse images, are of a group's own scores; a gradient needs none.
        differ = any(np.ptp(s) > 0 for s in scores)
        has_signal = bool(scores) and (differ or self._config.algorithm.name == "reward_gradient")
        return Batch(
            share=share,
            groups_of_all=harvest.num_groups,
            metrics=await self._metrics(harvest, num_stale) | {SIGNAL: float(has_signal)},
            std=float(np.concatenate(scores).std()) if scores else 0.0,
            state={"loader": self._loader.state(), "sampler": self._sampler.state(Group.state)},
        )

    async def _sample_wave(self, count: int) -> list[Group]:
        """A group is scored as soon as its images are there, while those of others are made."""
        prompts = {f"{self._step}/{ticket}": (ticket, prompt) for ticket, prompt in self._loader.take(count)}
        made: dict[str, list[ImageSample]] = {name: [] for name in prompts}
        scoring: list[asyncio.Task[Group]] = []
        try:
            with self._ctx.timer.stage("gen"):
                async for sample in self._ctx.roles.policy.generate([self._request(n, *p) for n, p in prompts.items()]):
                    (samples := made[sample.request_id]).append(sample)
                    if len(samples) == self._config.rollout.n:
                        scoring.append(asyncio.create_task(self._scored(*prompts[sample.request_id], samples)))
            with self._ctx.timer.stage("reward"):
                groups = await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()
        self._wave_groups += groups
        return [g for g in groups if g.has_signal] if self._config.algorithm.filter_groups else groups

    def _request(self, name: str, ticket: int, prompt: Prompt) -> ImageRequest:
        return ImageRequest(
            request_id=name,
            prompt=prompt.text,
            sampling=image_sampling(self._config, step=self._step, ticket=ticket),
            n=self._config.rollout.n,
            seed=self._config.seed * 1_000_003 + ticket,
        )

    async def _scored(self, ticket: int, prompt: Prompt, samples: list[ImageSample]) -> Group:
        """While the reward is waited for, the reference passes over the images."""
        ctx, samples = self._ctx, sorted(samples, key=lambda s: s.index)
        scoring = scored(ctx, ctx.roles.rewards.trained, samples, [prompt] * len(samples))
        scores, ref_means = await asyncio.gather(scoring, self._ref_means(samples))
        return Group(ticket=ticket, prompt=prompt, samples=samples, scores=np.array(scores), ref_means=ref_means)

    async def _ref_means(self, samples: list[ImageSample]) -> list[NDArray[np.float32]] | None:
        if not has_reference_pass(self._config):
            return None
        told, size = [training_sample(made) for made in samples], self._config.actor.micro_batch_size
        found: list[NDArray[np.float32]] = []
        for start in range(0, len(told), size):
            found += await self._ctx.roles.learner.score_alone("reference", told[start : start + size])
        return found

    def _check_versions(self, groups: list[Group]) -> None:
        present = self._ctx.roles.policy.weight_version
        for group in groups:
            versions = sorted({s.weight_version for s in group.samples})
            if versions != [present]:
                raise RuntimeError(
                    f"images of prompt {group.ticket} are by weights of versions {versions}; expected version "
                    f"{present}, the present one, alone"
                )

    async def _metrics(self, harvest: Harvest[Group], num_stale: int) -> dict[str, float]:
        """What was sampled for this batch, over all controllers, kept or not."""
        own = [float(score) for g in self._wave_groups for score in g.scores]
        held_out = self._ctx.roles.rewards.held_out
        others: list[float] = []
        if held_out is not None:
            for g in self._wave_groups[:1]:
                others += await scored(self._ctx, held_out, g.samples, [g.prompt] * len(g.samples))
        everyones = await self._ctx.group.all_gather((own, others, num_stale))
        scores = np.array([score for mine, *_ in everyones for score in mine])
        metrics = {
            "sampling/waves": float(harvest.num_waves),
            "sampling/acceptance": harvest.num_kept / max(harvest.num_sampled, 1),
            "sampling/groups": float(harvest.num_groups),
            "sampling/stale_groups": float(sum(stale for *_, stale in everyones)),
            "sampling/epoch": self._loader.epoch,
            "perf/num_images": float(len(scores)),
        }
        if len(scores):
            metrics |= {
                "critic/score/mean": float(scores.mean()),
                "critic/score/max": float(scores.max()),
                "critic/score/min": float(scores.min()),
                "critic/score/std": float(scores.std()),
            }
        if seen := [score for _, mine, _ in everyones for score in mine]:
            metrics["held_out/score/mean"] = float(np.mean(seen))
        return metrics


async def images(engine: "Engine[ImageRequest, ImageSample]", requests: Sequence[ImageRequest]) -> list[ImageSample]:
    """All images of some requests, in their order."""
    order = {request.request_id: place for place, request in enumerate(requests)}
    found = [sample async for sample in engine.generate(requests)]
    return sorted(found, key=lambda s: (order[s.request_id], s.index))


async def scored(
    ctx: Context[Roles], reward: Callable[..., Any], samples: Sequence[ImageSample], prompts: Sequence[Prompt]
) -> list[float]:
    """Scores of images."""
    pixels, roles = np.stack([s.image for s in samples]), ctx.roles
    # The engines of a judge note their own work.
    names = [] if roles.rewards.is_judged else [f"reward {ctx.rank if roles.owns_process else 0}"]
    with roles.devices.stage("reward", *names):
        return await evaluate_images(reward, pixels, [p.text for p in prompts], [p.row for p in prompts])


async def exchange(groups: Sequence[Group], group: Collectives) -> list[Group]:
    """Spread all controllers' groups evenly; only those that change hands move.

    Returns:
        this controller's new share, by ticket.
    """
    everyones = sorted(t for part in await group.all_gather([g.ticket for g in groups]) for t in part)
    owner = {ticket: place % group.world_size for place, ticket in enumerate(everyones)}
    outgoing: list[list[Group]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owner[entry.ticket]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted((g for part in incoming for g in part), key=lambda g: g.ticket)
