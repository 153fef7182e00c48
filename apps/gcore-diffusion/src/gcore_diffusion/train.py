"""`gcore-diffusion train`: from a config to a finished run's folder."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_controller import Backend, DeviceTimers, TrainerGroup
from gcore_diffusion.config import MAY_CHANGE, DiffusionConfig
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.demo.pretraining import taught_pipeline
from gcore_diffusion.engines import judge_factory, start_engines
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.modality import Job
from gcore_diffusion.pipeline_files import check_pipeline
from gcore_diffusion.prompts import PromptSets, load_prompts
from gcore_diffusion.recorder import RunRecorder
from gcore_diffusion.report import write_report
from gcore_diffusion.rewards import Rewards, build_rewards, try_reward
from gcore_diffusion.roles import SamplingRoles
from gcore_diffusion.sampling import images, kernel_of
from gcore_diffusion.services import inline_backend
from gcore_rollout import ImageRequest, ImageSampling, RolloutError
from gcore_runs.display import Display
from gcore_runs.errors import UserError
from gcore_runs.instrumented_engine import Instrumentation
from gcore_runs.interrupt import at_once
from gcore_runs.learning_signal import check_signal
from gcore_runs.logs import log_to
from gcore_runs.metrics import MetricsWriter, metrics_server
from gcore_runs.run_folder import Result, RunFolder, finish_report, open_run, read_jsonl, write_atomically
from gcore_runs.run_loop import RunLoop, closed, steps_made
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.settings import resolve
from gcore_runs.spans import SpanWriter

if TYPE_CHECKING:
    from gcore_runs.prometheus import PrometheusExporter


def train(config: DiffusionConfig, display: Display) -> Result:
    """Run, or go on with, the job that ``config`` describes.

    Raises:
        UserError: wrong settings, found before anything is trained.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    import torch

    config = resolve(config)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.model:
        check_pipeline(Path(config.model))
    prompts = load_prompts(config.data, PROMPTS)
    rewards = None
    if config.reward.is_judged:
        judge_factory(config)
    else:
        rewards = build_rewards(config, judge=None)
    if config.runtime == "ray":
        from gcore_runs.on_ray.cluster import check_cluster

        check_cluster(config)
    host, port = config.trainer.prometheus_host, config.trainer.prometheus_port
    server = metrics_server(run=config.name, port=port, host=host, app="gcore-diffusion")
    with at_once(), server as prometheus, asyncio.Runner() as runner:
        run = open_run(config, may_change=MAY_CHANGE)
        display.say(f"run folder: {run.path}")
        with log_to(run.logs, "main"):
            first_step = steps_made(run, config.trainer.total_training_steps, display)
            if first_step is not None:
                model = Path(config.model) if config.model else taught_pipeline(config.demo, seed=0, display=display)
                display.say("trying the pipeline and the reward on an image")
                services = runner.run(_start(config, model, prompts, rewards, run, display))
                with closed(services, runner):
                    _train(services, config, prompts, run, first_step, runner, display, prometheus)
                    write_atomically(run.export, partial(_export, services.learner, model))
    has_signal = check_signal(run, RunWarnings(run, display))
    finish_report(write_report, run)
    rows = [row for row in read_jsonl(run.metrics) if "val/score/mean" in row]
    return Result(run=run.path, before=rows[0] if rows else {}, after=rows[-1] if rows else {}, has_signal=has_signal)


async def _start(
    config: DiffusionConfig,
    model: Path,
    prompts: PromptSets,
    rewards: Rewards | None,
    run: RunFolder,
    display: Display,
) -> Backend[Job, DiffusionConfig, Evaluation]:
    """The services, once an image has been made and scored here.

    Args:
        rewards: None: they need a judge, which is started here.
    """
    devices, is_on_ray = DeviceTimers(), config.runtime == "ray"
    instrumentation = Instrumentation(devices=devices, logs=run.logs, announce=display.say)
    engines = await start_engines(config, model, instrumentation, is_trial=is_on_ray)
    try:
        rewards = rewards or build_rewards(config, judge=engines.judge)
        sampler = SamplingRoles(policy=engines.policy, rewards=rewards, devices=devices)
        await _try(config, sampler, prompts)
        if not is_on_ray:
            return inline_backend(config, sampler, engines, model, run.checkpoints)
    except BaseException:
        await engines.close()
        raise
    await engines.close()
    from gcore_diffusion.on_ray import start_on_ray

    return await start_on_ray(config, model, run.checkpoints, announce=display.say)


async def _try(config: DiffusionConfig, sampler: SamplingRoles, prompts: PromptSets) -> None:
    """Make an image and score one, so that what cannot work is found before anything is trained."""
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
        # Pipelines refuse what they do not like in their own words.
        if isinstance(error, RolloutError):
            raise
        raise UserError(f"the pipeline makes no image of {first.text!r} with these settings: {error}") from error
    height, width, _ = made.image.shape
    for reward in (sampler.rewards.trained, sampler.rewards.held_out):
        if reward is not None:
            await try_reward(reward, first, height=height, width=width)


def _train(
    services: Backend[Job, DiffusionConfig, Evaluation],
    config: DiffusionConfig,
    prompts: PromptSets,
    run: RunFolder,
    first_step: int,
    runner: asyncio.Runner,
    display: Display,
    prometheus: "PrometheusExporter | None",
) -> None:
    def recorder(job: Job, writer: MetricsWriter, spans: SpanWriter) -> RunRecorder:
        return RunRecorder(job, run, services.learner, writer=writer, spans=spans, display=display)

    job = Job(
        config=services.config,
        prompts=prompts,
        first_step=first_step,
        is_evaluated=_is_evaluated(run, config, first_step),
        is_policy_behind=first_step > 0,
    )
    RunLoop(
        services=services,
        run=run,
        recorder=recorder,
        is_evaluated=partial(_is_evaluated, run),
        runner=runner,
        display=display,
        tensorboard=config.trainer.tensorboard,
        prometheus=prometheus,
    ).to_the_end(job)


def _is_evaluated(run: RunFolder, config: DiffusionConfig, step: int) -> bool:
    if step and step % config.trainer.test_freq:
        return True
    return step > 0 and any(row["step"] == step and "val/score/mean" in row for row in read_jsonl(run.metrics))


def _export(learner: TrainerGroup, model: Path, path: Path) -> None:
    """The pipeline's folder with the trained denoiser in it."""
    from gcore_trainer import pipeline_component

    name, _ = pipeline_component(model)
    shutil.copytree(model, path, ignore=lambda folder, _: [name] if Path(folder) == model else [])
    learner.save_pretrained(path / name)
