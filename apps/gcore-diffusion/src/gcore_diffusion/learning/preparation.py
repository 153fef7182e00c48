"""Advantages of groups of images, and their division into updates and micro-batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.sampling.image_sampling import Group
from gcore_rollout import ImageSample
from gcore_trainer import DiffusionSample, grpo_advantages

_EPSILON = 1e-4


def prepared(groups: Sequence[Group], config: DiffusionConfig, *, step: int, std: float) -> list[list[DiffusionSample]]:
    """Return each group's images with their advantages; for dpo, pairs with the better image first.

    Args:
        groups: of this controller.
        config: the run's.
        step: of the training, from which the trained steps of a trajectory are drawn.
        std: standard deviation of all scores of the batch, which divides them with norm_adv_by "global".
    """
    bound = config.algorithm.adv_clip_max
    found: list[list[DiffusionSample]] = []
    for group in groups:
        is_global = config.algorithm.norm_adv_by == "global"
        advantages = grpo_advantages(group.scores, norm_adv_by_std_in_grpo=not is_global)
        if is_global:
            advantages = advantages / (std + _EPSILON)
        samples = _samples(group, np.clip(advantages, -bound, bound).tolist(), config, step)
        found.append(_pairs(samples, group.scores.tolist()) if config.algorithm.name == "dpo" else samples)
    return found


def training_sample(made: ImageSample, *, has_steps: bool = True, **fields: Any) -> DiffusionSample:
    """Return an image as the trainer takes it.

    Args:
        made: the engine's sample.
        has_steps: whether the recorded steps are part of it.
        fields: further fields.
    """
    t = made.trajectory
    steps = {
        "latents": t.latents,
        "next_latents": t.next_latents,
        "old_means": t.means,
        "old_log_probs": t.log_probs,
        "levels": t.levels,
        "next_levels": t.next_levels,
        "timesteps": t.timesteps,
    }
    return DiffusionSample(
        clean_latents=made.latents,
        conditions=made.conditions,
        shared_conditions=made.shared_conditions,
        guidance_scale=made.guidance_scale,
        **(steps if has_steps else {}),
        **fields,
    )


def _samples(group: Group, advantages: Sequence[float], config: DiffusionConfig, step: int) -> list[DiffusionSample]:
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


def _pairs(samples: Sequence[DiffusionSample], scores: Sequence[float]) -> list[DiffusionSample]:
    """Pair the best image with the worst, the second best with the second worst, and so on."""
    order = sorted(range(len(samples)), key=lambda i: -scores[i])
    return [samples[i] for k in range(len(order) // 2) for i in (order[k], order[-1 - k])]


def updates(
    groups: Sequence[Sequence[DiffusionSample]], *, num_updates: int, micro_batch_size: int, num_parts: int = 1
) -> list[list[list[DiffusionSample]]]:
    """Return the micro-batches of each update of a step; pairs of images go to updates in turn, which spreads groups.

    Args:
        groups: of images.
        num_updates: of the step.
        micro_batch_size: most images in a micro-batch.
        num_parts: fewest micro-batches of an update, if there are enough pairs.
    """
    shares: list[list[DiffusionSample]] = [[] for _ in range(num_updates)]
    pairs = [group[i : i + 2] for group in groups for i in range(0, len(group), 2)]
    for place, pair in enumerate(pairs):
        shares[place % num_updates] += pair
    found: list[list[list[DiffusionSample]]] = []
    for share in shares:
        most = min(micro_batch_size, 2 * (-(-len(share) // 2) // num_parts))
        size = max(2, most - most % 2)
        found.append([share[i : i + size] for i in range(0, len(share), size)])
    return found
