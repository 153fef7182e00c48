"""A command's settings from its recipe, a TOML file and options."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from gcore_runs.settings import ConfigT, merge, read_toml


def parse(args: Sequence[str], *, prog: str, recipes: Mapping[str, Callable[[], ConfigT]], description: str) -> ConfigT:
    """Recipe, then TOML file, then command line, each over the one before.

    Args:
        args: the command's.
        prog: the command as a person calls it: ``gcore-llm train``.
        recipes: ``own_data`` and ``embedded`` are among them.
        description: of the command's help.

    Raises:
        UserError: see `merge`.
    """
    first = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--recipe", choices=sorted(recipes))
    chosen, rest = first.parse_known_args(args)
    from_file: dict[str, Any] = read_toml(chosen.config) if chosen.config else {}
    own = from_file.get("model") or any(a.split("=")[0] == "--model" for a in rest)
    base = recipes[chosen.recipe or ("own_data" if own else "embedded")]()
    base = merge(base, from_file, source=str(chosen.config))
    description = (
        f"{description}\n\n"
        f"--recipe {{{','.join(sorted(recipes))}}}: settings to begin with; default: own_data with --model, else "
        "embedded. --config FILE.toml: settings over these, under the same names ([actor.optim] lr = 1e-6). "
        "Options go over both."
    )
    return tyro.cli(
        type(base),
        default=base,
        args=rest,
        prog=prog,
        description=description,
        config=(tyro.conf.FlagConversionOff,),
    )
