"""`gcore-diffusion simulate train`: the program of `train` in simulated time, on modelled engines and ranks."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import DeviceTimers
from gcore_diffusion.backend import ImageRunRecorder
from gcore_diffusion.config import RECIPES, SimulatedDiffusionConfig
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.modality import ImageJob
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_diffusion.sampling.image_sampling import ImageRoles, ImageSamplingRoles
from gcore_diffusion.sampling.prompts import ImagePromptSets, load_prompts
from gcore_diffusion.sampling.services import ImageRewards
from gcore_rollout import Engine, ImageRequest, ImageSample, RewardError, RewardRunner, Scored
from gcore_runs import UserError, extend_recipes, parse, resolve, run_training
from gcore_runs.simulation.cluster import SimulatedCluster
from gcore_runs.simulation.command import SIMULATE_TRAIN
from gcore_runs.simulation.services import SimulatedModality, sample_name
from gcore_trainer import DiffusionSample

if TYPE_CHECKING:
    from gcore_runs import Display, Kind, RunResult

_NAME_BYTES = 9
"""A name in whole pixels."""


def run_simulate(args: Sequence[str]) -> None:
    """Run `gcore-diffusion simulate train`."""
    from gcore_diffusion.training import KINDS

    if args[:1] != ["train"]:
        raise UserError(
            f"the first argument of simulate is {args[0] if args else ''!r}; expected train"
        )
    recipes = extend_recipes({**RECIPES, **PUBLISHED}, SimulatedDiffusionConfig)
    config = parse(
        args[1:], prog="gcore-diffusion simulate train", recipes=recipes, description=SIMULATE_TRAIN
    )
    run_training(config, partial(train_simulated, kinds=KINDS), title="simulated")


def train_simulated(
    config: SimulatedDiffusionConfig,
    display: "Display | None" = None,
    *,
    kinds: "Mapping[str, Kind]",
) -> "RunResult":
    """Run the program of `train` in simulated time, in a run folder; see `gcore_diffusion.training.train`."""
    config = resolve(config)
    loaded = load_prompts(config.data, PROMPTS, size=config.rollout.image_size)
    prompts = ImagePromptSets(train=loaded.train, val=[])
    cluster = SimulatedCluster(
        job=ImageJob(config=config, prompts=prompts),
        sim=config.sim,
        modality=SimulatedImages(config),
        n=config.rollout.n,
        roles=ImageRoles,
        services=_services,
    )
    return cluster.train(config, ImageRunRecorder, kinds, app="gcore-diffusion", display=display)


class SimulatedImages(SimulatedModality[ImageRequest, ImageSample]):
    """Images that take as many steps as they are denoised in; the pixels of one are its name (see `sample_name`)."""

    def __init__(self, config: SimulatedDiffusionConfig) -> None:
        self._pass_flops = 2 * config.sim.parameters * config.sim.tokens
        self.weights_bytes = 2 * config.sim.parameters

    def size(self, request: ImageRequest, index: int) -> tuple[float, float, float]:
        del index
        return request.sampling.num_inference_steps, 0, 0

    def sample(
        self, request: ImageRequest, index: int, num_steps: float, *, version: int, is_aborted: bool
    ) -> ImageSample:
        del num_steps
        empty = request.aborted(index)
        if is_aborted:
            return empty
        first, end = request.sampling.window or (0, request.sampling.num_inference_steps)
        steps = np.zeros(end - first, np.float32)
        recorded = dict.fromkeys(vars(empty.trajectory), steps) | {"steps": np.arange(first, end)}
        name = sample_name(request.seed, index).to_bytes(_NAME_BYTES, "little")
        return replace(
            empty,
            image=np.frombuffer(name, np.uint8).reshape(1, -1, 3),
            trajectory=replace(empty.trajectory, **recorded),
            weight_version=version,
            finish_reason="stop",
        )

    def flops(self, micro_batch: Sequence[DiffusionSample]) -> float:
        """Return the FLOPs of a forward and a backward pass for each step."""
        return 3 * self._pass_flops * sum(max(1, sample.num_steps) for sample in micro_batch)

    def outputs(self, sample: DiffusionSample) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        steps = np.zeros(sample.num_steps, np.float32)
        return steps, steps


def _services(
    *,
    policy: Engine[Any, Any],
    policy_slots: int | None,
    reward: RewardRunner,
    devices: DeviceTimers,
) -> ImageSamplingRoles:
    del policy_slots
    rewards = ImageRewards(trained=partial(_scores, reward), held_out=None)
    return ImageSamplingRoles(policy=policy, rewards=rewards, devices=devices)


async def _scores(
    reward: RewardRunner,
    images: NDArray[np.uint8],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Score images by their names."""
    calls: list[Coroutine[Any, Any, Scored | RewardError]] = []
    for image, prompt, row in zip(images, prompts, rows, strict=True):
        name = str(int.from_bytes(image.tobytes(), "little"))
        calls.append(reward.score(prompt=prompt, completion=name, row=row))
    scores: list[float] = []
    for result in await asyncio.gather(*calls):
        if isinstance(result, RewardError):
            raise result
        scores.append(result.score)
    return scores
