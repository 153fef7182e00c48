"""The services of gcore-llm as actors of a Ray cluster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gcore_llm.config import TrainConfig
from gcore_llm.engine_config import EngineConfig
from gcore_llm.engines import engine_factory
from gcore_llm.evaluate import Evaluation
from gcore_llm.learner import LocalLearner
from gcore_llm.modality import Job
from gcore_llm.on_ray.controller import controller_program
from gcore_llm.roles import build_tokenizer, eos_token_ids
from gcore_llm.services import Inputs
from gcore_runs.logs import logs_of
from gcore_runs.on_ray.engine_actors import Factory, Role
from gcore_runs.on_ray.services import RayServices
from gcore_runs.on_ray.training_ranks import RayLearner


async def start_on_ray(inputs: Inputs, model: Path, checkpoints: Path) -> RayServices[Job, TrainConfig, Evaluation]:
    """Start the actors of all roles.

    Raises:
        ClusterError: there is no room for them.
        UserError: the cluster cannot be reached.
    """
    # What scores is started by each controller for itself.
    await inputs.rewards.close()
    factories: dict[Role, Callable[[TrainConfig], Factory]] = {
        "engine": _engines(model, inputs.tokenizer, lambda config: config.rollout)
    }
    if inputs.config.num_ray_judges:
        path = Path(inputs.config.reward_model.path)
        factories["judge"] = _engines(path, build_tokenizer(path), lambda config: config.reward_model.judge)
    logs = logs_of(checkpoints.absolute())
    services: RayServices[Job, TrainConfig, Evaluation] = RayServices(
        inputs.config,
        factories=factories,
        learner=RayLearner(partial(rank_learner, model.absolute(), checkpoints.absolute()), logs=logs),
        program=partial(controller_program, tokenizer=inputs.tokenizer),
        logs=logs,
        announce=inputs.announce,
    )
    return await services.start()


def _engines(
    model: Path, tokenizer: Any, settings: Callable[[TrainConfig], EngineConfig]
) -> Callable[[TrainConfig], Factory]:
    eos = eos_token_ids(tokenizer, model)
    return lambda config: engine_factory(settings(config), config, model.absolute(), eos_token_ids=eos)


def rank_learner(model: Path, checkpoints: Path, config: TrainConfig, device: str) -> LocalLearner:
    """The models of one rank, in its process."""
    torch.manual_seed(config.seed)
    return LocalLearner(replace(config, device=device), model, checkpoints)
