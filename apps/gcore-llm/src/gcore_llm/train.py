"""`gcore-llm train`: from a config to a finished run's folder."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from gcore_controller import Backend, DeviceTimers, TrainerGroup
from gcore_llm.config import MAY_CHANGE, TrainConfig
from gcore_llm.engines import check_engine
from gcore_llm.evaluate import Evaluation
from gcore_llm.micro_batches import workload_of
from gcore_llm.modality import Job, is_evaluation_due
from gcore_llm.model_limits import check_lengths
from gcore_llm.prompts import PromptSets, load_files
from gcore_llm.recorder import RunRecorder
from gcore_llm.report import write_report
from gcore_llm.rewards import Rewards
from gcore_llm.roles import build_environment, build_tokenizer, check_model
from gcore_llm.services import Inputs, start_inline
from gcore_llm.tasks import load_task
from gcore_llm.tiny_model import make_tiny_model, tiny_tokenizer
from gcore_llm.warmup import require_worked_examples, warm_up
from gcore_rollout import Failed
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


def train(config: TrainConfig, display: Display) -> Result:
    """Run, or go on with, the job that ``config`` describes.

    Raises:
        UserError: wrong settings, found before anything is written.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    import torch

    config = resolve(config)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if not config.model and not config.task.name:
        raise UserError("model is not set: a local Hugging Face folder is needed with data.train_files")
    if config.model:
        check_model(Path(config.model))
    elif config.rollout.is_on_servers:
        raise UserError(f"rollout.engine is {config.rollout.engine!r} and model is not set: servers need a model")
    if config.critic.model and config.algorithm.estimator.needs_critic:
        check_model(Path(config.critic.model), setting="critic.model")
    if config.rollout.speculative.model:
        check_model(Path(config.rollout.speculative.model), setting="rollout.speculative.model")
    _check_policy_engine(config)
    if config.model:
        tokenizer = build_tokenizer(Path(config.model))
    else:
        require_worked_examples(
            config.task.name,
            instead="on which the embedded model is warmed up, or a model of your own for any task: --model FOLDER",
        )
        tokenizer = tiny_tokenizer()
    prompts = load_prompts(config, tokenizer)
    check_lengths(config, prompts)
    if config.runtime == "ray":
        from gcore_runs.on_ray.cluster import check_cluster

        check_cluster(config)
    # One event loop for all of it: a user's async reward may keep what belongs to the loop of its first call.
    host, port = config.trainer.prometheus_host, config.trainer.prometheus_port
    server = metrics_server(run=config.name, port=port, host=host, app="gcore-llm")
    with at_once(), server as prometheus, asyncio.Runner() as runner:
        devices = DeviceTimers()
        rewards = runner.run(
            Rewards.start(config, instrumentation=Instrumentation(devices=devices, announce=display.say))
        )
        try:
            runner.run(_try_rewards(rewards, prompts, display, timeout_s=config.reward_calls.timeout_s))
            environment = build_environment(config, tokenizer, rewards.runner)
            inputs = Inputs(
                config=config,
                tokenizer=tokenizer,
                prompts=prompts,
                rewards=rewards,
                environment=environment,
                devices=devices,
                prometheus=prometheus,
                announce=display.say,
            )
            run = _run_with(inputs, runner, display)
        finally:
            runner.run(rewards.close())
    return _finish(run, display)


def _check_policy_engine(config: TrainConfig) -> None:
    rollout = config.rollout
    if rollout.weights_dir and not Path(rollout.weights_dir).is_dir():
        raise UserError(f"rollout.weights_dir is {rollout.weights_dir!r}: an existing folder is needed")
    check_engine(rollout, Path(config.model), setting="rollout", max_length=config.data.max_length)


def _run_with(inputs: Inputs, runner: asyncio.Runner, display: Display) -> RunFolder:
    config, prompts = inputs.config, inputs.prompts
    run = open_run(config, may_change=MAY_CHANGE)
    display.say(f"run folder: {run.path}")
    if prompts.num_too_long:
        display.say(f"left out {prompts.num_too_long} prompts longer than {config.data.max_prompt_length} tokens")
    display.say(f"{len(prompts.train):,} training prompts, {len(prompts.val):,} held out")
    if not config.model and not run.model.is_dir():
        _warm_up(inputs, run, runner, display)
    model = Path(config.model) if config.model else run.model
    with log_to(run.logs, "main"):
        _train(inputs, run, model, runner, display)
    return run


def load_prompts(config: TrainConfig, tokenizer: Any) -> PromptSets:
    """The prompts that the config names."""
    if config.task.name:
        return load_task(config.task, config.data, tokenizer, seed=config.seed)
    if not config.data.train_files:
        raise UserError("data.train_files is not set: one or more .jsonl or .parquet files are needed with model")
    return load_files(config.data, tokenizer, seed=config.data.shuffle_seed)


async def _try_rewards(rewards: Rewards, prompts: PromptSets, display: Display, *, timeout_s: float) -> None:
    """Call each once, so that a broken one is found before the model is loaded."""
    first = prompts.train[0]
    display.say(f"trying the reward on an empty response, for at most {timeout_s:g} s")
    scored = await rewards.runner.try_on(prompt=first.text, completion="", row=first.row)
    if isinstance(scored, Failed):
        display.say(f"warning: the trial gave no score: {scored.error}")
    if rewards.comparison is not None:
        await rewards.comparison.try_on(first)


def _warm_up(inputs: Inputs, run: RunFolder, runner: asyncio.Runner, display: Display) -> None:
    """Make the embedded model and warm it up."""
    config = inputs.config
    initial = run.path / "initial-model"
    write_atomically(initial, lambda path: make_tiny_model(path, seed=config.seed))
    runner.run(warm_up(config, run, initial, inputs.prompts, inputs.tokenizer, inputs.rewards.runner, display))
    shutil.rmtree(initial)


def _train(inputs: Inputs, run: RunFolder, model: Path, runner: asyncio.Runner, display: Display) -> None:
    config = inputs.config
    first_step = steps_made(run, config.trainer.total_training_steps, display)
    if first_step is None:
        return
    shutil.rmtree(run.export, ignore_errors=True)
    services = runner.run(_start(inputs, model, run.checkpoints))

    def recorder(job: Job, writer: MetricsWriter, spans: SpanWriter) -> RunRecorder:
        return RunRecorder(job, run, services.learner, writer=writer, spans=spans, display=display)

    with closed(services, runner):
        job = Job(
            config=services.config,
            prompts=inputs.prompts,
            workload=workload_of(model),
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
            prometheus=inputs.prometheus,
        ).to_the_end(job)
        write_atomically(run.export, lambda path: _export(services.learner, inputs.tokenizer, path))


def _is_evaluated(run: RunFolder, config: TrainConfig, step: int) -> bool:
    if step and not is_evaluation_due(config, step):
        return True
    return step > 0 and any(r["step"] == step and "val/greedy/score/mean" in r for r in read_jsonl(run.metrics))


async def _start(inputs: Inputs, model: Path, checkpoints: Path) -> Backend[Job, TrainConfig, Evaluation]:
    if inputs.config.runtime == "ray":
        from gcore_llm.on_ray import start_on_ray

        return await start_on_ray(inputs, model, checkpoints)
    return await start_inline(inputs, model, checkpoints)


def _export(learner: TrainerGroup, tokenizer: Any, path: Path) -> None:
    learner.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _finish(run: RunFolder, display: Display) -> Result:
    has_signal = check_signal(run, RunWarnings(run, display))
    finish_report(write_report, run)
    rows = [r for r in read_jsonl(run.metrics) if "val/greedy/score/mean" in r]
    return Result(run=run.path, before=rows[0] if rows else {}, after=rows[-1] if rows else {}, has_signal=has_signal)
