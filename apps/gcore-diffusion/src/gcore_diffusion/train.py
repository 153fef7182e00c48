"""`gcore-diffusion train`: from a config to a finished run's folder."""

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_ckpt import Checkpointer
from gcore_controller import Context, run_inline
from gcore_diffusion.config import MAY_CHANGE, DiffusionConfig
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.demo.pretraining import taught_pipeline
from gcore_diffusion.learner import Learner, SharedLearner
from gcore_diffusion.program import Job, diffusion_program
from gcore_diffusion.prompts import PromptSets, load_prompts
from gcore_diffusion.recorder import RunRecorder
from gcore_diffusion.report import write_report
from gcore_diffusion.rewards import build_reward, try_reward
from gcore_diffusion.roles import Roles, Sampler
from gcore_diffusion.sampling import images, kernel_of
from gcore_diffusion.timed_engine import TimedEngine
from gcore_rollout import Engine
from gcore_rollout.diffusion import ImageRequest, ImageSample, ImageSampling
from gcore_rollout.diffusion.engine import DiffusersEngine
from gcore_rollout.engine_process import EngineProcess
from gcore_rollout.errors import RolloutError
from gcore_rollout.replicas import EngineReplicas
from gcore_rollout.rewards import load_function
from gcore_runs.devices import DeviceTimers
from gcore_runs.display import Display
from gcore_runs.errors import UserError
from gcore_runs.logs import log_to, logged
from gcore_runs.metrics import MetricsWriter, metrics_server
from gcore_runs.run_folder import Result, RunFolder, open_run, read_jsonl, write_atomically
from gcore_runs.settings import resolve
from gcore_runs.spans import SpanWriter

_PRELOAD = ("gcore_rollout.diffusion.engine", "diffusers.pipelines.pipeline_utils")


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
    if config.model and not (Path(config.model) / "model_index.json").is_file():
        raise UserError(
            f"model is {config.model!r}: a folder of a diffusers pipeline, with model_index.json, is needed"
        )
    prompts = load_prompts(config.data, PROMPTS)
    kind = config.reward.kind or "digit"
    gradient = _differentiable(kind) if config.algorithm.name == "reward_gradient" else None
    build = partial(build_reward, config=config.reward, device=config.device)
    reward = _score_of(gradient) if gradient else build(kind, setting="reward.kind")
    held_out = build(config.reward.held_out, setting="reward.held_out") if config.reward.held_out else None
    host, port = config.trainer.prometheus_host, config.trainer.prometheus_port
    server = metrics_server(run=config.name, port=port, host=host, app="gcore-diffusion")
    with server as prometheus, asyncio.Runner() as runner:
        run = open_run(config, may_change=MAY_CHANGE)
        display.say(f"run folder: {run.path}")
        with log_to(run.logs, "main"):
            model = Path(config.model) if config.model else taught_pipeline(config.demo, seed=0, display=display)
            policy = runner.run(_start_policy(config, model, run))
            try:
                runner.run(_try(config, policy, prompts, [reward, held_out]))
                sampler = Sampler(policy=policy, reward=reward, held_out=held_out, devices=policy.devices)
                learner = Learner(config, model, run.checkpoints, reward=gradient)
                try:
                    _train(config, sampler, learner, prompts, run, model, runner, display, prometheus)
                finally:
                    learner.close()
            finally:
                runner.run(policy.close())
    write_report(run.path)
    rows = [row for row in read_jsonl(run.metrics) if "val/score/mean" in row]
    return Result(run=run.path, before=rows[0] if rows else {}, after=rows[-1] if rows else {})


async def _start_policy(config: DiffusionConfig, model: Path, run: RunFolder) -> TimedEngine:
    """The engine in this process, or several in their own, which are replaced if they die."""
    rollout, devices = config.rollout, DeviceTimers()
    make = partial(
        DiffusersEngine.from_pretrained,
        model.absolute(),
        device=config.device,
        dtype=rollout.dtype,
        max_num_images=rollout.max_num_images,
        options=rollout.pipeline_options,
    )
    if not rollout.num_processes:
        return TimedEngine(make(), devices, "engine 0")
    threads = max(1, config.threads // rollout.num_processes)
    numbers = iter(range(10**6))

    async def start() -> Engine[ImageRequest, ImageSample]:
        number = next(numbers)
        factory: Callable[[], DiffusersEngine] = partial(logged, run.logs.absolute(), "engine", number, make)
        engine = await EngineProcess[ImageRequest, ImageSample].start(factory, num_threads=threads, preload=_PRELOAD)
        return TimedEngine(engine, devices, f"engine {number % rollout.num_processes}")

    engines = await asyncio.gather(*(start() for _ in range(rollout.num_processes)))
    return TimedEngine(EngineReplicas(engines, restart=start), devices, "")


async def _try(config: DiffusionConfig, policy: TimedEngine, prompts: PromptSets, rewards: list[Any]) -> None:
    """Make an image and score one, so that what cannot work is found before anything is trained."""
    sampling = ImageSampling(
        num_inference_steps=1,
        guidance_scale=config.rollout.guidance_scale,
        kernel=kernel_of(config),
        size=config.rollout.size if config.rollout.size != (0, 0) else None,
    )
    first = prompts.train[0]
    try:
        (made,) = await images(policy, [ImageRequest(request_id="try", prompt=first.text, sampling=sampling)])
    except (ValueError, TypeError, RuntimeError) as error:
        # Pipelines refuse what they do not like in their own words.
        if isinstance(error, RolloutError):
            raise
        raise UserError(f"the pipeline makes no image of {first.text!r} with these settings: {error}") from error
    height, width, _ = made.image.shape
    for reward in rewards:
        if reward is not None:
            await try_reward(reward, first, height=height, width=width)


def _train(
    config: DiffusionConfig,
    sampler: Sampler,
    learner: Learner,
    prompts: PromptSets,
    run: RunFolder,
    model: Path,
    runner: asyncio.Runner,
    display: Display,
    prometheus: Any,
) -> None:
    steps = Checkpointer(run.checkpoints).steps()
    first_step = steps[-1] if steps else 0
    total = config.trainer.total_training_steps
    if first_step >= total and run.export.is_dir():
        display.say(f"complete: {first_step} steps are done, more need a higher trainer.total_training_steps")
        return
    if first_step:
        display.say(f"resuming after step {first_step} of {total}")
    saved = learner.load() if first_step else None
    display.phase("training", total=total, done=first_step)
    rows = read_jsonl(run.metrics)
    job = Job(
        config=config,
        prompts=prompts,
        first_step=first_step,
        is_evaluated=first_step > 0
        and (
            first_step % config.trainer.test_freq != 0
            or any(row["step"] == first_step and "val/score/mean" in row for row in rows)
        ),
        controllers=saved["controllers"] if saved else None,
    )
    spans = SpanWriter(run.spans, last_step=first_step)
    tensorboard = config.trainer.tensorboard
    with MetricsWriter(run, last_step=first_step, tensorboard=tensorboard, prometheus=prometheus) as writer:
        recorder = RunRecorder(job, run, learner, writer=writer, spans=spans, display=display)
        try:
            runner.run(_run(job, recorder, sampler, learner))
        except BaseException as error:
            recorder.save_last()
            if isinstance(error, asyncio.CancelledError):
                raise KeyboardInterrupt from None
            raise
    write_atomically(run.export, lambda path: _export(learner, model, path))


async def _run(job: Job, recorder: RunRecorder, sampler: Sampler, learner: Learner) -> None:
    program = diffusion_program(job, recorder)

    async def controller(ctx: Context[Sampler]) -> None:
        part = SharedLearner(learner, ctx.group, ctx.roles.devices)
        await program(ctx.with_roles(Roles(**vars(ctx.roles), learner=part)))

    main = asyncio.current_task()
    assert main is not None
    with recorder.interrupt.cancels(main):
        await run_inline(controller, roles=sampler, world_size=job.config.controllers)


def _export(learner: Learner, model: Path, path: Path) -> None:
    """The pipeline's folder with the trained denoiser in it."""
    from gcore_trainer.diffusion.denoiser import component_of

    name, _ = component_of(model)
    shutil.copytree(model, path, ignore=lambda folder, _: [name] if Path(folder) == model else [])
    learner.save_pretrained(path / name)


def _differentiable(kind: str) -> Any:
    if ":" not in kind or kind.startswith(("http://", "https://")):
        return None
    return load_function(kind, setting="reward.kind")


def _score_of(gradient: Any) -> Callable[..., Any]:
    """The differentiable reward on finished images, for what is shown."""
    import torch

    def score(pixels: Any, prompts: Any, rows: Any) -> Any:
        del rows
        latents = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            return gradient(latents, prompts).double().numpy()

    return score
