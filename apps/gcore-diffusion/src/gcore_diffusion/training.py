"""`gcore-diffusion train`: from settings to a finished run."""

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.pipeline_files import check_pipeline
from gcore_diffusion.report import write_report
from gcore_diffusion.sampling.prompts import PromptSets, load_prompts
from gcore_runs.errors import UserError
from gcore_runs.loop.supervisor import Supervisor
from gcore_runs.run_folder import Result
from gcore_runs.settings.values import resolve

if TYPE_CHECKING:
    from gcore_controller import Backend, TrainerGroup
    from gcore_diffusion.modality import Job
    from gcore_diffusion.recorder import RunRecorder
    from gcore_diffusion.roles import SamplingRoles
    from gcore_diffusion.sampling.evaluate import Evaluation
    from gcore_diffusion.sampling.rewards import Rewards
    from gcore_runs.display import Display
    from gcore_runs.metrics.writer import MetricsWriter
    from gcore_runs.spans import SpanWriter


def train(config: DiffusionConfig, display: "Display | None" = None) -> Result:
    """Train a diffusion model on a reward, or resume the run of this name.

    Args:
        config: the run's settings.
        display: where progress is shown; None: nowhere, and `logging` gets the same lines.

    Returns:
        the run's folder, and its first and last evaluation.

    Raises:
        UserError: wrong settings or data, found before anything is trained.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    config = resolve(config)
    with Supervisor(config, app="gcore-diffusion", display=display) as supervisor:
        if config.model:
            check_pipeline(Path(config.model))
        prompts = load_prompts(config.data, PROMPTS)
        rewards = _checked_rewards(config)
        _check_cluster(config)
        run = supervisor.open_run()
        first_step = supervisor.resume(config.trainer.total_training_steps)
        if first_step is not None:
            model = Path(config.model) if config.model else _embedded_model(config, supervisor.display)
            supervisor.display.say("trying the pipeline and the reward on an image")
            starting = _start(config, model, prompts, rewards, run.checkpoints, supervisor.display)
            with supervisor.started(starting) as services:
                _train(services, prompts, first_step, supervisor)
                supervisor.export(partial(_export, services.learner, model))
        return supervisor.finish(write_report)


def _checked_rewards(config: DiffusionConfig) -> "Rewards | None":
    """Return the rewards; None: they need a judge, which is started with the engines."""
    from gcore_diffusion.sampling.engines import judge_factory
    from gcore_diffusion.sampling.rewards import build_rewards

    if config.reward.is_judged:
        judge_factory(config)
        return None
    return build_rewards(config, judge=None)


def _check_cluster(config: DiffusionConfig) -> None:
    if config.runtime == "ray":
        from gcore_runs.on_ray.start import check_cluster

        check_cluster(config)


def _embedded_model(config: DiffusionConfig, display: "Display") -> Path:
    from gcore_diffusion.demo.pretraining import pretrained_pipeline

    return pretrained_pipeline(config.demo, seed=0, display=display)


async def _start(
    config: DiffusionConfig,
    model: Path,
    prompts: PromptSets,
    rewards: "Rewards | None",
    checkpoints: Path,
    display: "Display",
) -> "Backend[Job, DiffusionConfig, Evaluation]":
    """Make and score an image in this process, then start the services.

    Args:
        rewards: None: they need a judge, which is started here.
    """
    from gcore_controller import DeviceTimers
    from gcore_diffusion.roles import SamplingRoles
    from gcore_diffusion.sampling.engines import start_engines
    from gcore_diffusion.sampling.rewards import build_rewards
    from gcore_diffusion.services import inline_backend
    from gcore_runs.logs.writing import logs_of
    from gcore_runs.loop.instrumented_engine import Instrumentation

    devices, is_on_ray = DeviceTimers(), config.runtime == "ray"
    instrumentation = Instrumentation(devices=devices, logs=logs_of(checkpoints), announce=display.say)
    engines = await start_engines(config, model, instrumentation, is_trial=is_on_ray)
    try:
        rewards = rewards or build_rewards(config, judge=engines.judge)
        sampler = SamplingRoles(policy=engines.policy, rewards=rewards, devices=devices)
        await _try(config, sampler, prompts)
        if not is_on_ray:
            return inline_backend(config, sampler, engines, model, checkpoints)
    except BaseException:
        await engines.close()
        raise
    await engines.close()
    from gcore_diffusion.on_ray import start_on_ray

    return await start_on_ray(config, model, checkpoints, announce=display.say)


async def _try(config: DiffusionConfig, sampler: "SamplingRoles", prompts: PromptSets) -> None:
    """Make an image and score one, so that an error is found before anything is trained."""
    from gcore_diffusion.sampling.image_sampling import images, kernel_of
    from gcore_diffusion.sampling.rewards import try_reward
    from gcore_rollout import ImageRequest, ImageSampling, RolloutError

    sampling = ImageSampling(
        num_inference_steps=1,
        guidance_scale=config.rollout.guidance_scale,
        kernel=kernel_of(config),
        size=config.rollout.size if config.rollout.size != (0, 0) else None,
    )
    first = prompts.train[0]
    try:
        (made,) = await images(sampler.policy, [ImageRequest(request_id="try", prompt=first.text, sampling=sampling)])
    except (ValueError, TypeError, RuntimeError) as error:
        # Pipelines raise errors of these kinds for settings that they do not support.
        if isinstance(error, RolloutError):
            raise
        raise UserError(f"the pipeline makes no image of {first.text!r} with these settings: {error}") from error
    height, width, _ = made.image.shape
    for reward in (sampler.rewards.trained, sampler.rewards.held_out):
        if reward is not None:
            await try_reward(reward, first, height=height, width=width)


def _train(
    services: "Backend[Job, DiffusionConfig, Evaluation]",
    prompts: PromptSets,
    first_step: int,
    supervisor: Supervisor,
) -> None:
    """Run the controllers' program on its services."""
    from gcore_diffusion.modality import Job
    from gcore_diffusion.recorder import RunRecorder
    from gcore_runs.loop.run_loop import RunLoop

    def recorder(job: Job, writer: "MetricsWriter", spans: "SpanWriter") -> "RunRecorder":
        return RunRecorder(
            job, supervisor.run, services.learner, writer=writer, spans=spans, display=supervisor.display
        )

    config = services.config
    job = Job(
        config=config,
        prompts=prompts,
        first_step=first_step,
        is_evaluated=supervisor.is_evaluated(first_step, config.trainer.total_training_steps),
        is_policy_behind=first_step > 0,
    )
    RunLoop(supervisor=supervisor, services=services, recorder=recorder).to_the_end(job)


def _export(learner: "TrainerGroup", model: Path, path: Path) -> None:
    """Write the pipeline's folder with the trained denoiser in it."""
    from gcore_trainer import pipeline_component

    name, _ = pipeline_component(model)
    shutil.copytree(model, path, ignore=lambda folder, _: [name] if Path(folder) == model else [])
    learner.save_pretrained(path / name)
