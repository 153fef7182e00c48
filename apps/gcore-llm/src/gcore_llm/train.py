"""`gcore-llm train`: from a config to a finished run's folder."""

import asyncio
import math
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_ckpt import Checkpointer
from gcore_controller import run_inline
from gcore_llm.config import TrainConfig
from gcore_llm.display import Display
from gcore_llm.engines import check_servers
from gcore_llm.errors import RankError, UserError
from gcore_llm.evaluate import Evaluation
from gcore_llm.exchange import workload_of
from gcore_llm.interrupt import Interrupt
from gcore_llm.metrics import MetricsWriter
from gcore_llm.program import Job, State, is_evaluation_due, rlhf_program
from gcore_llm.prompts import PromptSets, load_files
from gcore_llm.report import write_report
from gcore_llm.rewards import Rewards
from gcore_llm.roles import Roles, World, build_roles, build_tokenizer, build_world, check_model
from gcore_llm.run_folder import RunFolder, open_run, read_jsonl, write_atomically, write_jsonl
from gcore_llm.settings import resolve
from gcore_llm.tasks import load_task
from gcore_llm.tiny_model import make_tiny_model, tiny_tokenizer
from gcore_llm.warmup import require_worked_examples, warm_up


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run achieved on held-out prompts: its first evaluation and its last."""

    run: Path
    before: dict[str, float]
    after: dict[str, float]


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
        _check_policy_servers(config)
        tokenizer = build_tokenizer(Path(config.model))
    else:
        if config.rollout.is_on_servers:
            raise UserError(f"rollout.engine is {config.rollout.engine!r} and model is not set: servers need a model")
        require_worked_examples(config.task.name)
        tokenizer = tiny_tokenizer()
    prompts = load_prompts(config, tokenizer)
    # One event loop for all of it: a user's async reward may keep what belongs to the loop of its first call.
    with asyncio.Runner() as runner:
        rewards = runner.run(Rewards.start(config))
        try:
            runner.run(_try_rewards(rewards, prompts))
            world = build_world(config, tokenizer, rewards.runner)
            inputs = _Inputs(tokenizer=tokenizer, prompts=prompts, rewards=rewards, world=world)
            run = _run_with(config, inputs, runner, display)
        finally:
            runner.run(rewards.close())
    return _finish(run)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What a run is given, beside its models; found to be in order before it begins."""

    tokenizer: Any
    prompts: PromptSets
    rewards: Rewards
    world: World | None


def _check_policy_servers(config: TrainConfig) -> None:
    rollout = config.rollout
    if rollout.weights_dir and not Path(rollout.weights_dir).is_dir():
        raise UserError(f"rollout.weights_dir is {rollout.weights_dir!r}: an existing folder is needed")
    longest = config.data.max_prompt_length + config.data.max_response_length
    check_servers(rollout, Path(config.model), max_length=longest)


def _run_with(config: TrainConfig, inputs: _Inputs, runner: asyncio.Runner, display: Display) -> RunFolder:
    prompts = inputs.prompts
    run = open_run(config)
    display.say(f"run folder: {run.path}")
    if prompts.num_too_long:
        display.say(f"left out {prompts.num_too_long} prompts longer than {config.data.max_prompt_length} tokens")
    display.say(f"{len(prompts.train):,} training prompts, {len(prompts.val):,} held out")
    if not config.model and not run.model.is_dir():
        _warm_up(config, run, inputs, runner, display)
    model = Path(config.model) if config.model else run.model
    _train(config, run, model, inputs, runner, display)
    return run


def load_prompts(config: TrainConfig, tokenizer: Any) -> PromptSets:
    """The prompts that the config names."""
    if config.task.name:
        return load_task(config.task, config.data, tokenizer, seed=config.seed)
    if not config.data.train_files:
        raise UserError("data.train_files is not set: one or more .jsonl or .parquet files are needed with model")
    return load_files(config.data, tokenizer, seed=config.data.shuffle_seed)


async def _try_rewards(rewards: Rewards, prompts: PromptSets) -> None:
    """Call each once, so that a broken one is found before the model is loaded."""
    first = prompts.train[0]
    await rewards.runner.score(prompt=first.text, completion="", row=first.row)
    if rewards.comparison is not None:
        await rewards.comparison.try_on(first)


def _warm_up(config: TrainConfig, run: RunFolder, inputs: _Inputs, runner: asyncio.Runner, display: Display) -> None:
    """Make the embedded model and warm it up."""
    initial = run.path / "initial-model"
    write_atomically(initial, lambda path: make_tiny_model(path, seed=config.seed))
    runner.run(warm_up(config, run, initial, inputs.prompts, inputs.tokenizer, inputs.rewards.runner, display))
    shutil.rmtree(initial)


def _train(
    config: TrainConfig,
    run: RunFolder,
    model: Path,
    inputs: _Inputs,
    runner: asyncio.Runner,
    display: Display,
) -> None:
    steps = Checkpointer(run.checkpoints).steps()
    first_step = steps[-1] if steps else 0
    total = config.trainer.total_training_steps
    if first_step >= total and run.export.is_dir():
        display.say(f"complete: {first_step} steps are done, more need a higher trainer.total_training_steps")
        return
    if first_step:
        display.say(f"resuming after step {first_step} of {total}")
    shutil.rmtree(run.export, ignore_errors=True)
    roles = runner.run(
        build_roles(
            config,
            model,
            run.checkpoints,
            inputs.tokenizer,
            inputs.rewards.runner,
            comparison=inputs.rewards.comparison,
            world=inputs.world,
        )
    )
    with closing(roles.learner), _policy_closed(roles, runner):
        saved = roles.learner.load() if first_step else None
        display.phase("training", total=total, done=first_step)
        with MetricsWriter(run, last_step=first_step, tensorboard=config.trainer.tensorboard) as writer:
            interrupt = Interrupt()
            recorder = _Recorder(config, run, roles, writer, display, interrupt)
            job = Job(
                config=config,
                prompts=inputs.prompts,
                workload=workload_of(model),
                recorder=recorder,
                first_step=first_step,
                is_evaluated=_is_evaluated(config, run, first_step),
                controllers=saved["controllers"] if saved else None,
            )
            try:
                runner.run(_run(job, roles, interrupt))
            except BaseException as error:
                if not isinstance(error, RankError):
                    recorder.save_last()
                if isinstance(error, asyncio.CancelledError):
                    raise KeyboardInterrupt from None
                raise
        write_atomically(run.export, lambda path: _export(roles, path))


def _is_evaluated(config: TrainConfig, run: RunFolder, step: int) -> bool:
    if step and not is_evaluation_due(config, step):
        return True
    return step > 0 and any(r["step"] == step and "val/greedy/score/mean" in r for r in read_jsonl(run.metrics))


@contextmanager
def _policy_closed(roles: Roles, runner: asyncio.Runner) -> Generator[None]:
    """Close the policy's engine behind the block, however that ends."""
    try:
        yield
    finally:
        runner.run(roles.policy.close())


async def _run(job: Job, roles: Roles, interrupt: Interrupt) -> None:
    main = asyncio.current_task()
    assert main is not None
    with interrupt.cancels(main):
        if job.first_step:
            await roles.policy.update_weights(roles.learner.export_weights(), version=job.first_step)
        await run_inline(rlhf_program(job), roles=roles, world_size=job.config.controllers)


def _export(roles: Roles, path: Path) -> None:
    roles.learner.save_pretrained(path)
    roles.tokenizer.save_pretrained(path)


class _Recorder:
    """Writes metrics, samples and checkpoints, and keeps the display up to date."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        roles: Roles,
        writer: MetricsWriter,
        display: Display,
        interrupt: Interrupt,
    ) -> None:
        self._config = config
        self._run = run
        self._roles = roles
        self._writer = writer
        self._display = display
        self._interrupt = interrupt
        self._unsaved: tuple[int, int, list[State]] | None = None

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._writer.write(step, evaluation.metrics())
        self._display.evaluated(step, greedy=evaluation.greedy, sampled=evaluation.sampled)
        name = "before" if step == 0 else "after"
        write_jsonl(self._run.samples / f"{name}.jsonl", evaluation.samples)

    def updating(self) -> AbstractContextManager[None]:
        return self._interrupt.held_back()

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._writer.write(step, metrics)
        self._display.stepped(step, metrics)
        if not all(math.isfinite(v) for v in metrics.values()):
            self._display.say(f"step {step}: the gradient is not finite, the update was skipped")

    def reached(self, step: int, controllers: list[State]) -> None:
        self._unsaved = (step, self._roles.learner.num_updates, controllers)
        if step % self._config.trainer.save_freq == 0 or step == self._config.trainer.total_training_steps:
            self.save_last()

    def save_last(self) -> None:
        """Checkpoint the last finished step, unless a model has moved on since."""
        if self._unsaved is None or self._unsaved[1] != self._roles.learner.num_updates:
            return
        step, _, controllers = self._unsaved
        self._unsaved = None
        self._roles.learner.save(step, {"step": step, "controllers": controllers})


def _finish(run: RunFolder) -> Result:
    write_report(run.path)
    rows = [r for r in read_jsonl(run.metrics) if "val/greedy/score/mean" in r]
    return Result(run=run.path, before=rows[0] if rows else {}, after=rows[-1] if rows else {})
