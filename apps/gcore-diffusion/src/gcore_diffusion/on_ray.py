"""A run of gcore-diffusion on a Ray cluster: what its engines, its training ranks and its controllers consist of."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from gcore_controller import ActorRole, Context, Handles, RayBackend, RayTrainerClient, RemoteRecorder
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.learning.trainer_worker import trainer_spec
from gcore_diffusion.modality import Job, diffusion_program
from gcore_diffusion.roles import Roles
from gcore_diffusion.sampling.engines import judge_factory, sampler_factory
from gcore_diffusion.sampling.evaluate import Evaluation
from gcore_diffusion.sampling.rewards import build_rewards
from gcore_runs.on_ray.start import ControllerServices, EngineFactory, start_ray_backend
from gcore_trainer import DiffusionMicroBatch


async def start_on_ray(
    config: DiffusionConfig, model: Path, checkpoints: Path, *, announce: Callable[[str], None] | None = None
) -> RayBackend[Job, DiffusionConfig, Evaluation]:
    """Start the actors of all roles; see `start_ray_backend`."""
    factories: dict[ActorRole, Callable[[DiffusionConfig], EngineFactory]] = {
        "engine": partial(sampler_factory, model=model)
    }
    if config.sizes.judges:
        factories["judge"] = judge_factory
    return await start_ray_backend(
        config,
        factories=factories,
        trainer_spec=partial(trainer_spec, model=model, checkpoints=checkpoints),
        run_controller=_run_controller,
        checkpoints=checkpoints,
        announce=announce,
    )


async def _run_controller(
    job: Job, ctx: Context[Handles], own: ControllerServices, recorder: RemoteRecorder[Evaluation]
) -> None:
    """Build a controller's roles in its process, and run the program with them."""
    # Ray gives controllers no GPU.
    rewards = build_rewards(replace(job.config, device="cpu"), judge=own.judge)
    learner = RayTrainerClient(ctx.roles.ranks, ctx.group, own.devices, cost_of=_num_passes)
    roles = Roles(policy=own.policy, rewards=rewards, devices=own.devices, learner=learner, owns_process=True)
    await diffusion_program(job, recorder)(ctx.with_roles(roles))


def _num_passes(micro_batch: DiffusionMicroBatch) -> float:
    """Return the number of passes through the model that an update on a micro-batch makes."""
    return sum(max(1, sample.num_steps) for sample in micro_batch)
