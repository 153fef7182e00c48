"""What a run's controllers, engines and training ranks consist of, in this process and on a Ray cluster."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_controller import Backend, Context, DeviceTimers
from gcore_llm.config import TrainConfig
from gcore_llm.learning.preparation import sample_flops
from gcore_llm.learning.trainer_worker import ray_trainer_spec, start_trainer
from gcore_llm.modality import Job, Roles, SamplingRoles
from gcore_llm.sampling.engines import engine_factory, start_policy
from gcore_llm.sampling.rewards import Evaluation, Rewards
from gcore_rollout import Engine, EnvironmentRole, RewardRunner
from gcore_runs import build_tokenizer, eos_token_ids, inline_backend, logs_of
from gcore_runs.engines import NO_INSTRUMENTATION, EngineConfig, Instrumentation

if TYPE_CHECKING:
    from gcore_controller import ActorRole, Handles, RemoteRecorder
    from gcore_runs.on_ray.start import ControllerServices, EngineFactory


async def build_engine(
    config: TrainConfig, model: Path, tokenizer: Any, *, instrumentation: Instrumentation = NO_INSTRUMENTATION
) -> Engine:
    """Start the policy's engine with the weights of a model folder."""
    eos = eos_token_ids(tokenizer, model)
    return await start_policy(config, model, eos_token_ids=eos, instrumentation=instrumentation)


def build_environment(config: TrainConfig, tokenizer: Any, reward: RewardRunner) -> EnvironmentRole | None:
    """Build the environment that the config names; see `MultiTurnConfig.build`."""
    prompt_key, on_error = config.data.prompt_key, config.reward_calls.on_error
    return config.rollout.multi_turn.build(tokenizer, reward, prompt_key=prompt_key, on_error=on_error)


async def start_backend(
    config: TrainConfig,
    model: Path,
    checkpoints: Path,
    *,
    tokenizer: Any,
    rewards: Rewards,
    environment: EnvironmentRole | None,
    devices: DeviceTimers,
    announce: Callable[[str], None] | None = None,
) -> Backend[Job, TrainConfig, Evaluation]:
    """Load the model in a folder for every role that needs it; ``announce`` prints a line on the screen."""
    if config.runtime == "ray":
        # Each controller starts rewards of its own.
        await rewards.close()
        return await _start_on_ray(config, model, checkpoints, tokenizer, announce)
    # vLLM sets process-wide state as it starts, so it comes first.
    instrumentation = Instrumentation(devices=devices, logs=logs_of(checkpoints), announce=announce)
    policy = await build_engine(config, model, tokenizer, instrumentation=instrumentation)
    try:
        learner = start_trainer(config, model, checkpoints)
    except BaseException:
        await policy.close()
        raise
    roles = SamplingRoles(
        policy=policy,
        reward=rewards.runner,
        comparison=rewards.comparison,
        tokenizer=tokenizer,
        environment=environment,
        devices=devices,
    )
    num_ranks = config.trainer.num_processes
    return inline_backend(config, shared=roles, roles=Roles, learner=learner, num_ranks=num_ranks, close=policy.close)


async def _start_on_ray(
    config: TrainConfig, model: Path, checkpoints: Path, tokenizer: Any, announce: Callable[[str], None] | None
) -> Backend[Job, TrainConfig, Evaluation]:
    from gcore_runs.on_ray.start import start_ray_backend

    factories: dict[ActorRole, Callable[[TrainConfig], EngineFactory]] = {
        "engine": _engines(model, tokenizer, lambda config: config.rollout)
    }
    if config.sizes.judges:
        path = Path(config.reward_model.path)
        factories["judge"] = _engines(path, build_tokenizer(path), lambda config: config.reward_model.judge)
    return await start_ray_backend(
        config,
        factories=factories,
        trainer_spec=partial(ray_trainer_spec, model=model, checkpoints=checkpoints),
        run_controller=partial(_run_controller, tokenizer),
        checkpoints=checkpoints,
        announce=announce,
    )


def _engines(
    model: Path, tokenizer: Any, settings: Callable[[TrainConfig], EngineConfig]
) -> "Callable[[TrainConfig], EngineFactory]":
    eos = eos_token_ids(tokenizer, model)
    return lambda config: engine_factory(settings(config), config, model.absolute(), eos_token_ids=eos)


async def _run_controller(
    tokenizer: Any, job: Job, ctx: "Context[Handles]", own: "ControllerServices", recorder: "RemoteRecorder[Evaluation]"
) -> None:
    """Build a controller's roles in its process, and run the program with them."""
    from gcore_controller import RayTrainerClient

    config, cost_of = job.config, partial(sample_flops, job.workload)
    rewards = await Rewards.start(config, judge=own.judge)
    try:
        roles = Roles(
            policy=own.policy,
            reward=rewards.runner,
            comparison=rewards.comparison,
            tokenizer=tokenizer,
            environment=build_environment(config, tokenizer, rewards.runner),
            policy_slots=own.num_engines * config.rollout.max_num_seqs,
            learner=RayTrainerClient(ctx.roles.ranks, ctx.group, own.devices, cost_of=cost_of),
            devices=own.devices,
            owns_process=True,
        )
        await job.program(recorder)(ctx.with_roles(roles))
    finally:
        await rewards.close()
