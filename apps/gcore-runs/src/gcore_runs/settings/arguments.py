"""Read a command's arguments: ``--name value`` for every setting, and positional ones."""

import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from gcore_runs.errors import UserError
from gcore_runs.settings.other_names import hint

_FLAG_VALUES = ("true", "false", "1", "0", "yes", "no", "on", "off")


@cache
def setting_types(kind: type, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of every setting of a dataclass, by its dotted name: ``{"rollout.n": int, ...}``."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        hint_of_field, name = hints[field.name], prefix + field.name
        if isinstance(hint_of_field, type) and is_dataclass(hint_of_field):
            found |= setting_types(hint_of_field, f"{name}.")
        else:
            found[name] = hint_of_field
    return found


def as_option(name: str) -> str:
    """Spell a setting as an option: ``--rollout.n``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments as they were given.

    Attributes:
        options: text, or a list of texts, by dotted name; below a mapping such as ``task.params`` already parsed.
        positional: the other arguments, in order.
    """

    options: dict[str, Any]
    positional: list[str]


def read_arguments(args: Sequence[str], types_by_name: Mapping[str, Any]) -> Arguments:
    """Divide arguments into options and positional ones.

    An option has one value, or all up to the next option where its type has several. ``--name=value`` is the same. A
    switch may be given without a value.

    Raises:
        UserError: an unknown option (with the nearest known one), or one without a value.
    """
    options: dict[str, Any] = {}
    positional: list[str] = []
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        given, has_value, value = argument[2:].partition("=")
        name = given.replace("-", "_")
        if has_value:
            rest.insert(0, value)
        kind, is_entry = _type_of(name, types_by_name)
        if kind is None:
            raise UserError(f"unknown option --{given}; {hint(name, types_by_name, as_option)}")
        values = _values(rest, kind, is_entry=is_entry, is_given=bool(has_value))
        if not values and not _is_sequence(kind):
            raise UserError(f"--{given} has no value; expected {as_option(name)} VALUE")
        if is_entry:
            parsed = [_parsed(v) for v in values]
            options[name] = parsed[0] if len(parsed) == 1 else parsed
        elif _is_sequence(kind):
            options[name] = values
        else:
            options[name] = None if values[0].lower() == "none" and _may_be_none(kind) else values[0]
    return Arguments(options=options, positional=positional)


def check_no_positional(arguments: Arguments, types_by_name: Mapping[str, Any]) -> None:
    """
    Raises:
        UserError: there are positional arguments, such as Hydra's ``name=value``.
    """
    if not arguments.positional:
        return
    argument = arguments.positional[0]
    given, is_pair, value = argument.lstrip("+~-").partition("=")
    name = given.replace("-", "_")
    if not is_pair:
        raise UserError(f"unexpected argument {argument!r}; expected --NAME VALUE for every setting")
    raise UserError(
        f"unexpected argument {argument!r}; {hint(name, types_by_name, lambda known: f'{as_option(known)} {value}')}"
    )


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested mappings, as a TOML file has them."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        table = found
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    return found


def _is_entry(name: str, types_by_name: Mapping[str, Any]) -> bool:
    """Return whether ``name`` is an entry of a setting that is a mapping."""
    return any(get_origin(kind) is dict and name.startswith(f"{n}.") for n, kind in types_by_name.items())


def _type_of(name: str, types_by_name: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the type of a setting (None: there is no such setting), and whether it is an entry of a mapping."""
    if _is_entry(name, types_by_name):
        return str, True
    kind = types_by_name.get(name)
    if get_origin(kind) is dict:
        raise UserError(f"{as_option(name)} is a table; expected {as_option(name)}.NAME VALUE")
    return kind, False


def _values(rest: list[str], kind: Any, *, is_entry: bool, is_given: bool) -> list[str]:
    """Take an option's values from the front of the arguments that are left."""
    if is_given and not _is_sequence(kind):
        return [rest.pop(0)]
    if kind is bool and not (rest and rest[0].lower() in _FLAG_VALUES):
        return ["true"] if not rest or rest[0].startswith("--") else [rest.pop(0)]
    if not is_entry and not _is_sequence(kind):
        return [rest.pop(0)] if rest and not rest[0].startswith("--") else []
    values: list[str] = []
    while rest and (not rest[0].startswith("--") or (is_given and not values)):
        values.append(rest.pop(0))
    return values


def _parsed(text: str) -> Any:
    """Return a value as TOML reads it, and any other text unchanged."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _may_be_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
