"""Services of a run, in this process or on a Ray cluster; its recording and export, and images of a finished run."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gcore_controller import (
    Backend,
    Context,
    Recorder,
    TrainerGroup,
)
from gcore_diffusion.config import EVALUATED, FORWARD, DiffusionConfig
from gcore_diffusion.modality import ImageJob
from gcore_diffusion.sampling.grids import draw_pictures, write_grid, write_sheets
from gcore_diffusion.sampling.image_sampling import (
    DIVERSITY,
    HELD_OUT,
    TRAINED,
    ImageEvaluation,
    ImageRoles,
    ImageSamplingRoles,
    evaluation_sampling,
    has_log_probs,
    image_request,
    images,
    inputs_of,
    kernel_of,
    window_range,
)
from gcore_diffusion.sampling.prompts import ImagePrompt, ImagePromptSets
from gcore_diffusion.sampling.services import (
    ImageRewards,
    build_rewards,
    judge_factory,
    sampler_factory,
    start_engines,
)
from gcore_diffusion.trainer_worker import DiffusionTrainerWorker, num_passes, start_trainer
from gcore_rollout import (
    DiffusersEngine,
    ImageSample,
    ImageSampling,
    RolloutError,
    check_images,
    check_prompts,
    cut_prompts,
    evaluate_images,
)
from gcore_runs import (
    STAGE_CELLS,
    BaseRunRecorder,
    Cell,
    Display,
    RunFolder,
    UserError,
    json_object,
    read_jsonl,
    start_inline_backend,
)
from gcore_runs.engines import Instrumentation, device_timers
from gcore_runs.logs import logs_of
from gcore_runs.loop.recorder import format_metric
from gcore_trainer import pipeline_component

if TYPE_CHECKING:
    from gcore_controller import Handles
    from gcore_runs.on_ray import ControllerServices


_NAMED_PROMPTS = 3
"""Prompts that a warning names."""


def check_rewards(config: DiffusionConfig) -> ImageRewards | None:
    """Return the rewards; None: they need a judge, which is started with the engines."""
    if config.reward.is_judged:
        judge_factory(config)
        return None
    # On Ray they are only built here: the machine may have no GPU, and controllers have rewards of their own.
    device = "cpu" if config.runtime == "ray" else config.device
    return build_rewards(config, judge=None, device=device)


async def start(
    config: DiffusionConfig,
    model: Path,
    prompts: ImagePromptSets,
    rewards: ImageRewards | None,
    checkpoints: Path,
    display: Display,
) -> Backend[ImageJob, DiffusionConfig]:
    """Start the services, and a judge where ``rewards`` is None; make and score an image, on Ray by each controller."""
    for message in starting_messages(config, model, prompts):
        display.say(message)
    if config.runtime == "ray":
        from gcore_runs.on_ray import start_ray_backend

        return await start_ray_backend(
            config,
            engine=partial(sampler_factory, model=model),
            judges=dict.fromkeys(config.judges, judge_factory),
            trainer_spec=partial(DiffusionTrainerWorker.spec, model=model, checkpoints=checkpoints),
            run_controller=_run_controller,
            checkpoints=checkpoints,
            announce=display.say,
        )
    devices = device_timers(config)
    instrumentation = Instrumentation(
        devices=devices, logs=logs_of(checkpoints), announce=display.say
    )
    engines = AsyncExitStack()
    try:
        policy, judge = await start_engines(config, model, instrumentation, engines)
        rewards = rewards or build_rewards(config, judge=judge, device=config.device)
        sampler = ImageSamplingRoles(policy=policy, rewards=rewards, devices=devices)
        await _try(config, sampler, prompts)
        return await start_inline_backend(
            config,
            shared=sampler,
            judges=[] if judge is None else [judge],
            roles=ImageRoles,
            start_trainer=partial(start_trainer, config, model, checkpoints),
            close=engines.aclose,
        )
    except BaseException:
        await engines.aclose()
        raise


def starting_messages(config: DiffusionConfig, model: Path, prompts: ImagePromptSets) -> list[str]:
    """Return what a user should know of a pipeline's folder and prompts before a run."""
    messages: list[str] = []
    texts = [prompt.text for prompt in chain(prompts.train, prompts.val)]
    if config.rollout.negative_prompt:
        texts.append(config.rollout.negative_prompt)
    cut = cut_prompts(model, texts, max_sequence_length=config.rollout.max_sequence_length)
    if cut:
        beginnings = ", ".join(f"{text!r:.60}" for text in cut[:_NAMED_PROMPTS])
        messages.append(
            f"warning: the text encoders do not read the ends of {len(cut)} prompts: {beginnings}"
        )
    components = json_object((model / "model_index.json").read_text(), "model_index.json")
    if None not in components.get("safety_checker", [None]):
        messages.append("the pipeline's safety checker is left out: it would make images black")
    return messages


async def _try(
    config: DiffusionConfig, sampler: ImageSamplingRoles, prompts: ImagePromptSets
) -> None:
    """Make an image and score two grey ones of its size, so that an error is found before anything is trained."""
    rewards = list(filter(None, (sampler.rewards.trained, sampler.rewards.held_out)))
    all_prompts = [*prompts.train, *prompts.val]
    check_prompts(
        rewards, [prompt.text for prompt in all_prompts], [prompt.row for prompt in all_prompts]
    )
    first = prompts.train[0]
    num_steps = 2
    window = None
    if config.actor.component or has_log_probs(config):
        # Windows must be of steps of this transformer, and of steps with noise.
        window = window_range(config)
    if window is not None:
        num_steps = config.rollout.num_inference_steps
    sampling = ImageSampling(
        num_inference_steps=num_steps,
        window=window,
        guidance_scale=config.rollout.guidance_scale,
        kernel=kernel_of(config),
        size=config.rollout.image_size,
        negative_prompt=config.rollout.negative_prompt,
    )
    # A prompt of each number of images: pipelines may need images, or take none, or one.
    by_num_images = {len(prompt.images): prompt for prompt in all_prompts}
    try:
        requests = [
            image_request(prompt, f"try/{n}", sampling) for n, prompt in by_num_images.items()
        ]
        sample, *_ = await images(sampler.policy, requests)
    except (ValueError, TypeError, RuntimeError) as error:
        # Pipelines raise errors of these kinds for settings that they do not support.
        if isinstance(error, RolloutError):
            raise
        raise UserError(
            f"the pipeline makes no image of {first.text!r} with these settings: {error}"
        ) from error
    if has_log_probs(config):
        _check_noise(config, sample)
    if config.algorithm.name in FORWARD and sample.timestep_map is None:
        raise UserError(
            f"algorithm.name is {config.algorithm.name!r}; expected an algorithm of recorded steps, because the "
            "pipeline gives its model timesteps that are not a multiple of the time or of the time left"
        )
    check_images(rewards, *sample.image.shape[-3:-1])
    grey = replace(sample, image=np.full_like(sample.image, 128))
    for reward in rewards:
        await evaluate_images(
            reward, inputs_of(reward, [grey] * 2), [first.text] * 2, [first.row] * 2
        )


def _check_noise(config: DiffusionConfig, sample: ImageSample) -> None:
    """Raise `UserError` for an image with a recorded step that has no noise, and so no log-probability."""
    trajectory = sample.trajectory
    rollout = config.rollout
    noiseless = trajectory.steps[np.isnan(trajectory.log_probs)]
    if len(noiseless):
        raise UserError(
            f"rollout.window_range is {rollout.range_of_window}; expected steps with noise: step {noiseless[0]} of "
            f"{rollout.num_inference_steps} has none with rollout.kernel {rollout.kernel!r}"
        )


async def _run_controller(
    job: ImageJob, ctx: "Context[Handles]", services: "ControllerServices", recorder: Recorder
) -> None:
    """Build a controller's roles in its process on Ray, and run the program with them."""
    # Ray shows a controller the GPU that it reserves, or none.
    device = job.config.engine_device if job.config.gpus_per_controller else "cpu"
    rewards = build_rewards(job.config, judge=services.judges.get("judge"), device=device)
    roles = ImageRoles(
        policy=services.policy,
        rewards=rewards,
        devices=services.devices,
        learner=services.connect_trainer(ctx, num_passes),
        owns_process=True,
    )
    # Devices that engines share with training ranks are theirs to sample.
    await roles.learner.offload(ctx.timer)
    await _try(job.config, roles, job.prompts)
    await job.program(recorder)(ctx.with_roles(roles))


class ImageRunRecorder(BaseRunRecorder[ImageJob, ImageEvaluation]):
    """Recording of an image model's run: the pictures of its evaluations."""

    cells = (
        Cell("reward", "critic/score/mean", "{:.3f}"),
        Cell("not trained on", "held_out/score/mean", "{:.3f}"),
        Cell("accepted", "sampling/acceptance", "{:.0%}", "0%"),
        Cell("images/s", "perf/throughput", "{:,.1f}", "0.0"),
        *STAGE_CELLS,
    )
    _is_doubted = False

    def show_evaluation(self, step: int, evaluation: ImageEvaluation) -> dict[str, float]:
        metrics = evaluation.metrics()
        earlier = [row for row in read_jsonl(self.run.metrics) if DIVERSITY in row]
        self._is_doubted = False
        if earlier:
            doubts = evaluation.doubts(earlier)
            self._is_doubted = doubts is not None
            if doubts:
                self.warnings.warn(step, doubts, key="trained reward alone")
        folder = self.run.samples / f"step-{step:06}"
        n = self.job.config.rollout.eval_n
        write_grid(folder.with_suffix(".png"), evaluation.images, evaluation.prompts, per_prompt=n)
        write_sheets(folder, evaluation, per_prompt=n)
        self.writer.write_images(step, draw_pictures(evaluation, per_prompt=n))
        labels = dict(EVALUATED)
        for name in evaluation.parts:
            labels[name] = name.removeprefix("val/").removesuffix("/mean")
        results = ", ".join(
            f"{label} {format_metric(metrics[name])}"
            for name, label in labels.items()
            if name in metrics
        )
        self.display.say(f"step {step}: held-out images: {results}")
        return metrics

    def score(self, metrics: Mapping[str, float]) -> float | None:
        return None if self._is_doubted else metrics.get(HELD_OUT, metrics[TRAINED])


def export(
    learner: TrainerGroup, model: Path, path: Path, best: Path | None = None, *, component: str = ""
) -> None:
    """Write the pipeline's folder with the trained denoiser in it, or the one in the folder ``best``.

    Adapters are merged into the denoiser; the folder ``lora`` has them alone.
    """
    name, _ = pipeline_component(model, component)
    shutil.copytree(model, path, ignore=lambda folder, _: [name] if Path(folder) == model else [])
    if best is None:
        learner.save_pretrained(path)
    else:
        shutil.copytree(best, path, dirs_exist_ok=True)


async def sample_run(
    run: Path,
    prompt: str,
    *,
    image: Sequence[Path],
    n: int,
    num_inference_steps: int,
    guidance_scale: float,
    seed: int,
    out: Path,
) -> None:
    """Write a PNG file with a grid of images by a finished run's policy; `UserError` if there is none."""
    folder, config = RunFolder.open_with_config(run, DiffusionConfig)
    if not folder.export.is_dir():
        raise UserError(
            f"{run} has no export: the run is not finished; the command train continues it"
        )
    rollout = config.rollout
    sampling = evaluation_sampling(
        config, num_inference_steps=num_inference_steps, guidance_scale=guidance_scale
    )
    image_prompt = ImagePrompt(text=prompt, row={}, images=tuple(image))
    try:
        request = image_request(image_prompt, "sample", sampling, n=n, seed=seed)
    except RolloutError as error:
        raise UserError(f"image is {', '.join(map(str, image))}: {error}") from None
    engine = DiffusersEngine.from_pretrained(
        folder.export,
        device=config.device,
        dtype=rollout.dtype,
        options=rollout.pipeline_options,
        size=rollout.image_size,
        component=config.actor.component,
    )
    try:
        samples = await images(engine, [request])
    finally:
        await engine.close()
    write_grid(out, np.stack([sample.image for sample in samples]), [prompt] * n, per_prompt=n)
