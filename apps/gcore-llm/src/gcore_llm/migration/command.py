"""`gcore-llm from-verl` and `from-trl`: write settings for a config of another library, and say what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import tyro

from gcore_llm.migration.conversion import Conversion, Line, Verdict
from gcore_llm.migration.hydra_files import SourceConfig, is_override, read_command
from gcore_llm.migration.inputs import read_config
from gcore_runs import Checked, UserError, parse_arguments
from gcore_runs.command_line import print_table

_MOST_SHOWN = 60
"""Keys without a meaning here that are shown on the screen; more are in the file alone."""


@dataclass(frozen=True, kw_only=True)
class FromVerlArgs(Checked):
    """Convert a config of verl's PPO trainer; KEY=VALUE after it is over its own, as on verl's command line."""

    config: tyro.conf.Positional[str]
    """A YAML file of all settings, as Hydra saves it, or a script that starts verl.trainer.main_ppo, which is read and
    not run. Without one, the arguments are those of verl.trainer.main_ppo."""
    out: str = ""
    """File of settings to write, with a table of all keys next to it (.md); empty: the config's name with .toml, in
    this folder."""
    root: str = ""
    """Folder in which a script is started, such as a clone of verl, for the files that its --config-path names; empty:
    this folder."""
    force: bool = False
    """Replace files that are there already."""


@dataclass(frozen=True, kw_only=True)
class FromTRLArgs(FromVerlArgs):
    """Convert a config of TRL; KEY=VALUE after it is over its own, and num_processes=N are accelerate's processes."""

    config: tyro.conf.Positional[str]
    """A YAML file, as trl grpo --config takes it, or JSON of a trainer's config, as its to_dict() gives it."""
    method: Literal["auto", "grpo", "rloo", "dpo", "sft", "reward"] = "auto"
    """The trainer; auto: the one that has a key of the config, where others have not."""


ArgsT = TypeVar("ArgsT", bound=FromVerlArgs)


def from_verl(args: Sequence[str]) -> None:
    """Convert a config of verl's PPO trainer."""
    parsed, source = _read(FromVerlArgs, args, "gcore-llm from-verl")
    from gcore_llm.migration.verl import convert_verl_config

    _write(convert_verl_config(source), source, parsed)


def from_trl(args: Sequence[str]) -> None:
    """Convert a config of one of TRL's trainers."""
    parsed, source = _read(FromTRLArgs, args, "gcore-llm from-trl")
    from gcore_llm.migration.trl import convert_trl_config

    _write(convert_trl_config(source, parsed.method), source, parsed)


def _read(args_type: type[ArgsT], args: Sequence[str], prog: str) -> tuple[ArgsT, SourceConfig]:
    command = read_command(args)
    options = list(command.options)
    if command.trainer or (args and is_override(args[0])):
        options.insert(0, "")
    parsed = parse_arguments(args_type, options, prog=prog)
    return parsed, read_config(parsed.config, args, parsed.root)


def _write(conversion: Conversion, source: SourceConfig, args: FromVerlArgs) -> None:
    """Check the settings, write them and the table, and print what is mapped, without meaning, missing, and unknown."""
    conversion.result()
    toml = Path(args.out or f"{Path(args.config).stem or conversion.library.lower()}.toml")
    table = toml.with_suffix(".md")
    for path in (toml, table):
        if path.exists() and not args.force:
            raise UserError(
                f"out is {str(toml)!r} and {path} is there already; expected another file, or --force"
            )
    lines = conversion.lines()
    toml.write_text(conversion.toml(source.origin))
    table.write_text(_markdown(lines, source))
    print(f"converted as {conversion.trainer}")
    for verdict in get_args(Verdict):
        rows = [(line.key, str(line.value), line.text) for line in lines if line.verdict == verdict]
        if verdict == "no meaning" and len(rows) > _MOST_SHOWN:
            print(f"{len(rows)} keys have no meaning here; {table} says why")
        elif rows:
            print_table(f"{verdict} ({len(rows)})", ("key", "value", "here"), [rows])
    for caution in conversion.cautions:
        print(f"caution: {caution}")
    print(
        f"settings: {toml}\nall keys: {table}\nnext: gcore-llm {conversion.command} --config {toml}"
    )


def _markdown(lines: Sequence[Line], source: SourceConfig) -> str:
    text = f"Every key of {source.origin}\n\n| | key | value | here |\n|---|---|---|---|\n"
    for line in lines:
        cells = (line.verdict, f"`{line.key}`", f"`{line.value}`", line.text)
        row = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        text += f"| {row} |\n"
    return text
