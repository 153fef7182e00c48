"""`gcore-diffusion train`: from settings to a finished run and its report."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_diffusion.config import DemoConfig, DiffusionConfig
from gcore_diffusion.demo.digits import PROMPTS
from gcore_diffusion.sampling.prompts import load_prompts
from gcore_runs import (
    Kind,
    RunResult,
    Supervisor,
    UserError,
    json_object,
    model_folder,
    resolve,
    with_adapter,
    write_atomically,
)
from gcore_runs.inputs import check_safetensors

if TYPE_CHECKING:
    from gcore_runs import Display

_KIND = Kind(
    title="Reward per step",
    unit="mean score of the step's images; marks: images of held-out prompts, made without noise",
    name="reward",
    key="critic/score/mean",
    measure="reward",
    evaluations={"trained on": "val/score/mean", "not trained on": "val/held_out/mean"},
    tiles={
        "val/held_out/mean": "Held-out reward, not trained on",
        "val/diversity": "Diversity within prompts",
    },
    signals=(
        ("Reward not trained on", "held_out/score/mean", "mean score of some of the step's images"),
        (
            "Diversity within prompts",
            "val/diversity",
            "standard deviation of a pixel over a prompt's held-out images",
        ),
        ("KL to the initial policy", "actor/kl_loss", "mean over dimensions"),
        ("Policy loss", "actor/pg_loss", "clipped objective, no unit"),
        ("Preference loss", "actor/dpo_loss", "mean of pairs, no unit"),
        ("KL to the teacher", "actor/distillation_loss", "mean over dimensions"),
        ("Clipped", "actor/pg_clipfrac", "share of steps whose ratio the clip cuts"),
        ("KL to the sampling policy", "actor/ppo_kl", "mean over dimensions"),
        (
            "Engine-trainer mismatch",
            "training/rollout_ratio_dev",
            "mean distance of the ratio from 1 before an update",
        ),
        ("Gradient norm", "actor/grad_norm", "L2 norm"),
        ("Spread of scores", "critic/score/std", "standard deviation"),
        ("Acceptance of sampling", "sampling/acceptance", "share of groups kept"),
        ("Throughput", "perf/throughput", "images/s"),
    ),
    throughput_unit="images/s",
    has_pictures=True,
    after_warmup="",
)

_DEMO = DemoConfig()
KINDS = {"diffusion": _KIND, "train": _KIND, "simulate": _KIND}
"""The contents of the report of a run, by command."""


def train(
    config: DiffusionConfig, display: "Display | None" = None, *, demo: DemoConfig = _DEMO
) -> RunResult:
    """Train a diffusion model on a reward, or resume the run of this name.

    Without a display, `logging` gets what it would show. The embedded model of a new run is pretrained as in ``demo``.

    Raises:
        UserError: wrong settings or data, found before anything is trained.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    from gcore_diffusion.backend import ImageRunRecorder, check_rewards, export, start
    from gcore_diffusion.modality import ImageJob

    config = resolve(config)
    with Supervisor(config, app="gcore-diffusion", display=display) as supervisor:
        pipeline = None
        if config.model:
            pipeline = model_folder(config.model)
            check_pipeline(pipeline)
        config = with_initial_lora(config, pipeline)
        prompts = load_prompts(config.data, PROMPTS, size=config.rollout.image_size)
        config = config.over_rows(len(prompts.train))
        supervisor.take_length(config)
        rewards = check_rewards(config)
        run = supervisor.open_run()
        if supervisor.resume(config.trainer.total_training_steps) is not None:
            model = pipeline or run.model
            if not model.is_dir():
                from gcore_diffusion.demo.pretraining import pretrained_pipeline

                model = pretrained_pipeline(demo, seed=0, display=supervisor.display)
            supervisor.display.say("trying the pipeline and the reward on an image")
            starting = start(config, model, prompts, rewards, run.checkpoints, supervisor.display)
            # On Ray they were only built, and need memory no longer.
            del rewards
            with supervisor.run_services(starting) as services:
                if not config.model and not run.model.is_dir():
                    # Where the run is resumed from, with whichever options.
                    write_atomically(run.model, partial(shutil.copytree, model))
                # Engines start from the pipeline's folder, without adapters.
                starts_adapted = bool(config.actor.lora_adapter_path)
                job = ImageJob(config=config, prompts=prompts, is_policy_behind=starts_adapted)
                supervisor.train(services, job, ImageRunRecorder)
                best = supervisor.best_policy()
                component = config.actor.component
                supervisor.export(
                    lambda path: export(services.learner, model, path, best, component=component)
                )
        return supervisor.finish(KINDS)


def with_initial_lora(config: DiffusionConfig, pipeline: Path | None) -> DiffusionConfig:
    """Return settings with rank, alpha, layers and scale of the adapters that the policy starts from, if any.

    ``pipeline`` is its folder; None: that of the demo.

    Raises:
        UserError: there are none of the pipeline's model, or other settings are given.
    """
    if not config.actor.lora_adapter_path:
        return config
    from gcore_trainer import pipeline_component, read_component_lora_config

    component = "transformer"
    if pipeline is not None:
        component, _ = pipeline_component(pipeline, config.actor.component)
    read = partial(read_component_lora_config, component=component)
    return replace(config, actor=with_adapter(config.actor, read))


def check_pipeline(model: Path) -> None:
    """Raise `UserError` unless a folder is of a diffusers pipeline with all components, and no damaged weights."""
    index = model / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"model is {str(model)!r}; expected a folder of a diffusers pipeline, with model_index.json"
        )
    for name, value in json_object(index.read_text(), str(index)).items():
        # A library and a class; the pipeline does without components that are null.
        if name.startswith("_") or not isinstance(value, list) or None in value:
            continue
        if not (model / name).is_dir():
            # diffusers would look for its files in the pipeline's own folder, and make an empty tokenizer without any.
            raise UserError(
                f"model folder {model} lacks the folder {name}, which model_index.json names"
            )
        check_safetensors(model / name)
