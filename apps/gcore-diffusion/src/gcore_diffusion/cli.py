"""The `gcore-diffusion` command."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from gcore_controller import RankError
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.recipes import RECIPES
from gcore_runs.command_line import NOTHING_LEARNED, Command, RunArgs, logs_command, run_command
from gcore_runs.errors import UserError, check_at_least
from gcore_runs.options import parse, parse_arguments

_USAGE = """usage: gcore-diffusion COMMAND [options]

RLHF of diffusion and flow-matching models from one command.

commands:
  train               train on a reward; with no options, a tiny model of coloured digits in minutes
  sample RUN PROMPT   make images with a run's latest policy
  report RUN          write the run's report.html again
  logs RUN            what the run's processes logged, by time

gcore-diffusion COMMAND --help documents every option.
"""


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """Make images with a run's latest policy."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    prompt: tyro.conf.Positional[str]
    """The prompt."""
    n: int = 8
    """How many images."""
    num_inference_steps: int = 0
    """Denoising steps; 0: the run's of evaluation."""
    guidance_scale: float = 0.0
    """Of classifier-free guidance; 0: the run's of evaluation."""
    seed: int = 0
    """Seed of the images."""
    out: Path = Path("images.png")
    """The PNG file to write."""

    def __post_init__(self) -> None:
        for name, lowest in (("n", 1), ("num_inference_steps", 0), ("guidance_scale", 0), ("seed", 0)):
            check_at_least(name, getattr(self, name), lowest)
        if self.out.suffix.lower() != ".png":
            raise UserError(f"out is {str(self.out)!r}; expected a file that ends in .png")
        if not self.out.absolute().parent.is_dir():
            raise UserError(f"out is {str(self.out)!r}; expected a file in an existing folder")


def main(argv: Sequence[str] | None = None) -> None:
    """See `run_command`."""
    run_command(
        "gcore-diffusion",
        _COMMANDS,
        argv,
        usage=_USAGE,
        expected_errors=_expected_errors,
    )


def _expected_errors() -> tuple[type[Exception], ...]:
    from gcore_ckpt import CheckpointError
    from gcore_controller import ControllerError
    from gcore_rollout import RolloutError
    from gcore_trainer import TrainerError

    return (UserError, RankError, CheckpointError, ControllerError, RolloutError, TrainerError)


def parse_train(args: Sequence[str]) -> DiffusionConfig:
    """Recipe, then TOML file, then command line, each over the one before.

    Raises:
        UserError: see `merge`.
    """
    description = "Train a diffusion or flow-matching model on a reward."
    return parse(args, prog="gcore-diffusion train", recipes=RECIPES, description=description)


def _train(args: Sequence[str]) -> None:
    config = parse_train(args)
    from rich.table import Table

    from gcore_diffusion.train import train
    from gcore_runs.display import Display

    with Display() as display:
        result = train(config, display)
    if result.before:
        table = Table(title="held-out prompts", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column)
        labels = {"val/score/mean": "reward", "val/held_out/mean": "reward not trained on", "val/accuracy": "accuracy"}
        for key, label in labels.items():
            if key in result.before:
                table.add_row(label, f"{result.before[key]:.3f}", f"{result.after[key]:.3f}")
        display.console.print(table)
    display.say(f"report:  {result.run / 'report.html'}\nexport:  {result.run / 'export'}")
    if not result.has_signal:
        raise SystemExit(NOTHING_LEARNED)


def _sample(args: Sequence[str]) -> None:
    parsed = parse_arguments(SampleArgs, args, prog="gcore-diffusion sample")
    import asyncio

    from gcore_diffusion.inspect_run import sample_run

    asyncio.run(
        sample_run(
            parsed.run,
            parsed.prompt,
            n=parsed.n,
            num_inference_steps=parsed.num_inference_steps,
            guidance_scale=parsed.guidance_scale,
            seed=parsed.seed,
            out=parsed.out,
        )
    )
    print(parsed.out)


def _report(args: Sequence[str]) -> None:
    parsed = parse_arguments(
        RunArgs, args, prog="gcore-diffusion report", description="Write a run's report.html again."
    )
    from gcore_diffusion.report import write_report
    from gcore_runs.run_folder import RunFolder

    print(write_report(RunFolder.existing(parsed.run).path))


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "sample": _sample,
    "report": _report,
    "logs": partial(logs_command, "gcore-diffusion"),
}
