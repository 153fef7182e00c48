"""The services of gcore-diffusion as actors of a Ray cluster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.engines import judge_factory, sampler_factory
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.learner import Learner
from gcore_diffusion.modality import Job
from gcore_diffusion.on_ray.controller import controller_program
from gcore_diffusion.rewards import reward_gradient
from gcore_runs.logs.writing import logs_of
from gcore_runs.on_ray.engine_actors import Factory, Role
from gcore_runs.on_ray.services import RayServices
from gcore_runs.on_ray.training_ranks import RayLearner


async def start_on_ray(
    config: DiffusionConfig, model: Path, checkpoints: Path, *, announce: Callable[[str], None] | None = None
) -> RayServices[Job, DiffusionConfig, Evaluation]:
    """Start the actors of all roles.

    Args:
        config: the run's.
        model: the pipeline's folder.
        checkpoints: where checkpoints are.
        announce: puts a line on the screen.

    Raises:
        ClusterError: there is no room for them.
        UserError: the cluster cannot be reached.
    """
    factories: dict[Role, Callable[[DiffusionConfig], Factory]] = {"engine": partial(sampler_factory, model=model)}
    if config.sizes.judges:
        factories["judge"] = judge_factory
    logs = logs_of(checkpoints.absolute())
    services: RayServices[Job, DiffusionConfig, Evaluation] = RayServices(
        config,
        factories=factories,
        learner=RayLearner(partial(rank_learner, model.absolute(), checkpoints.absolute()), logs=logs),
        program=controller_program,
        logs=logs,
        announce=announce,
    )
    return await services.start()


def rank_learner(model: Path, checkpoints: Path, config: DiffusionConfig, device: str) -> Learner:
    """The models of one rank, in its process."""
    torch.manual_seed(config.seed)
    config = replace(config, device=device)
    return Learner(config, model, checkpoints, reward=reward_gradient(config))
