"""Image models as a modality of the RLHF loop: groups of images of a prompt, their scores, and updates."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, Generated, Modality, Prepared, State, TrainingBatch, Wave
from gcore_diffusion.config import ActorConfig, DiffusionConfig
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
    scored,
)
from gcore_diffusion.sampling.prompts import ImagePrompt, ImagePromptSets
from gcore_diffusion.sampling.shared_arrays import share_conditions
from gcore_diffusion.sampling.shown_samples import samples_to_show
from gcore_rollout import ImageSample, Scored, part_means, part_stds
from gcore_runs import RunJob
from gcore_trainer import DiffusionMicroBatch, DiffusionSample, StepScores, grpo_advantages

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


class ImageModality(Modality[ImageRoles, ImagePrompt, ImageGroup, list[DiffusionMicroBatch], ImageEvaluation]):
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

    async def generate(self, ctx: Context[ImageRoles], wave: Wave[ImagePrompt]) -> Generated[ImageGroup]:
        """See `Modality.generate`; a group is scored as soon as its images are complete."""
        prompts = {f"{wave.step}/{index}": (index, prompt) for index, prompt in wave.prompts}
        requests = [
            image_request(
                prompt,
                name,
                image_sampling(self._config, step=wave.step, prompt_index=index),
                n=self._config.rollout.n,
                seed=self._config.seed * 1_000_003 + index,
            )
            for name, (index, prompt) in prompts.items()
        ]
        generated: dict[str, list[ImageSample]] = {name: [] for name in prompts}
        scoring: list[asyncio.Task[ImageGroup]] = []
        try:
            with ctx.timer.stage("gen"):
                async for sample in ctx.roles.policy.generate(requests):
                    (samples := generated[sample.request_id]).append(sample)
                    if len(samples) == self._config.rollout.n:
                        scoring.append(asyncio.create_task(self._scored(ctx, *prompts[sample.request_id], samples)))
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
        own = [
            Scored(score=float(score), parts=parts)
            for g in groups
            for score, parts in zip(g.scores, g.parts, strict=True)
        ]
        held_out = ctx.roles.rewards.held_out
        if held_out is None or not groups:
            return own, []
        # The same one, whichever was complete first.
        group = min(groups, key=lambda g: g.prompt_index)
        found = await scored(ctx, held_out, group.samples, [group.prompt] * len(group.samples))
        return own, [one.score for one in found]

    def sampled_metrics(self, parts: Sequence[tuple[list[Scored], list[float]]]) -> dict[str, float]:
        everything = [one for own, _ in parts for one in own]
        scores = np.array([one.score for one in everything])
        explained = [one.parts for one in everything]
        metrics = {"perf/num_images": float(len(scores)), **part_means(explained), **part_stds(explained)}
        if len(scores):
            statistics = ("mean", "max", "min", "std")
            metrics |= {f"critic/score/{name}": float(getattr(scores, name)()) for name in statistics}
        if seen := [score for _, own in parts for score in own]:
            metrics["held_out/score/mean"] = float(np.mean(seen))
        return metrics

    async def prepare(
        self, ctx: Context[ImageRoles], step: int, batch: TrainingBatch[ImageGroup]
    ) -> Prepared[list[DiffusionMicroBatch]]:
        config, groups = self._config, batch.groups
        everyones = await ctx.group.all_gather([g.scores for g in groups])
        scores = [s for part in everyones for s in part]
        # Advantages and pairs compare the scores of a group; a differentiable reward needs no differences.
        has_signal = any(map(differ, scores)) or config.algorithm.name == "reward_gradient"
        prepared = _prepared(groups, config, step, float(np.concatenate(scores).std()))
        metrics = {self.HAS_SIGNAL: float(has_signal)}
        num_pairs = [sum(-(-len(s) // 2) for s in part) for part in everyones]
        if config.algorithm.name == "dpo":
            num_pairs = [sum(len(preference_pairs(s)) for s in part) for part in everyones]
            metrics[_TIES] = float(sum(len(s) // 2 for s in scores) - sum(num_pairs))
        updates = _updates(prepared, config.actor, ctx.roles.learner.num_replicas, num_pairs)
        if has_reference_pass(config) and not ctx.roles.learner.can_score_alone:
            updates = await _with_reference_pass(ctx, updates)
        if has_old_pass(config):
            updates, metrics[_MISMATCH] = await _with_old_pass(ctx, updates)
        # Pairs, and differentiable rewards, have none.
        has_advantages = config.algorithm.name not in ("dpo", "reward_gradient")
        of_groups = [[sample.advantage for sample in own] if has_advantages else None for own in prepared]
        return Prepared(updates=updates, metrics=metrics, of_groups=of_groups)

    async def update(self, ctx: Context[ImageRoles], step: int, update: list[DiffusionMicroBatch]) -> dict[str, float]:
        del step
        return await ctx.roles.learner.train_step("actor", update)

    def update_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return the mean of each metric over the updates that had images."""
        found = [metrics for metrics in updates if metrics]
        means = {name: sum(m[name] for m in found) / len(found) for name in (found[0] if found else {})}
        if "actor/ratio_dev" in means and not has_old_pass(self._config):
            # The first update's images were generated by the weights that it changes: sampler and trainer differ by it.
            means[_MISMATCH] = found[0]["actor/ratio_dev"]
        if self._config.algorithm.name == "reward_gradient" and means:
            means[self.HAS_SIGNAL] = float(means["actor/grad_norm"] > 0)
        return means

    async def update_weights(self, ctx: Context[ImageRoles], step: int, *, averaged: bool = False) -> None:
        del step
        self._version += 1
        await ctx.roles.learner.update_weights(ctx.roles.policy, version=self._version, averaged=averaged)

    def samples(
        self,
        ctx: Context[ImageRoles],
        step: int,
        batch: TrainingBatch[ImageGroup],
        prepared: Prepared[list[DiffusionMicroBatch]] | None,
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        del ctx
        trained = list(zip(batch.groups, prepared.of_groups, strict=True)) if prepared else []
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

    async def _scored(
        self, ctx: Context[ImageRoles], index: int, prompt: ImagePrompt, samples: list[ImageSample]
    ) -> ImageGroup:
        """Score a group, and compute the reference's means of its images meanwhile, if it can be asked now."""
        samples = share_conditions(sorted(samples, key=lambda s: s.index), self._known)
        scoring = scored(ctx, ctx.roles.rewards.trained, samples, [prompt] * len(samples))
        found, ref_means = await asyncio.gather(scoring, self._ref_means(ctx, samples))
        return ImageGroup(
            prompt_index=index,
            prompt=prompt,
            samples=samples,
            scores=np.array([one.score for one in found]),
            parts=[one.parts for one in found],
            ref_means=ref_means,
        )

    async def _ref_means(
        self, ctx: Context[ImageRoles], samples: Sequence[ImageSample]
    ) -> list[NDArray[np.float32]] | None:
        if not (has_reference_pass(self._config) and ctx.roles.learner.can_score_alone):
            return None
        inputs, size = [training_sample(sample) for sample in samples], self._config.actor.micro_batch_size
        found: list[NDArray[np.float32]] = []
        for start in range(0, len(inputs), size):
            scores: list[StepScores] = await ctx.roles.learner.score_alone("reference", inputs[start : start + size])
            found += [score.means for score in scores]
        return found


def _prepared(
    groups: Sequence[ImageGroup], config: DiffusionConfig, step: int, std: float
) -> list[list[DiffusionSample]]:
    """Return each group's images with their advantages; for dpo, pairs with the better image first.

    With norm_adv_by "global", ``std``, the standard deviation of all scores of the batch, divides them.
    """
    bound, is_global = config.algorithm.adv_clip_max, config.algorithm.norm_adv_by == "global"
    found: list[list[DiffusionSample]] = []
    for group in groups:
        if config.algorithm.name == "dpo":
            samples = _samples(group, [0.0] * len(group.samples), config, step)
            found.append([samples[place] for pair in preference_pairs(group.scores) for place in pair])
            continue
        advantages = grpo_advantages(group.scores, norm_adv_by_std_in_grpo=not is_global)
        if is_global:
            advantages = advantages / (std + _EPSILON)
        found.append(_samples(group, np.clip(advantages, -bound, bound).tolist(), config, step))
    return found


def preference_pairs(scores: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pair the best image of a group with the worst, the second best with the second worst, and so on.

    Images of the same score are no pair: neither is preferred.

    Args:
        scores: [n] of the group's images.

    Returns:
        the places of the chosen and the rejected image of each pair.
    """
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
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
    is_of_steps = config.algorithm.name not in ("nft", "dpo")
    ref_means = group.ref_means if is_of_steps and group.ref_means else [None] * len(group.samples)
    samples = [
        training_sample(
            made,
            has_steps=is_of_steps,
            advantage=float(advantage),
            ref_means=means,
            noise_seed=(config.seed * 1_000_003 + group.prompt_index) * 4096 + made.index,
            prompt=group.prompt.text,
        )
        for made, advantage, means in zip(group.samples, advantages, ref_means, strict=True)
    ]
    fraction = config.algorithm.timestep_fraction
    if not is_of_steps or fraction == 1 or config.algorithm.name == "reward_gradient":
        return samples
    num_steps = samples[0].num_steps
    count = max(1, round(fraction * num_steps))
    # The same for all images of a batch, so that each pass is over one number of steps.
    chosen = np.random.default_rng([config.seed, step]).permutation(num_steps)[:count]
    return [sample.at_steps(chosen.tolist()) for sample in samples]


def training_sample(made: ImageSample, *, has_steps: bool = True, **fields: Any) -> DiffusionSample:
    """Return an engine's image as the trainer takes it, with the recorded steps if it needs them."""
    t = made.trajectory
    if has_steps:
        fields |= {name: getattr(t, name) for name in ("latents", "next_latents", "levels", "next_levels", "timesteps")}
        fields |= {"old_means": t.means, "old_log_probs": t.log_probs}
    fields |= {name: getattr(made, name) for name in _MODEL_INPUTS}
    return DiffusionSample(clean_latents=made.latents, **fields)


async def _with_reference_pass(
    ctx: Context[ImageRoles], updates: Sequence[Sequence[DiffusionMicroBatch]]
) -> list[list[DiffusionMicroBatch]]:
    """Add the reference's means, which all controllers ask all ranks for."""
    scores: list[list[StepScores]] = await ctx.roles.learner.score("reference", list(chain(*updates)))
    remaining = iter(chain(*scores))
    return [[[replace(s, ref_means=next(remaining).means) for s in batch] for batch in update] for update in updates]


async def _with_old_pass(
    ctx: Context[ImageRoles], updates: Sequence[Sequence[DiffusionMicroBatch]]
) -> tuple[list[list[DiffusionMicroBatch]], float]:
    """Replace the sampler's log-probs and means by the trainer's; return also how far the ratios of the two are from 1.

    The micro-batches that are scored are those of the updates, so that the passes are alike to the bit.
    """
    scores: list[list[StepScores]] = await ctx.roles.learner.score("actor", list(chain(*updates)))
    remaining = iter(chain(*scores))
    sampled: list[NDArray[np.float32]] = []

    def rescored(sample: DiffusionSample) -> DiffusionSample:
        assert sample.old_log_probs is not None
        found = next(remaining)
        sampled.append(np.abs(np.expm1(found.log_probs - sample.old_log_probs)))
        return replace(sample, old_log_probs=found.log_probs, old_means=found.means)

    found = [[[rescored(sample) for sample in batch] for batch in update] for update in updates]
    everyones = await ctx.group.all_gather(np.concatenate([*sampled, np.zeros(0)]))
    return found, float(np.concatenate(everyones).mean())


def _updates(
    groups: Sequence[Sequence[DiffusionSample]], config: ActorConfig, num_replicas: int, num_pairs: Sequence[int]
) -> list[list[list[DiffusionSample]]]:
    """Return the micro-batches of each update of a step, as few as divide evenly among the replicas.

    Pairs of images go to updates in turn, which spreads groups. The controllers, whose numbers of pairs are
    ``num_pairs``, together make a multiple of ``num_replicas``. If an update has fewer pairs than there are replicas,
    each replica gets all of them, which is the same update.
    """
    shares: list[list[DiffusionSample]] = [[] for _ in range(config.num_updates)]
    pairs = [group[i : i + 2] for group in groups for i in range(0, len(group), 2)]
    for place, pair in enumerate(pairs):
        shares[place % config.num_updates] += pair
    found: list[list[list[DiffusionSample]]] = []
    for update, share in enumerate(shares):
        num_in_update = sum(len(range(update, count, config.num_updates)) for count in num_pairs)
        if num_in_update < num_replicas:
            repeated = share * num_replicas
            found.append([repeated[i : i + 2] for i in range(0, len(repeated), 2)])
            continue
        num_parts = num_replicas // math.gcd(num_replicas, sum(count > update for count in num_pairs))
        most = min(config.micro_batch_size, 2 * (-(-len(share) // 2) // num_parts))
        size = max(2, most - most % 2)
        found.append([share[i : i + size] for i in range(0, len(share), size)])
    return found
