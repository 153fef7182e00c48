"""The commands `sft`, `reward-model` and `dpo`: their arguments and output."""

from collections.abc import Mapping, Sequence

from gcore_llm.finetune.config import FineTuneConfig
from gcore_llm.finetune.recipes import FINE_TUNING_RECIPES
from gcore_runs.command_line import run_training
from gcore_runs.settings.parsing import parse

_DESCRIPTIONS = {
    "sft": "Fine-tune on messages, on prompts with completions, or on text.",
    "reward-model": "Train a reward model on pairs of a chosen and a rejected answer.",
    "dpo": "Train a policy on pairs of a chosen and a rejected answer, without sampling and without a reward model.",
}


def parse_fine_tuning(command: str, args: Sequence[str]) -> FineTuneConfig:
    """Return settings from a recipe, a TOML file and the command line, each over the one before.

    Raises:
        UserError: see `merge`.
    """
    recipes, description = FINE_TUNING_RECIPES[command], _DESCRIPTIONS[command]
    return parse(args, prog=f"gcore-llm {command}", recipes=recipes, description=description)


def run_fine_tuning(command: str, args: Sequence[str]) -> None:
    """Run one of the commands."""
    config = parse_fine_tuning(command, args)
    from gcore_llm.finetune.run import fine_tune

    def rows(found: Mapping[str, float]) -> list[tuple[str, str]]:
        names = sorted(name for name in found if name.startswith("val/"))
        return [(name.rpartition("/")[2].replace("_", " "), name) for name in names]

    run_training(config, fine_tune, title="held-out rows", rows=rows)
