"""Making the embedded model: a tiny one, trained on a task's worked examples."""

import shutil
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_llm.agents.worked import work_episodes
from gcore_llm.config import TrainConfig
from gcore_llm.data.tasks import WORKED_EXAMPLES
from gcore_llm.finetune.config import FineTuneConfig, PairsConfig
from gcore_llm.finetune.data import Row
from gcore_llm.prompts import PromptSets
from gcore_llm.sections import WarmupConfig
from gcore_llm.tiny_model import make_tiny_model
from gcore_runs import Display, RunFolder, write_atomically, write_jsonl
from gcore_runs.inputs import eos_token_ids
from gcore_runs.run_folder import append_json
from gcore_trainer import OptimizerConfig, Sample

if TYPE_CHECKING:
    from pathlib import Path

    from gcore_rollout import EpisodeRole, RewardRunner
    from gcore_trainer import TorchTrainer

Check = Callable[["TorchTrainer", int, float], Awaitable[bool]]
"""Called with the trainer, an update's number and its loss; returns whether the model is good enough."""


async def make_warm_model(
    config: TrainConfig,
    run: RunFolder,
    prompts: PromptSets,
    tokenizer: Any,
    reward: "RewardRunner",
    display: Display,
    *,
    warmup: WarmupConfig,
    episodes: "EpisodeRole | None",
) -> None:
    """Make ``run.model``: the embedded model, trained until it samples enough right answers to held-out prompts.

    With ``episodes`` of an agent, the worked examples are conversations of the agent; see `work_episodes`.
    """
    from gcore_llm.evaluation.evaluate import ValSet, evaluate
    from gcore_llm.sampling import sampling_params, start_policy
    from gcore_rollout import RolloutRoles
    from gcore_runs.engines import Instrumentation

    worked = WORKED_EXAMPLES[config.task.name]
    if episodes is None:
        samples = [_worked_sample(tokenizer, p.token_ids, worked(p.row)) for p in prompts.train]
    else:
        samples = await work_episodes(config, episodes, prompts.train, tokenizer, display)
    initial = _initial_model(run, config.seed)
    eos = eos_token_ids(tokenizer, initial)
    policy = await start_policy(
        config, initial, eos_token_ids=eos, instrumentation=Instrumentation(logs=run.logs)
    )
    roles = RolloutRoles(policy=policy, reward=reward, tokenizer=tokenizer, episodes=episodes)
    held_out = [ValSet(prompts=prompts.val, sampling=sampling_params(config), n=1)]

    async def check(trainer: "TorchTrainer", step: int, loss: float) -> bool:
        await policy.update_weights(trainer.export_weights(), version=step)
        result = await evaluate(roles, held_out)
        accuracy = result.sampled_mean or 0.0
        append_json(run.warmup, {"step": step, "sft/loss": loss} | result.metrics())
        cells = [("loss", f"{loss:.3f}"), ("held-out accuracy", f"{accuracy:.3f}")]
        display.show_progress(step, cells, unit="warm-up")
        return accuracy >= warmup.target_accuracy

    options: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "max_length": config.data.max_length,
    }
    try:
        trainer = _trainer(initial, warmup.lr, warmup_steps=50, device=config.device, **options)
        await _train(
            trainer, samples, warmup, run, tokenizer, display, seed=config.seed, check=check
        )
    finally:
        await policy.close()


async def make_model(
    config: FineTuneConfig, run: RunFolder, tokenizer: Any, rows: Sequence[Row], display: Display
) -> None:
    """Make ``run.model``, a tiny model; for pairs it is trained on the chosen answers first."""
    steps = config.warmup_steps if isinstance(config, PairsConfig) else 0
    if not steps:
        write_atomically(run.model, lambda path: make_tiny_model(path, seed=config.seed))
        return
    warmup = WarmupConfig(max_steps=steps, batch_size=64)
    samples = [
        _worked_sample(tokenizer, tokenizer(row["prompt"])["input_ids"], row["chosen"])
        for row, _ in rows
    ]

    async def check(trainer: "TorchTrainer", step: int, loss: float) -> bool:
        del trainer
        display.show_progress(step, [("loss", f"{loss:.3f}")])
        append_json(run.warmup, {"step": step, "sft/loss": loss})
        return False

    trainer = _trainer(
        _initial_model(run, config.seed), warmup.lr, warmup_steps=20, device=config.device
    )
    await _train(trainer, samples, warmup, run, tokenizer, display, seed=config.seed, check=check)


def _initial_model(run: RunFolder, seed: int) -> "Path":
    initial = run.path / "initial-model"
    write_atomically(initial, lambda path: make_tiny_model(path, seed=seed))
    return initial


def _worked_sample(tokenizer: Any, prompt_ids: Sequence[int], answer: str) -> Sample:
    """Return a prompt with its worked answer, to be learned to the end of the sequence."""
    response = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return Sample(prompt_ids=np.array(prompt_ids), response_ids=np.array(response))


def _trainer(model: "Path", lr: float, *, warmup_steps: int, **options: Any) -> "TorchTrainer":
    from gcore_trainer import PackedModel, SFTObjective, TorchTrainer

    packed = PackedModel.from_pretrained(model, **options)
    optimizer = OptimizerConfig(lr=lr, betas=(0.9, 0.95), lr_warmup_steps=warmup_steps)
    return TorchTrainer(packed, optimizer=optimizer, objective=SFTObjective())


async def _train(
    trainer: "TorchTrainer",
    samples: Sequence[Sample],
    warmup: WarmupConfig,
    run: RunFolder,
    tokenizer: Any,
    display: Display,
    *,
    seed: int,
    check: Check,
) -> None:
    """Train on random batches until a check, of which the last update has one, ends it; write ``run.model``."""
    write_jsonl(run.warmup, [])
    display.phase("warm-up (supervised)", total=warmup.max_steps)
    order = np.random.default_rng(seed)
    for step in range(1, warmup.max_steps + 1):
        batch = [samples[i] for i in order.integers(0, len(samples), warmup.batch_size)]
        loss = trainer.train_step([batch])["sft/loss"]
        display.show_progress(step)
        is_due = step % warmup.test_freq == 0 or step == warmup.max_steps
        if is_due and await check(trainer, step, loss):
            break

    def write(path: "Path") -> None:
        trainer.save_pretrained(path)
        tokenizer.save_pretrained(path)

    write_atomically(run.model, write)
    shutil.rmtree(run.path / "initial-model")
