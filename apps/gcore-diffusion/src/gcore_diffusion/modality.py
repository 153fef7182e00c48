"""Image models as a modality of the RLHF loop: groups of images of a prompt, their scores, and updates."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, Generated, Modality, Prepared, State, TrainingBatch, Wave
from gcore_diffusion.config import FORWARD, GROUPED, DiffusionActorConfig, DiffusionConfig
from gcore_diffusion.sampling.image_sampling import (
    ImageEvaluation,
    ImageGroup,
    ImageRoles,
    differ,
    evaluate,
    has_old_pass,
    has_reference_pass,
    image_request,
    image_sampling,
    score_images,
)
from gcore_diffusion.sampling.prompts import ImagePrompt, ImagePromptSets
from gcore_diffusion.sampling.shared_arrays import share_conditions
from gcore_diffusion.sampling.shown_samples import samples_to_show
from gcore_rollout import ImageRequest, ImageSample, Scored, part_means, part_stds
from gcore_runs import RunJob
from gcore_trainer import DiffusionMicroBatch, DiffusionSample, grpo_advantages

_EPSILON = 1e-4
_MISMATCH = "training/rollout_ratio_dev"
"""Metric: mean distance from 1 of the ratio between trainer and sampler with the same weights."""
_TIES = "training/num_tied_pairs"
"""Metric: pairs of images of the same score, which dpo does not train on."""
_MODEL_INPUTS = (
    "conditions",
    "negative_conditions",
    "shared_conditions",
    "guidance_scale",
    "keeps_norm",
    "is_negated",
    "timestep_map",
)
"""Fields of an `ImageSample` that say how its model was called, as a `DiffusionSample` has them."""


@dataclass(frozen=True, kw_only=True)
class ImageJob(RunJob[DiffusionConfig]):
    """A run of the program: where it starts, and its prompts."""

    prompts: ImagePromptSets

    def modality(self) -> "ImageModality":
        return ImageModality(self)


class ImageModality(
    Modality[ImageRoles, ImagePrompt, ImageGroup, list[DiffusionMicroBatch], ImageEvaluation]
):
    """Groups of images of a prompt; an update is a list of micro-batches of images with their trajectories."""

    throughput_of = "perf/num_images"
    is_always_on_policy = True

    def __init__(self, job: ImageJob) -> None:
        self._job = job
        self._config = job.config
        self.saves_evaluated = job.config.trainer.export == "best"
        # Two for each step: the weights that are evaluated may be an average.
        self._version = 2 * job.first_step
        self._known: WeakValueDictionary[bytes, NDArray[Any]] = WeakValueDictionary()

    @property
    def prompts(self) -> Sequence[ImagePrompt]:
        return self._job.prompts.train

    async def generate(
        self, ctx: Context[ImageRoles], wave: Wave[ImagePrompt]
    ) -> Generated[ImageGroup]:
        """See `Modality.generate`; a group is scored as soon as its images are complete."""
        n = self._config.rollout.n
        prompts: dict[str, tuple[int, ImagePrompt]] = {}
        requests: list[ImageRequest] = []
        for index, prompt in wave.prompts:
            name = f"{wave.step}/{index}"
            prompts[name] = (index, prompt)
            sampling = image_sampling(self._config, step=wave.step, prompt_index=index)
            sampling = replace(sampling, decodes=ctx.roles.rewards.need_images)
            seed = self._config.seed * 1_000_003 + index
            requests.append(image_request(prompt, name, sampling, n=n, seed=seed))
        generated: dict[str, list[ImageSample]] = {name: [] for name in prompts}
        scoring: list[asyncio.Task[ImageGroup]] = []
        try:
            with ctx.timer.stage("gen"):
                async for sample in ctx.roles.policy.generate(requests):
                    samples = generated[sample.request_id]
                    samples.append(sample)
                    if len(samples) == n:
                        index, prompt = prompts[sample.request_id]
                        scoring.append(
                            asyncio.create_task(self._score_group(ctx, index, prompt, samples))
                        )
            with ctx.timer.stage("reward"):
                return Generated(groups=await asyncio.gather(*scoring))
        finally:
            for task in scoring:
                task.cancel()

    def group_from_state(self, state: State) -> ImageGroup:
        return ImageGroup.from_state(state)

    async def sampled_part(
        self, ctx: Context[ImageRoles], groups: Sequence[ImageGroup]
    ) -> tuple[list[Scored], list[float]]:
        """Return the scores with their parts, and those of one group by the held-out reward."""
        scores: list[Scored] = []
        for group in groups:
            for score, parts in zip(group.scores, group.parts, strict=True):
                scores.append(Scored(score=float(score), parts=parts))
        held_out = ctx.roles.rewards.held_out
        if held_out is None or not groups:
            return scores, []
        # The same one, whichever was complete first.
        group = min(groups, key=lambda g: g.prompt_index)
        held_out_scores = await score_images(
            ctx, held_out, group.samples, [group.prompt] * len(group.samples)
        )
        return scores, [one.score for one in held_out_scores]

    def sampled_metrics(
        self, parts: Sequence[tuple[list[Scored], list[float]]]
    ) -> dict[str, float]:
        scored: list[Scored] = []
        held_out: list[float] = []
        for trained_scores, held_out_scores in parts:
            scored += trained_scores
            held_out += held_out_scores
        scores = np.array([one.score for one in scored])
        score_parts = [one.parts for one in scored]
        metrics = {
            "perf/num_images": float(len(scores)),
            **part_means(score_parts),
            **part_stds(score_parts),
        }
        if len(scores):
            for name in ("mean", "max", "min", "std"):
                metrics[f"critic/score/{name}"] = float(getattr(scores, name)())
        if held_out:
            metrics["held_out/score/mean"] = float(np.mean(held_out))
        return metrics

    async def prepare(
        self, ctx: Context[ImageRoles], step: int, batch: TrainingBatch[ImageGroup]
    ) -> Prepared[list[DiffusionMicroBatch]]:
        config = self._config
        algorithm = config.algorithm.name
        scores_by_rank = await ctx.group.all_gather([group.scores for group in batch.groups])
        scores = list(chain.from_iterable(scores_by_rank))
        # Advantages and pairs compare the scores of a group; a gradient and a teacher need no differences.
        has_signal = any(map(differ, scores)) or algorithm in ("reward_gradient", "opd")
        samples = _prepare_samples(batch.groups, config, step, float(np.concatenate(scores).std()))
        metrics = {self.HAS_SIGNAL: float(has_signal)}
        # Images that stay together: of each prompt, or pairs.
        size = config.rollout.n if algorithm in GROUPED else 2
        num_own = sum(-(-len(group_samples) // size) for group_samples in samples)
        num_parts = await ctx.group.all_gather(num_own)
        if algorithm == "dpo":
            most_pairs = sum(len(group_scores) // 2 for group_scores in scores)
            metrics[_TIES] = float(most_pairs - sum(num_parts))
        updates = _divide_into_updates(
            samples, config.actor, ctx.roles.learner.num_replicas, num_parts, size=size
        )
        if has_reference_pass(config) and not ctx.roles.learner.can_score_alone:
            await _add_reference_pass(ctx, updates)
        if has_old_pass(config):
            metrics[_MISMATCH] = await _replace_old_pass(ctx, updates)
        # Pairs, differentiable rewards and teachers have no advantages.
        advantages: list[Any] = []
        for group_samples in samples:
            if algorithm in ("dpo", "opd", "reward_gradient"):
                advantages.append(None)
            else:
                advantages.append([sample.advantage for sample in group_samples])
        return Prepared(updates=updates, metrics=metrics, of_groups=advantages)

    async def update(
        self, ctx: Context[ImageRoles], step: int, update: list[DiffusionMicroBatch]
    ) -> dict[str, float]:
        del step
        return await ctx.roles.learner.train_step("actor", update)

    def update_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return the mean of each metric over the updates that had images."""
        updates = [metrics for metrics in updates if metrics]
        if not updates:
            return {}
        means = {
            name: sum(metrics[name] for metrics in updates) / len(updates) for name in updates[0]
        }
        if "actor/ratio_dev" in means and not has_old_pass(self._config):
            # The first update's images were generated by the weights that it changes: sampler and trainer differ by it.
            means[_MISMATCH] = updates[0]["actor/ratio_dev"]
        if self._config.algorithm.name == "reward_gradient":
            means[self.HAS_SIGNAL] = float(means["actor/grad_norm"] > 0)
        return means

    async def update_weights(
        self, ctx: Context[ImageRoles], step: int, *, averaged: bool = False
    ) -> None:
        del step
        self._version += 1
        await ctx.roles.learner.update_weights(
            ctx.roles.policy, version=self._version, averaged=averaged
        )

    def samples(
        self,
        ctx: Context[ImageRoles],
        step: int,
        batch: TrainingBatch[ImageGroup],
        prepared: Prepared[list[DiffusionMicroBatch]] | None,
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        del ctx
        trained: list[tuple[ImageGroup, Sequence[float] | None]] = []
        if prepared:
            trained = list(zip(batch.groups, prepared.of_groups, strict=True))
        return samples_to_show(trained, batch.filtered, step, self._config.trainer.log_samples)

    async def evaluate(self, ctx: Context[ImageRoles], step: int) -> ImageEvaluation | None:
        """See `Modality.evaluate`; the average of the weights is evaluated, if there is one."""
        if not self._job.prompts.val:
            return None
        has_average = bool(self._config.actor.ema_decay) and step > 0
        if has_average:
            await self.update_weights(ctx, step, averaged=True)
        evaluation = await evaluate(ctx, self._config, self._job.prompts.val)
        if has_average:
            await self.update_weights(ctx, step)
        return evaluation

    async def _score_group(
        self, ctx: Context[ImageRoles], index: int, prompt: ImagePrompt, samples: list[ImageSample]
    ) -> ImageGroup:
        """Score a group, and compute the reference's means of its images meanwhile, if it can be asked now."""
        samples = share_conditions(sorted(samples, key=lambda s: s.index), self._known)
        scoring = score_images(ctx, ctx.roles.rewards.trained, samples, [prompt] * len(samples))
        scored, ref_means = await asyncio.gather(scoring, self._ref_means(ctx, samples))
        return ImageGroup(
            prompt_index=index,
            prompt=prompt,
            samples=samples,
            scores=np.array([one.score for one in scored]),
            parts=[one.parts for one in scored],
            ref_means=ref_means,
        )

    async def _ref_means(
        self, ctx: Context[ImageRoles], samples: Sequence[ImageSample]
    ) -> list[NDArray[np.float32]] | None:
        if not (has_reference_pass(self._config) and ctx.roles.learner.can_score_alone):
            return None
        inputs = [training_sample(sample) for sample in samples]
        size = self._config.actor.micro_batch_size
        means: list[NDArray[np.float32]] = []
        for start in range(0, len(inputs), size):
            scores: list[tuple[NDArray[np.float32], NDArray[np.float32]]]
            scores = await ctx.roles.learner.score_alone("reference", inputs[start : start + size])
            means += [image_means for image_means, _ in scores]
        return means


def _prepare_samples(
    groups: Sequence[ImageGroup], config: DiffusionConfig, step: int, std: float
) -> list[list[DiffusionSample]]:
    """Return each group's images with their advantages; for dpo, pairs with the better image first.

    With norm_adv_by "global", ``std``, the standard deviation of all scores of the batch, divides them.
    """
    bound = config.algorithm.adv_clip_max
    is_global = config.algorithm.norm_adv_by == "global"
    samples_by_group: list[list[DiffusionSample]] = []
    for group in groups:
        if config.algorithm.name == "dpo":
            samples = _samples(group, [0.0] * len(group.samples), config, step)
            order = chain.from_iterable(preference_pairs(group.scores))
            samples_by_group.append([samples[index] for index in order])
            continue
        advantages = grpo_advantages(group.scores, norm_adv_by_std_in_grpo=not is_global)
        if is_global:
            advantages = advantages / (std + _EPSILON)
        samples_by_group.append(
            _samples(group, np.clip(advantages, -bound, bound).tolist(), config, step)
        )
    return samples_by_group


def preference_pairs(scores: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pair the best image of a group with the worst, the second best with the second worst, and so on.

    Images of the same score are no pair: neither is preferred.

    Args:
        scores: [n] of the group's images.

    Returns:
        the indices of the chosen and the rejected image of each pair.
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    pairs: list[tuple[int, int]] = []
    for rank in range(len(order) // 2):
        chosen = order[rank]
        rejected = order[-1 - rank]
        if differ(scores[[chosen, rejected]]):
            pairs.append((chosen, rejected))
    return pairs


def _samples(
    group: ImageGroup, advantages: Sequence[float], config: DiffusionConfig, step: int
) -> list[DiffusionSample]:
    is_of_steps = config.algorithm.name not in FORWARD
    ref_means: Sequence[NDArray[np.float32] | None] = [None] * len(group.samples)
    if is_of_steps and group.ref_means:
        ref_means = group.ref_means
    samples: list[DiffusionSample] = []
    for image, advantage, means in zip(group.samples, advantages, ref_means, strict=True):
        sample = training_sample(
            image,
            has_steps=is_of_steps,
            advantage=float(advantage),
            ref_means=means,
            noise_seed=(config.seed * 1_000_003 + group.prompt_index) * 4096 + image.index,
            prompt=group.prompt.text,
        )
        samples.append(sample)
    fraction = config.algorithm.timestep_fraction
    # It is 1 for algorithms of no recorded steps, or of all.
    if fraction == 1:
        return samples
    num_steps = samples[0].num_steps
    count = max(1, round(fraction * num_steps))
    # The same for all images of a batch, so that each pass is over one number of steps.
    chosen = np.random.default_rng([config.seed, step]).permutation(num_steps)[:count]
    return [sample.at_steps(chosen.tolist()) for sample in samples]


def training_sample(
    image: ImageSample, *, has_steps: bool = True, **fields: Any
) -> DiffusionSample:
    """Return an engine's image as the trainer takes it, with the recorded steps if it needs them."""
    if has_steps:
        for name in ("latents", "next_latents", "levels", "next_levels", "timesteps"):
            fields[name] = getattr(image.trajectory, name)
        fields["old_means"] = image.trajectory.means
        fields["old_log_probs"] = image.trajectory.log_probs
    for name in _MODEL_INPUTS:
        fields[name] = getattr(image, name)
    return DiffusionSample(clean_latents=image.latents, **fields)


async def _add_reference_pass(
    ctx: Context[ImageRoles], updates: list[list[DiffusionMicroBatch]]
) -> None:
    """Add the reference's means, which all controllers ask all ranks for."""
    scores = await _score_updates(ctx, "reference", updates)
    for update in updates:
        for batch in update:
            pairs = zip(batch, next(scores), strict=True)
            batch[:] = [replace(sample, ref_means=means) for sample, (means, _) in pairs]


async def _replace_old_pass(
    ctx: Context[ImageRoles], updates: list[list[DiffusionMicroBatch]]
) -> float:
    """Replace the sampler's log-probs and means by the trainer's; return how far the ratios of the two are from 1.

    The micro-batches that are scored are those of the updates, so that the passes are alike to the bit.
    """
    scores = await _score_updates(ctx, "actor", updates)
    # An array of no ratios, for a controller without images.
    distances: list[NDArray[np.floating]] = [np.zeros(0)]
    for update in updates:
        for batch in update:
            rescored: list[DiffusionSample] = []
            for sample, (means, log_probs) in zip(batch, next(scores), strict=True):
                assert sample.old_log_probs is not None
                distances.append(np.abs(np.expm1(log_probs - sample.old_log_probs)))
                rescored.append(replace(sample, old_log_probs=log_probs, old_means=means))
            batch[:] = rescored
    all_distances = await ctx.group.all_gather(np.concatenate(distances))
    return float(np.concatenate(all_distances).mean())


async def _score_updates(
    ctx: Context[ImageRoles], role: str, updates: Sequence[Sequence[DiffusionMicroBatch]]
) -> Iterator[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]:
    """Return means and log-probabilities of each micro-batch of the updates, in their order."""
    batches = list(chain.from_iterable(updates))
    return iter(await ctx.roles.learner.score(role, batches))


def _divide_into_updates(
    groups: Sequence[Sequence[DiffusionSample]],
    config: DiffusionActorConfig,
    num_replicas: int,
    num_parts: Sequence[int],
    *,
    size: int = 2,
) -> list[list[list[DiffusionSample]]]:
    """Return the micro-batches of each update of a step, as few as divide evenly among the replicas.

    Parts of ``size`` images of a group, which stay together, go to updates in turn, which spreads groups. The
    controllers, whose numbers of parts are ``num_parts``, together make a multiple of ``num_replicas``. If an update
    has fewer parts than there are replicas, each replica gets all of them, which is the same update.
    """
    shares: list[list[DiffusionSample]] = [[] for _ in range(config.num_updates)]
    turns = cycle(shares)
    for group in groups:
        for start in range(0, len(group), size):
            next(turns).extend(group[start : start + size])
    updates: list[list[list[DiffusionSample]]] = []
    for index, share in enumerate(shares):
        length = size
        num_in_update = sum(len(range(index, count, config.num_updates)) for count in num_parts)
        if num_in_update < num_replicas:
            share = share * num_replicas
        else:
            num_batches = num_replicas // math.gcd(
                num_replicas, sum(count > index for count in num_parts)
            )
            limit = min(config.micro_batch_size, size * (-(-len(share) // size) // num_batches))
            length = max(size, limit - limit % size)
        updates.append([share[start : start + length] for start in range(0, len(share), length)])
    return updates
