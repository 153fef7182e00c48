"""The commands `sft`, `reward-model` and `dpo`, and the recipes that they start from."""

from collections.abc import Callable, Sequence
from typing import Any

from gcore_llm.finetune.config import (
    DPORunConfig,
    FineTuneConfig,
    LengthConfig,
    OptimConfig,
    RewardModelRunConfig,
    RowsConfig,
    SFTRunConfig,
)
from gcore_llm.sections import TaskConfig
from gcore_runs.command_line import run_training
from gcore_runs.settings.parsing import parse


def sft_embedded() -> SFTRunConfig:
    """Under a minute on one core: a tiny model learns from worked examples of one-digit sums."""
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.95), lr_warmup_steps=20)
    return SFTRunConfig(
        **_sums(batch_size=64), optim=optim, trainer=LengthConfig(total_training_steps=180)
    )


def reward_model_embedded() -> RewardModelRunConfig:
    """Under a minute on one core: a tiny model learns to distinguish right sums from wrong ones."""
    optim = OptimConfig(lr=5e-4, lr_warmup_steps=10, lr_scheduler_type="constant")
    length = LengthConfig(total_training_steps=120, test_freq=30)
    return RewardModelRunConfig(
        **_sums(batch_size=32), warmup_steps=150, optim=optim, trainer=length
    )


def dpo_embedded() -> DPORunConfig:
    """Under a minute on one core: a tiny model learns to prefer right sums to wrong ones."""
    optim = OptimConfig(lr=2e-4, lr_warmup_steps=5)
    length = LengthConfig(total_training_steps=80, test_freq=20)
    return DPORunConfig(**_sums(batch_size=32), warmup_steps=150, optim=optim, trainer=length)


def _sums(*, batch_size: int) -> dict[str, Any]:
    params = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    task = TaskConfig(name="chain_sum", params=params, num_train=4000)
    return {
        "task": task,
        "threads": 1,
        "data": RowsConfig(train_batch_size=batch_size, max_length=64),
    }


FINE_TUNING_RECIPES: dict[str, dict[str, Callable[[], FineTuneConfig]]] = {
    "sft": {"embedded": sft_embedded, "own_data": SFTRunConfig},
    "reward-model": {"embedded": reward_model_embedded, "own_data": RewardModelRunConfig},
    "dpo": {"embedded": dpo_embedded, "own_data": DPORunConfig},
}


def parse_fine_tuning(command: str, args: Sequence[str]) -> FineTuneConfig:
    """Return settings from a recipe, a TOML file and the command line, each over the one before; see `parse`."""
    recipes = FINE_TUNING_RECIPES[command]
    return parse(
        args,
        prog=f"gcore-llm {command}",
        recipes=recipes,
        description=(recipes["own_data"].__doc__ or "").partition("\n")[0],
    )


def run_fine_tuning(command: str, args: Sequence[str]) -> None:
    """Run one of the commands."""
    config = parse_fine_tuning(command, args)
    from gcore_llm.finetune.run import fine_tune

    run_training(config, fine_tune, title="held-out rows")
