"""Data of the commands without files: a task's worked examples, with wrong answers next to the right ones."""

import re
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from gcore_llm.data.prompts import Problem
from gcore_llm.data.tasks import WORKED_EXAMPLES, make_problems, require_worked_examples
from gcore_llm.finetune.config import FineTuneConfig, PairsConfig
from gcore_llm.finetune.data import Row
from gcore_llm.finetune.warmup import supervised_trainer, train_on_examples, worked_sample
from gcore_llm.tiny_model import make_tiny_model
from gcore_runs.loop.recorder import Display
from gcore_runs.run_folder import RunFolder, append_json, write_atomically
from gcore_trainer import OptimizerConfig

_WARMUP_BATCH_SIZE = 64
_WARMUP_TEST_FREQ = 25


def task_rows(config: FineTuneConfig) -> tuple[list[Row], list[Row]]:
    """Return a task's training and held-out problems with their worked answers, and wrong ones for pairs.

    Raises:
        UserError: there are no worked answers to the task, or see `make_problems`.
    """
    require_worked_examples(config.task.name, instead="or rows of your own: --data.train-files FILE")
    rng = np.random.default_rng(config.seed)
    train, val = (
        [_row(config, problem, rng) for problem in part] for part in make_problems(config.task, seed=config.seed)
    )
    return train, val


def _row(config: FineTuneConfig, problem: Problem, rng: np.random.Generator) -> Row:
    answer = WORKED_EXAMPLES[config.task.name](problem.row)
    if not config.rows_are_pairs:
        return {"prompt": problem.value, "completion": answer}, f"task {config.task.name}"
    return {"prompt": problem.value, "chosen": answer, "rejected": _miscounted(answer, rng)}, f"task {config.task.name}"


def _miscounted(answer: str, rng: np.random.Generator) -> str:
    """Return the answer with its last number up to twenty too high or too low."""
    error = int(rng.integers(1, 21)) * int(rng.choice([-1, 1]))
    return re.sub(r"-?\d+$", lambda last: str(int(last[0]) + error), answer)


async def make_model(
    config: FineTuneConfig, run: RunFolder, tokenizer: Any, rows: Sequence[Row], display: Display
) -> None:
    """Make ``run.model``, a tiny model; for pairs it is trained on the chosen answers first."""
    steps = config.warmup_steps if isinstance(config, PairsConfig) else 0
    if not steps:
        write_atomically(run.model, lambda path: make_tiny_model(path, seed=config.seed))
        return
    initial = run.path / "initial-model"
    write_atomically(initial, lambda path: make_tiny_model(path, seed=config.seed))
    optimizer = OptimizerConfig(lr=2e-3, betas=(0.9, 0.95), lr_warmup_steps=20)
    samples = [worked_sample(tokenizer, tokenizer(row["prompt"])["input_ids"], row["chosen"]) for row, _ in rows]

    async def check(step: int, loss: float) -> bool:
        display.progressed(step, [("loss", f"{loss:.3f}")])
        append_json(run.warmup, {"step": step, "sft/loss": loss})
        return False

    await train_on_examples(
        supervised_trainer(initial, optimizer, device=config.device),
        samples,
        run,
        tokenizer,
        display,
        steps=steps,
        batch_size=_WARMUP_BATCH_SIZE,
        seed=config.seed,
        test_freq=_WARMUP_TEST_FREQ,
        check=check,
    )
    shutil.rmtree(initial)
