"""A command's settings from its recipe, a TOML file and options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from gcore_runs.errors import UserError
from gcore_runs.settings.arguments import Arguments, check_no_positional, nested, read_arguments, setting_types
from gcore_runs.settings.values import ConfigT, SettingsT, merge, read_toml, validated

ArgsT = TypeVar("ArgsT")

_HELP = ("-h", "--help")


def parse(args: Sequence[str], *, prog: str, recipes: Mapping[str, Callable[[], ConfigT]], description: str) -> ConfigT:
    """Return settings from a recipe, a TOML file and the command line, each over the one before.

    Args:
        args: the command's arguments.
        prog: the command as a user types it: ``gcore-llm train``.
        recipes: ``own_data`` and ``embedded`` are among them.
        description: the first line of the command's help.

    Raises:
        UserError: see `merge`.
    """
    given, config = _read(args, type(recipes["embedded"]()), extra=("config", "recipe"))
    recipe = given.options.pop("recipe", "")
    if recipe and recipe not in recipes:
        raise UserError(f"recipe is {recipe!r}; expected one of {', '.join(sorted(recipes))}")
    from_file: dict[str, Any] = read_toml(config) if config else {}
    own = from_file.get("model") or given.options.get("model")
    base = recipes[recipe or ("own_data" if own else "embedded")]()
    base = merge(base, from_file, source=config)
    description = (
        f"{description}\n\n"
        f"--recipe {{{','.join(sorted(recipes))}}}: settings to start from; default: own_data with --model, else "
        "embedded. --config FILE.toml: settings over these, under the same names ([actor.optim] lr = 1e-6). "
        "Options go over both."
    )
    return _over(base, args, given, prog=prog, description=description)


def parse_over(base: SettingsT, args: Sequence[str], *, prog: str, description: str) -> SettingsT:
    """Return ``base`` with a TOML file (``--config``) and then the command line over it.

    Raises:
        UserError: see `merge`.
    """
    given, config = _read(args, type(base), extra=("config",))
    if config:
        base = merge(base, read_toml(config), source=config)
    return _over(base, args, given, prog=prog, description=description)


def parse_arguments(kind: type[ArgsT], args: Sequence[str], *, prog: str, description: str = "") -> ArgsT:
    """Return a dataclass of ``kind`` from the command line; fields without a default are positional.

    Raises:
        UserError: an unknown option, a wrong value, too many or too few positional arguments.
    """
    if _asks_for_help(args):
        _print_help(kind, MISSING, prog=prog, description=description)
    wanted = [f.name for f in fields(kind) if f.default is MISSING]  # pyright: ignore[reportArgumentType]
    types_by_name = {n: t for n, t in setting_types(kind).items() if n not in wanted}
    given = read_arguments(args, types_by_name)
    usage = f"{prog} {' '.join(name.upper() for name in wanted)}"
    if len(given.positional) < len(wanted):
        raise UserError(f"{wanted[len(given.positional)].upper()} is missing; expected {usage}")
    if len(given.positional) > len(wanted):
        raise UserError(f"unexpected argument {given.positional[len(wanted)]!r}; expected {usage}")
    return validated(kind, given.options | dict(zip(wanted, given.positional, strict=True)))


def _read(args: Sequence[str], kind: type, *, extra: Sequence[str]) -> tuple[Arguments, str]:
    """Read the arguments, and the file that --config names."""
    known = {**setting_types(kind), **dict.fromkeys(extra, str)}
    given = read_arguments([a for a in args if a not in _HELP], known)
    check_no_positional(given, known)
    return given, given.options.pop("config", "")


def _over(base: SettingsT, args: Sequence[str], given: Arguments, *, prog: str, description: str) -> SettingsT:
    if _asks_for_help(args):
        _print_help(type(base), base, prog=prog, description=description)
    return merge(base, nested(given.options))


def _asks_for_help(args: Sequence[str]) -> bool:
    return any(argument in _HELP for argument in args)


def _print_help(kind: type, default: Any, *, prog: str, description: str) -> None:
    """Print every option with its documentation and default, and exit."""
    import tyro

    defaults = {} if default is MISSING else {"default": default}
    options = (tyro.conf.FlagConversionOff,)
    tyro.cli(kind, args=["--help"], prog=prog, description=description or None, config=options, **defaults)
