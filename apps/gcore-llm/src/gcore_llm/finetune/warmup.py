"""Supervised warm-up of the embedded model on a task's worked examples."""

import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import PromptSets
from gcore_llm.data.tasks import WORKED_EXAMPLES
from gcore_llm.tiny_model import make_tiny_model
from gcore_runs import Display, RunFolder, append_json, write_atomically, write_jsonl
from gcore_trainer import OptimizerConfig, Sample

if TYPE_CHECKING:
    from gcore_rollout import RewardRunner
    from gcore_trainer import TorchTrainer

Check = Callable[[int, float], Awaitable[bool]]
"""Called with an update's number and its loss; returns whether the model is good enough."""


async def make_warm_model(
    config: TrainConfig,
    run: RunFolder,
    prompts: PromptSets,
    tokenizer: Any,
    reward: "RewardRunner",
    display: Display,
) -> None:
    """Make ``run.model``: the embedded model, trained until it samples enough right answers."""
    initial = run.path / "initial-model"
    write_atomically(initial, lambda path: make_tiny_model(path, seed=config.seed))
    await warm_up(config, run, initial, prompts, tokenizer, reward, display)
    shutil.rmtree(initial)


async def warm_up(
    config: TrainConfig,
    run: RunFolder,
    initial: Path,
    prompts: PromptSets,
    tokenizer: Any,
    reward: "RewardRunner",
    display: Display,
) -> None:
    """Make ``run.model``: the model in ``initial``, trained until it samples enough right answers.

    Each check samples answers to the held-out prompts, and is recorded in ``warmup.jsonl``.
    """
    from gcore_llm.backend import build_engine
    from gcore_llm.sampling.evaluate import evaluate
    from gcore_rollout import RolloutRoles
    from gcore_runs.engines import Instrumentation

    worked, warmup = WORKED_EXAMPLES[config.task.name], config.warmup
    samples = [worked_sample(tokenizer, p.token_ids, worked(p.row)) for p in prompts.train]
    trainer = supervised_trainer(
        initial,
        OptimizerConfig(lr=warmup.lr, betas=(0.9, 0.95), lr_warmup_steps=50),
        device=config.device,
        temperature=config.rollout.temperature,
        max_length=config.data.max_length,
    )
    policy = await build_engine(config, initial, tokenizer, instrumentation=Instrumentation(logs=run.logs))
    roles = RolloutRoles(policy=policy, reward=reward, tokenizer=tokenizer)

    async def check(step: int, loss: float) -> bool:
        await policy.update_weights(trainer.export_weights(), version=step)
        result = await evaluate(roles, prompts.val, config)
        append_json(run.warmup, {"step": step, "sft/loss": loss, **result.metrics()})
        display.warmed_up(step, loss=loss, accuracy=result.sampled)
        return result.sampled >= warmup.target_accuracy

    try:
        await train_on_examples(
            trainer,
            samples,
            run,
            tokenizer,
            display,
            steps=warmup.max_steps,
            batch_size=warmup.batch_size,
            seed=config.seed,
            test_freq=warmup.test_freq,
            check=check,
        )
    finally:
        await policy.close()


def worked_sample(tokenizer: Any, prompt_ids: Sequence[int], answer: str) -> Sample:
    """Return a prompt with its worked answer, to be learned to the end of the sequence."""
    response = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return Sample(prompt_ids=np.array(prompt_ids), response_ids=np.array(response))


def supervised_trainer(model: Path, optimizer: OptimizerConfig, **options: Any) -> "TorchTrainer":
    """Load a model for supervised training; ``options`` are those of `PackedModel.from_pretrained`."""
    from gcore_trainer import PackedModel, SFTObjective, TorchTrainer

    packed = PackedModel.from_pretrained(model, **options)
    return TorchTrainer(packed, optimizer=optimizer, objective=SFTObjective())


async def train_on_examples(
    trainer: "TorchTrainer",
    samples: Sequence[Sample],
    run: RunFolder,
    tokenizer: Any,
    display: Display,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    test_freq: int,
    check: Check,
) -> None:
    """Train on random batches of worked examples, and write the model's folder ``run.model``.

    Args:
        steps: most updates.
        seed: of the batches.
        test_freq: updates between two checks; the last update has one, too.
        check: ends the training early.
    """
    write_jsonl(run.warmup, [])
    display.phase("warm-up (supervised)", total=steps)
    order = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        batch = [samples[i] for i in order.integers(0, len(samples), batch_size)]
        loss = trainer.train_step([batch])["sft/loss"]
        display.progressed(step)
        if (step % test_freq == 0 or step == steps) and await check(step, loss):
            break

    def write(path: Path) -> None:
        trainer.save_pretrained(path)
        tokenizer.save_pretrained(path)

    write_atomically(run.model, write)
