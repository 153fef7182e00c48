"""`gcore-llm train`: from settings to a finished run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import PromptSets, check_lengths, load_files
from gcore_llm.data.tasks import load_task, require_worked_examples
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_runs import Result, Supervisor, UserError, build_tokenizer, check_model, resolve

if TYPE_CHECKING:
    from gcore_llm.sampling.rewards import Rewards
    from gcore_runs import Display


def train(config: TrainConfig, display: "Display | None" = None) -> Result:
    """Train a policy by reinforcement learning, or resume the run of this name.

    Args:
        config: the run's settings.
        display: where progress is shown; None: nowhere, and `logging` gets the same lines.

    Returns:
        the run's folder, and its first and last evaluation.

    Raises:
        UserError: wrong settings or data, found before anything is written.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    from gcore_controller import DeviceTimers
    from gcore_llm.backend import build_environment, start_backend
    from gcore_llm.learning.preparation import workload_of
    from gcore_llm.modality import Job
    from gcore_llm.recorder import RunRecorder
    from gcore_llm.sampling.rewards import Rewards
    from gcore_runs.loop.instrumented_engine import Instrumentation

    config = resolve(config)
    if config.runtime == "sim":
        from gcore_llm.simulate import train_simulated

        return train_simulated(config, display)
    with Supervisor(config, app="gcore-llm", display=display) as supervisor:
        say, devices = supervisor.display.say, DeviceTimers()
        tokenizer = _checked_tokenizer(config)
        prompts = load_prompts(config, tokenizer)
        check_lengths(config, prompts)
        instrumentation = Instrumentation(devices=devices, announce=say)
        with supervisor.started(Rewards.start(config, instrumentation=instrumentation)) as rewards:
            say(f"trying the reward on an empty response, for at most {config.reward_calls.timeout_s:g} s")
            supervisor.run_async(_try_rewards(rewards, prompts, supervisor))
            environment = build_environment(config, tokenizer, rewards.runner)
            run = supervisor.open_run(*_notices(config, prompts))
            if not config.model and not run.model.is_dir():
                from gcore_llm.finetune.warmup import make_warm_model

                making = make_warm_model(config, run, prompts, tokenizer, rewards.runner, supervisor.display)
                supervisor.run_async(making)
            if supervisor.resume(config.trainer.total_training_steps) is not None:
                model = Path(config.model) if config.model else run.model
                starting = start_backend(
                    config,
                    model,
                    run.checkpoints,
                    tokenizer=tokenizer,
                    rewards=rewards,
                    environment=environment,
                    devices=devices,
                    announce=say,
                )
                with supervisor.started(starting) as backend:
                    job = Job(config=config, prompts=prompts, workload=workload_of(model))
                    supervisor.train(backend, job, RunRecorder)

                    def export(path: Path) -> None:
                        backend.learner.save_pretrained(path)
                        tokenizer.save_pretrained(path)

                    supervisor.export(export)
        from gcore_llm.report import KINDS

        return supervisor.finish(KINDS)


def load_prompts(config: TrainConfig, tokenizer: Any) -> PromptSets:
    """Load the prompts that the config names, from a task or from files."""
    if config.task.name:
        return load_task(config.task, config.data, tokenizer, seed=config.seed)
    if not config.data.train_files:
        raise UserError("data.train_files is not set; expected one or more .jsonl or .parquet files with model")
    return load_files(config.data, tokenizer, seed=config.data.shuffle_seed)


def _checked_tokenizer(config: TrainConfig) -> Any:
    """Check the models and engine that the config names, and return the policy's tokenizer."""
    from gcore_llm.sampling.engines import check_engine

    rollout, model = config.rollout, Path(config.model)
    if not config.model and not config.task.name:
        raise UserError("model is not set; expected a local Hugging Face folder with data.train_files")
    if config.model:
        check_model(model)
    elif rollout.is_on_servers:
        raise UserError(f"model is not set; expected a folder with rollout.engine {rollout.engine!r}")
    if config.critic.model and config.algorithm.estimator.needs_critic:
        check_model(Path(config.critic.model), setting="critic.model")
    if rollout.speculative.model:
        check_model(Path(rollout.speculative.model), setting="rollout.speculative.model")
    if rollout.weights_dir and not Path(rollout.weights_dir).is_dir():
        raise UserError(f"rollout.weights_dir is {rollout.weights_dir!r}; expected an existing folder")
    check_engine(rollout, model, setting="rollout", max_length=config.data.max_length)
    if config.model:
        return build_tokenizer(model)
    require_worked_examples(
        config.task.name,
        instead="on which the embedded model is warmed up, or a model of your own for any task: --model FOLDER",
    )
    return tiny_tokenizer()


def _notices(config: TrainConfig, prompts: PromptSets) -> list[str]:
    left_out = f"left out {prompts.num_too_long} prompts longer than {config.data.max_prompt_length} tokens"
    sizes = f"{len(prompts.train):,} training prompts, {len(prompts.val):,} held out"
    return [left_out, sizes] if prompts.num_too_long else [sizes]


async def _try_rewards(rewards: "Rewards", prompts: PromptSets, supervisor: Supervisor) -> None:
    """Call each reward once, so that a broken one is found before the model is loaded."""
    from gcore_rollout import Failed

    first = prompts.train[0]
    scored = await rewards.runner.try_on(prompt=first.text, completion="", row=first.row)
    if isinstance(scored, Failed):
        supervisor.display.say(f"warning: the trial gave no score: {scored.error}")
    if rewards.comparison is not None:
        await rewards.comparison.try_on(first)
