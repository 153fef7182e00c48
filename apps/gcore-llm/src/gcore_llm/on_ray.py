"""A run of gcore-llm on a Ray cluster: what its engines, its training ranks and its controllers consist of."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_controller import ActorRole, Context, Handles, RayBackend, RayTrainerClient, RemoteRecorder
from gcore_llm.config import TrainConfig
from gcore_llm.learning.micro_batches import sample_flops
from gcore_llm.learning.trainer_worker import ray_trainer_spec
from gcore_llm.modality import Job
from gcore_llm.roles import Roles, build_environment, build_tokenizer, eos_token_ids
from gcore_llm.sampling.engines import engine_factory
from gcore_llm.sampling.evaluate import Evaluation
from gcore_llm.sampling.rewards import Rewards
from gcore_llm.services import Inputs
from gcore_llm.settings.engine_config import EngineConfig
from gcore_runs.on_ray.controller_process import ControllerServices
from gcore_runs.on_ray.start import EngineFactory, start_ray_backend


async def start_on_ray(inputs: Inputs, model: Path, checkpoints: Path) -> RayBackend[Job, TrainConfig, Evaluation]:
    """Start the actors of all roles; see `start_ray_backend`."""
    # Each controller starts rewards of its own.
    await inputs.rewards.close()
    factories: dict[ActorRole, Callable[[TrainConfig], EngineFactory]] = {
        "engine": _engines(model, inputs.tokenizer, lambda config: config.rollout)
    }
    if inputs.config.sizes.judges:
        path = Path(inputs.config.reward_model.path)
        factories["judge"] = _engines(path, build_tokenizer(path), lambda config: config.reward_model.judge)
    return await start_ray_backend(
        inputs.config,
        factories=factories,
        trainer_spec=partial(ray_trainer_spec, model=model, checkpoints=checkpoints),
        run_controller=partial(_run_controller, inputs.tokenizer),
        checkpoints=checkpoints,
        announce=inputs.announce,
    )


def _engines(
    model: Path, tokenizer: Any, settings: Callable[[TrainConfig], EngineConfig]
) -> Callable[[TrainConfig], EngineFactory]:
    eos = eos_token_ids(tokenizer, model)
    return lambda config: engine_factory(settings(config), config, model.absolute(), eos_token_ids=eos)


async def _run_controller(
    tokenizer: Any, job: Job, ctx: Context[Handles], own: ControllerServices, recorder: RemoteRecorder[Evaluation]
) -> None:
    """Build a controller's roles in its process, and run the program with them."""
    config = job.config
    rewards = await Rewards.start(config, judge=own.judge)
    try:
        roles = Roles(
            policy=own.policy,
            reward=rewards.runner,
            comparison=rewards.comparison,
            tokenizer=tokenizer,
            environment=build_environment(config, tokenizer, rewards.runner),
            policy_slots=own.num_engines * config.rollout.max_num_seqs,
            learner=RayTrainerClient(
                ctx.roles.ranks, ctx.group, own.devices, cost_of=partial(sample_flops, job.workload)
            ),
            devices=own.devices,
            owns_process=True,
        )
        await job.program(recorder)(ctx.with_roles(roles))
    finally:
        await rewards.close()
