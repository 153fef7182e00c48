"""Supervised warm-up of the embedded model, until reinforcement learning has something to build on."""

from pathlib import Path
from typing import Any

import numpy as np

from gcore_controller import InlineCollectives, InlineGroup, StageTimer
from gcore_llm.config import TrainConfig
from gcore_llm.evaluate import evaluate
from gcore_llm.prompts import PromptSets
from gcore_llm.roles import SamplingRoles, build_engine
from gcore_llm.tasks import WORKED_EXAMPLES
from gcore_rollout import RewardRunner
from gcore_runs.display import Display
from gcore_runs.errors import UserError
from gcore_runs.instrumented_engine import Instrumentation
from gcore_runs.run_folder import RunFolder, append_json, write_atomically, write_jsonl
from gcore_trainer import OptimizerConfig, PackedModel, Sample, SFTObjective, TorchTrainer


def require_worked_examples(task: str, *, instead: str) -> None:
    """
    Args:
        instead: what to do with other tasks, for the error.

    Raises:
        UserError: the task has none.
    """
    if task not in WORKED_EXAMPLES:
        known = ", ".join(WORKED_EXAMPLES)
        raise UserError(f"task.name is {task!r}; expected a task with worked examples ({known}), {instead}")


async def warm_up(
    config: TrainConfig,
    run: RunFolder,
    initial: Path,
    prompts: PromptSets,
    tokenizer: Any,
    reward: RewardRunner,
    display: Display,
) -> None:
    """Make ``run.model``: the model in ``initial``, fine-tuned on the task's worked examples."""
    worked = WORKED_EXAMPLES[config.task.name]
    samples = [_example(tokenizer, p.token_ids, worked(p.row)) for p in prompts.train]
    optimizer = OptimizerConfig(lr=config.warmup.lr, betas=(0.9, 0.95), lr_warmup_steps=50)
    packed = PackedModel.from_pretrained(
        initial, device=config.device, temperature=config.rollout.temperature, max_length=config.data.max_length
    )
    trainer = TorchTrainer(packed, optimizer=optimizer, objective=SFTObjective())
    policy = await build_engine(config, initial, tokenizer, instrumentation=Instrumentation(logs=run.logs))
    sampler = SamplingRoles(policy=policy, reward=reward, tokenizer=tokenizer)
    try:
        await _until_accurate(config, run, trainer, samples, sampler, prompts, display)
    finally:
        await policy.close()

    def write(path: Path) -> None:
        trainer.save_pretrained(path)
        tokenizer.save_pretrained(path)

    write_atomically(run.model, write)


async def _until_accurate(
    config: TrainConfig,
    run: RunFolder,
    trainer: TorchTrainer,
    samples: list[Sample],
    sampler: SamplingRoles,
    prompts: PromptSets,
    display: Display,
) -> None:
    write_jsonl(run.warmup, [])
    display.phase("warm-up (supervised)", total=config.warmup.max_steps)
    order = np.random.default_rng(config.seed)
    for step in range(1, config.warmup.max_steps + 1):
        batch = [samples[i] for i in order.integers(0, len(samples), config.warmup.batch_size)]
        metrics = trainer.train_step([batch])
        if step % config.warmup.test_freq and step != config.warmup.max_steps:
            continue
        await sampler.policy.update_weights(trainer.export_weights(), version=step)
        result = await evaluate(
            sampler,
            prompts.val,
            group=InlineCollectives(InlineGroup(1), 0),
            timer=StageTimer(),
            max_tokens=config.data.max_response_length,
            temperature=config.rollout.temperature,
        )
        append_json(run.warmup, {"step": step, "sft/loss": metrics["sft/loss"], **result.metrics()})
        display.warmed_up(step, loss=metrics["sft/loss"], accuracy=result.sampled)
        if result.sampled >= config.warmup.target_accuracy:
            break


def _example(tokenizer: Any, prompt_ids: tuple[int, ...], answer: str) -> Sample:
    response = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return Sample(prompt_ids=np.array(prompt_ids), response_ids=np.array(response))
