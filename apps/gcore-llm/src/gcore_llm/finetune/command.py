"""The commands `sft`, `reward-model` and `dpo`: what they parse and what they print."""

from collections.abc import Sequence

from gcore_llm.finetune.config import FineTuneConfig
from gcore_llm.finetune.recipes import FINE_TUNING_RECIPES
from gcore_runs.settings.options import parse

_DESCRIPTIONS = {
    "sft": "Fine-tune on messages, on prompts with completions, or on text.",
    "reward-model": "Train a reward model on pairs of a chosen and a rejected answer.",
    "dpo": "Train a policy on pairs of a chosen and a rejected answer, without sampling and without a reward model.",
}


def parse_fine_tuning(command: str, args: Sequence[str]) -> FineTuneConfig:
    """Recipe, then TOML file, then command line, each over the one before.

    Raises:
        UserError: see `merge`.
    """
    recipes, description = FINE_TUNING_RECIPES[command], _DESCRIPTIONS[command]
    return parse(args, prog=f"gcore-llm {command}", recipes=recipes, description=description)


def run_fine_tuning(command: str, args: Sequence[str]) -> None:
    """The whole command."""
    config = parse_fine_tuning(command, args)
    from rich.table import Table

    from gcore_llm.finetune.run import fine_tune
    from gcore_runs.display import Display

    with Display() as display:
        result = fine_tune(config, display)
    if result.before:
        table = Table(title="held-out rows", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column)
        for name in sorted(n for n in result.before.keys() & result.after.keys() if n.startswith("val/")):
            label = name.rpartition("/")[2].replace("_", " ")
            table.add_row(label, f"{result.before[name]:.3f}", f"{result.after[name]:.3f}")
        display.console.print(table)
    display.say(f"report:  {result.run / 'report.html'}\nexport:  {result.run / 'export'}")
