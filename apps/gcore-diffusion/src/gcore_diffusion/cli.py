"""The `gcore-diffusion` command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gcore_diffusion.config import (
    EVALUATED,
    RECIPES,
    DiffusionConfig,
    DiffusionTrainArgs,
    SimulatedDiffusionConfig,
)
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_runs import (
    Amount,
    Bound,
    Checked,
    Command,
    Count,
    NonNegative,
    RunArgs,
    convert_settings,
    extend_recipes,
    parse,
    parse_arguments,
    run_command,
    run_training,
)
from gcore_runs.settings.checks import EXISTING_FOLDER

if TYPE_CHECKING:
    from gcore_runs import Kind

_USAGE = """usage: gcore-diffusion COMMAND [options]

RLHF of diffusion and flow-matching models from one command.

commands:
  train               train on a reward; with no options, a tiny model of coloured digits in minutes
  sample RUN PROMPT   make images with a run's latest policy
  simulate train      predict the time of a step of train, on a cluster of modelled devices
  report RUN          write the run's report.html again
  trace RUN           write the run's timeline for ui.perfetto.dev
  logs RUN            print what the run's processes logged, by time
  doctor              check this machine, or the nodes of a Ray cluster, before a run

gcore-diffusion COMMAND --help documents every option.
"""


_PNG = Bound(lambda path: path.suffix.lower() == ".png", "a file that ends in .png")


@dataclass(frozen=True, kw_only=True)
class ImageSampleArgs(RunArgs, Checked):
    """Make images with a run's latest policy."""

    prompt: tyro.conf.Positional[str]
    """The prompt."""
    image: tuple[Path, ...] = ()
    """Image files that belong to the prompt, for a pipeline that takes them."""
    n: Count = 8
    """How many images."""
    num_inference_steps: NonNegative = 0
    """Denoising steps; 0: as in the run's evaluation."""
    guidance_scale: Amount = 0.0
    """Scale of classifier-free guidance; 0: that of the run's evaluation."""
    seed: NonNegative = 0
    """Seed of the images."""
    out: Annotated[Path, _PNG, EXISTING_FOLDER] = Path("images.png")
    """The PNG file to write."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; see `run_command`."""
    run_command(
        "gcore-diffusion",
        _COMMANDS,
        argv,
        usage=_USAGE,
        settings=_settings,
        kinds=_kinds,
        not_resumed=("simulate",),
    )


def parse_train(args: Sequence[str]) -> DiffusionConfig:
    """Return the settings of a run from a recipe, a TOML file and the command line, each over the one before."""
    return convert_settings(parse_train_args(args), DiffusionConfig)


def parse_train_args(args: Sequence[str]) -> DiffusionTrainArgs:
    """Return the same, and the options that are no settings of a run; see `parse`."""
    description = "Train a diffusion or flow-matching model on a reward."
    recipes = extend_recipes({**RECIPES, **PUBLISHED}, DiffusionTrainArgs)
    return parse(args, prog="gcore-diffusion train", recipes=recipes, description=description)


def _settings() -> dict[str, type]:
    return {
        "train": DiffusionTrainArgs,
        "sample": ImageSampleArgs,
        "simulate": SimulatedDiffusionConfig,
    }


def _train(args: Sequence[str]) -> None:
    parsed = parse_train_args(args)
    if parsed.dry_run:
        from gcore_diffusion.planning.dry_run import dry_run

        dry_run(parsed)
        return
    config = convert_settings(parsed, DiffusionConfig)
    from gcore_diffusion.training import train

    run_training(
        config, partial(train, demo=parsed.demo), title="held-out prompts", labels=EVALUATED
    )


def _sample(args: Sequence[str]) -> None:
    parsed = parse_arguments(ImageSampleArgs, args, prog="gcore-diffusion sample")
    import asyncio

    from gcore_diffusion.backend import sample_run

    asyncio.run(sample_run(**vars(parsed)))
    print(parsed.out)


def _simulate(args: Sequence[str]) -> None:
    from gcore_diffusion.simulate import run_simulate

    run_simulate(args)


def _kinds() -> "Mapping[str, Kind]":
    from gcore_diffusion.training import KINDS

    return KINDS


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "sample": _sample,
    "simulate": _simulate,
}
