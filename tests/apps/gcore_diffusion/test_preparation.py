"""From scored groups of images to updates, and the steps of sampling that are trained on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from gcore_controller import TrainingBatch
from gcore_diffusion.config import (
    DiffusionAlgorithmConfig,
    DiffusionConfig,
    DiffusionRolloutConfig,
    embedded_nft,
)
from gcore_diffusion.modality import ImageJob, ImageModality, preference_pairs
from gcore_diffusion.sampling.image_sampling import ImageGroup, image_sampling
from gcore_diffusion.sampling.prompts import ImagePrompt, ImagePromptSets
from gcore_rollout import ImageSample, Trajectory

DPO = replace(embedded_nft(), algorithm=DiffusionAlgorithmConfig(name="dpo"))


def scored_group(index: int, scores: list[float]) -> ImageGroup:
    """Images of which each has its own latents, two steps of them."""
    steps = np.zeros(2, np.float32)
    samples: list[ImageSample] = []
    for place in range(len(scores)):
        latents = np.full((2, 3), 10 * index + place, np.float32)
        trajectory = Trajectory(
            latents=latents,
            next_latents=latents,
            means=latents,
            log_probs=steps,
            steps=np.arange(2),
            levels=steps,
            next_levels=steps,
            timesteps=steps,
        )
        sample = ImageSample(
            request_id=str(index),
            index=place,
            image=np.zeros((1, 1, 3), np.uint8),
            latents=latents[0],
            trajectory=trajectory,
            conditions={},
            shared_conditions={},
            guidance_scale=None,
            weight_version=0,
            finish_reason="stop",
        )
        samples.append(sample)
    return ImageGroup(
        prompt_index=index,
        prompt=ImagePrompt(text="", row={}),
        samples=samples,
        scores=np.array(scores),
        parts=[{} for _ in scores],
    )


async def prepare(
    config: DiffusionConfig, scores: list[list[float]], *, num_replicas: int = 1
) -> Any:
    """What one controller prepares of groups with these scores."""

    async def all_gather(value: Any) -> list[Any]:
        return [value]

    learner = SimpleNamespace(num_replicas=num_replicas, can_score_alone=True)
    ctx: Any = SimpleNamespace(
        group=SimpleNamespace(all_gather=all_gather), roles=SimpleNamespace(learner=learner)
    )
    job = ImageJob(config=config, prompts=ImagePromptSets(train=[], val=[]))
    groups = [scored_group(index, own) for index, own in enumerate(scores)]
    batch = TrainingBatch(groups=groups, num_groups=len(groups), metrics={}, state={}, rounds=())
    return await ImageModality(job).prepare(ctx, 1, batch)


def pairs_of(updates: Any) -> list[list[tuple[int, int]]]:
    """The numbers of the chosen and the rejected image of every pair, by update."""
    found: list[list[tuple[int, int]]] = []
    for update in updates:
        numbers = [int(sample.clean_latents[0]) for batch in update for sample in batch]
        found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0, 1.0, 2.0, 0.0], [(0, 3), (2, 1)]),
        ([1.0, 0.0, 1.0, 0.0], [(0, 3), (2, 1)]),
        ([1.0, 1.0, 1.0, 0.0], [(0, 3)]),
        ([1.0, 0.5, 0.0], [(0, 2)]),
        ([1.0, 1.0], []),
        ([0.5, 0.5 + 1e-9], []),
    ],
)
def test_images_of_the_same_score_are_no_pair(
    scores: list[float], expected: list[tuple[int, int]]
) -> None:
    assert preference_pairs(np.array(scores)) == expected


async def test_dpo_skips_ties_and_counts_them() -> None:
    prepared = await prepare(DPO, [[1.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    assert pairs_of(prepared.updates) == [[(0, 3), (20, 21)]]
    assert prepared.metrics == {"training/has_signal": 1.0, "training/num_tied_pairs": 3.0}


async def test_a_batch_of_ties_is_not_trained_on() -> None:
    prepared = await prepare(DPO, [[1.0, 1.0], [0.0, 0.0]])
    assert pairs_of(prepared.updates) == [[]]
    assert prepared.metrics == {"training/has_signal": 0.0, "training/num_tied_pairs": 2.0}


async def test_fewer_pairs_than_replicas_are_repeated() -> None:
    """The mean over the pairs is the same, and no replica is without one."""
    prepared = await prepare(DPO, [[1.0, 0.0], [1.0, 1.0]], num_replicas=3)
    assert pairs_of(prepared.updates) == [[(0, 1)] * 3]
    assert [len(batch) for batch in prepared.updates[0]] == [2, 2, 2]


@pytest.mark.parametrize("name", ["dgpo", "crd"])
async def test_images_that_are_compared_stay_together(name: Literal["dgpo", "crd"]) -> None:
    """Of three groups, two in the first update and one in the second, whatever a micro-batch holds otherwise."""
    base = embedded_nft()
    config = replace(
        base,
        algorithm=DiffusionAlgorithmConfig(name=name),
        rollout=replace(base.rollout, n=3),
        actor=replace(base.actor, num_updates=2, micro_batch_size=4),
    )
    groups = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [2.0, 0.0, 1.0]]
    for num_replicas in (1, 2):
        prepared = await prepare(config, groups, num_replicas=num_replicas)
        numbers = [
            [[int(sample.clean_latents[0]) for sample in batch] for batch in update]
            for update in prepared.updates
        ]
        assert numbers[0] == [[0, 1, 2], [20, 21, 22]]
        assert numbers[1] == [[10, 11, 12]] * num_replicas


def windows(config: DiffusionConfig, steps: range) -> list[tuple[int, int] | None]:
    return [image_sampling(config, step=step, prompt_index=0).window for step in steps]


def test_a_sliding_window_visits_all_steps() -> None:
    """MixGRPO (arXiv 2507.21802), algorithm 1: it starts at step 0 and moves by one after each `window_steps`."""
    rollout = DiffusionRolloutConfig(num_inference_steps=5, window_size=2, window_steps=3)
    found = windows(DiffusionConfig(rollout=rollout), range(1, 16))
    assert found == [window for start in (0, 1, 2, 3, 0) for window in [(start, start + 2)] * 3]
    narrowed = replace(rollout, window_range=(1, 4))
    assert set(windows(DiffusionConfig(rollout=narrowed), range(1, 16))) == {(1, 3), (2, 4)}


def test_a_random_window_is_in_the_first_half() -> None:
    rollout = DiffusionRolloutConfig(num_inference_steps=5, window_size=2)
    config = DiffusionConfig(rollout=rollout)
    found = {image_sampling(config, step=1, prompt_index=index).window for index in range(20)}
    assert found == {(0, 2), (1, 3)}
