"""Read a command's settings from its recipe, a TOML file and ``--name value`` options, check them, and write them."""

import dataclasses
import json
import math
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from gcore_runs.errors import UserError
from gcore_runs.migration.keys import hint
from gcore_runs.settings.checks import (
    cached_adapter,
    conditional_settings,
    convert_value,
    default_settings,
    describe_expected,
    flatten,
    flatten_settings,
    nest,
    setting_types,
)
from gcore_runs.settings.run_config import BaseRunConfig
from gcore_trainer import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseRunConfig)
SettingsT = TypeVar("SettingsT")

_HELP = ("-h", "--help")
_MAX_INT = 2**63 - 1


def parse(
    args: Sequence[str],
    *,
    prog: str,
    recipes: Mapping[str, Callable[[], ConfigT]],
    description: str,
    embedded: str = "embedded",
) -> ConfigT:
    """Return settings from a recipe, a TOML file and the command line, each over the one before; raises as `merge`.

    ``prog`` is the command as users type it, ``gcore-llm train``; ``own_data`` and ``embedded`` are among the recipes.
    The argument ``embedded`` names the one that a run without a model starts from.
    """
    options = _options(args, type(recipes["embedded"]()), extra=("config", "recipe"))
    config = options.get("config", "")
    recipe = options.pop("recipe", "")
    if recipe and recipe not in recipes:
        raise UserError(f"recipe is {recipe!r}; expected one of {', '.join(sorted(recipes))}")
    model = options.get("model")
    if config and not model:
        model = read_toml(config).get("model")
    if not recipe:
        recipe = "own_data" if model else embedded
    description = (
        f"{description}\n\n"
        f"--recipe {{{','.join(sorted(recipes))}}}: settings to start from; default: own_data with --model, else "
        f"{embedded}. --config FILE.toml: settings over these, under the same names ([actor.optim] lr = 1e-6). "
        "Options go over both."
    )
    return _apply_options(recipes[recipe](), options, args, prog=prog, description=description)


def extend_recipes(
    recipes: Mapping[str, Callable[[], BaseRunConfig]], kind: type[ConfigT]
) -> dict[str, Callable[[], ConfigT]]:
    """Return recipes as those of a command whose class of settings, ``kind``, has further ones."""
    return {name: partial(_make_recipe, recipe, kind) for name, recipe in recipes.items()}


def _make_recipe(recipe: Callable[[], BaseRunConfig], config_type: type[ConfigT]) -> ConfigT:
    return convert_settings(recipe(), config_type)


def convert_settings(config: BaseRunConfig, kind: type[ConfigT]) -> ConfigT:
    """Return the settings as ``kind``: those that both classes have, and the defaults of the others."""
    names = {field.name for field in dataclasses.fields(config)} - {"command"}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in names:
            values[field.name] = getattr(config, field.name)
    return kind(**values)


def parse_over(base: SettingsT, args: Sequence[str], *, prog: str, description: str) -> SettingsT:
    """Return ``base`` with a TOML file (``--config``) and then the command line over it; raises as `merge`."""
    options = _options(args, type(base), extra=("config",))
    return _apply_options(base, options, args, prog=prog, description=description)


def parse_arguments(
    kind: type[SettingsT], args: Sequence[str], *, prog: str, description: str = ""
) -> SettingsT:
    """Return a dataclass, whose fields without a default are positional, from the command line."""
    _help_if_asked(args, kind, prog=prog, description=description)
    option_types = dict(setting_types(kind))
    required: list[str] = []
    for field in dataclasses.fields(cast(Any, kind)):
        if field.default is dataclasses.MISSING:
            required.append(field.name)
            option_types.pop(field.name, None)
    options, positional = _read_arguments(args, option_types)
    usage = f"{prog} {' '.join(required).upper()}"
    if len(positional) < len(required):
        raise UserError(f"{required[len(positional)].upper()} is missing; expected {usage}")
    if len(positional) > len(required):
        raise UserError(f"unexpected argument {positional[len(required)]!r}; expected {usage}")
    return _validate(kind, options | dict(zip(required, positional, strict=True)))


def _apply_options(
    base: SettingsT, options: dict[str, Any], args: Sequence[str], *, prog: str, description: str
) -> SettingsT:
    """Return ``base`` with the file of the option ``config`` and then the options over it, or print the help."""
    config = options.pop("config", None)
    over = nest(options)
    over_file = base
    if config is not None:
        if not config:
            raise UserError("config is ''; expected a TOML file")
        values = read_toml(config)
        # Alone at first, so that its errors name it; what it sets may be read only with the options.
        over_file = merge(base, values, source=config, keep=())
        over = _merge_tables(values, over)
    _help_if_asked(args, type(base), prog=prog, description=description, default=over_file)
    return merge(base, over, keep=flatten(over, setting_types(type(base))))


def _help_if_asked(
    args: Sequence[str], settings_type: type, *, prog: str, description: str, **default: Any
) -> None:
    """Print every option with its documentation and default, and exit, if ``args`` ask for help."""
    if any(argument in _HELP for argument in args):
        import tyro

        config = (tyro.conf.FlagConversionOff,)
        tyro.cli(
            settings_type,
            args=["--help"],
            prog=prog,
            description=description or None,
            config=config,
            **default,
        )


def as_option(name: str) -> str:
    """Spell a setting as an option: ``--rollout.n``."""
    return "--" + name.replace("_", "-")


def _options(args: Sequence[str], settings_type: type, *, extra: Sequence[str]) -> dict[str, Any]:
    """Read the options for the settings of a class, and the ``extra`` ones, without positional arguments."""
    types = {**setting_types(settings_type), **dict.fromkeys(extra, str)}
    options, positional = _read_arguments([a for a in args if a not in _HELP], types)
    if not positional:
        return options
    option, is_pair, value = positional[0].lstrip("+~-").partition("=")
    expected = "expected --NAME VALUE for every setting"
    if is_pair:
        expected = hint(option.replace("-", "_"), types, lambda name: f"{as_option(name)} {value}")
    raise UserError(f"unexpected argument {positional[0]!r}; {expected}")


def _read_arguments(
    args: Sequence[str], types_by_name: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Divide arguments into options, by dotted name, and positional ones.

    An option has one value, or all up to the next option where its type has several. ``--name=value`` is the same. A
    switch may be given without a value. Values are text; below a mapping such as ``task.params`` they are parsed.
    """
    options: dict[str, Any] = {}
    positional: list[str] = []
    tables = [
        name for name, setting_type in types_by_name.items() if get_origin(setting_type) is dict
    ]
    rest = deque(args)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        option, has_value, value = argument[2:].partition("=")
        name = option.replace("-", "_")
        values = [value] if has_value else []
        is_table = name in tables
        is_entry = name.startswith(tuple(f"{table}." for table in tables))
        setting_type = str if is_entry else types_by_name.get(name)
        if setting_type is None:
            raise UserError(f"unknown option --{option}; {hint(name, types_by_name, as_option)}")
        is_sequence = get_origin(setting_type) in (tuple, list)
        takes_more = is_table or is_sequence or (is_entry and not has_value)
        while rest and not rest[0].startswith("--") and (takes_more or not values):
            values.append(rest.popleft())
        if is_table:
            for key, entry in _table_entries(name, values).items():
                options[f"{name}.{key}"] = entry
        elif is_sequence:
            options[name] = values
        elif is_entry and len(values) > 1:
            options[name] = [_parse_value(value) for value in values]
        elif is_entry and values:
            options[name] = _parse_value(values[0])
        elif values and values[0].lower() == "none" and type(None) in get_args(setting_type):
            options[name] = None
        elif values:
            options[name] = values[0]
        elif setting_type is bool or bool in get_args(setting_type):
            options[name] = "true"
        else:
            raise UserError(f"--{option} has no value; expected {as_option(name)} VALUE")
    return options, positional


def _table_entries(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a table that a command line gives as NAME=VALUE or as JSON."""
    entries: dict[str, Any] = {}
    for pair in pairs or [""]:
        key, is_pair, value = pair.partition("=")
        if pair.startswith("{"):
            try:
                entries |= json.loads(pair)
            except ValueError as error:
                raise UserError(f"{as_option(name)} is {pair!r}; expected JSON: {error}") from None
        elif is_pair:
            entries[key.replace("-", "_")] = _parse_value(value)
        else:
            option = as_option(name)
            raise UserError(
                f"{name} is a table; expected {option}.NAME VALUE, {option} NAME=VALUE, or JSON"
            )
    return entries


def _parse_value(text: str) -> Any:
    """Return a value as TOML reads it, and any other text unchanged."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise UserError(
            f"a value is {text[:20]!r}...; expected fewer brackets in each other"
        ) from None
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def merge(
    base: SettingsT,
    overrides: Mapping[str, Any],
    *,
    source: str = "",
    keep: Collection[str] | None = None,
) -> SettingsT:
    """Return ``base``, a dataclass, with ``overrides`` on top, nested as a TOML file has them, or by dotted names.

    Settings that nothing reads (see `gcore_runs.settings.readers`) are refused if their names are in ``keep``, or if
    that is None; otherwise they have their defaults, so that a recipe's settings of one algorithm do not stand in the
    way of another one.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value out of bounds; it names the file
            ``source`` that they are from, if there is one.
    """
    types = setting_types(type(base))
    where = f"{source}: " if source else ""
    values = flatten_settings(base, types)
    for name, value in flatten(overrides, types).items():
        if name not in types:
            if not any(setting.startswith(f"{name}.") for setting in types):
                raise UserError(f"{where}unknown field {name}; {hint(name, types)}")
            if value != {}:
                raise UserError(f"{where}{name} is {value!r:.200}; expected a table")
        elif (
            isinstance(value, bool)
            and isinstance(values[name], int | float)
            and not isinstance(values[name], bool)
        ):
            raise UserError(f"{where}{name} is {value}; expected a number")
        elif isinstance(values[name], dict) and isinstance(value, Mapping):
            _check_entries(name, value, get_args(types[name])[-1], where)
            values[name] = _merge_tables(values[name], value)
        else:
            values[name] = value
    if keep is not None:
        _reset_unread(type(base), values, keep)
    return _validate(type(base), nest(values), source=source)


def _reset_unread(settings_type: type, values: dict[str, Any], keep: Collection[str]) -> None:
    """Give settings that nothing reads their defaults, unless they are to be kept; values may still be text."""
    types = setting_types(settings_type)
    defaults = default_settings(settings_type)
    for name, entry in conditional_settings(settings_type):
        if name in keep or values[name] == defaults[name]:
            continue
        try:
            chosen = {
                chooser: convert_value(chooser, values[chooser], types[chooser])
                for chooser in entry.chosen_by
            }
            is_read = entry.is_read(chosen)
        except (UserError, ConfigError):
            # The settings are refused for this value.
            continue
        if not is_read:
            values[name] = defaults[name]


def _check_entries(name: str, table: Mapping[str, Any], entry_type: Any, where: str) -> None:
    """Raise `UserError` if an entry of a table of sections has a field that these do not have."""
    if not dataclasses.is_dataclass(entry_type):
        return
    types = setting_types(cast(type, entry_type))
    for entry, section in table.items():
        if not isinstance(section, Mapping):
            continue
        for field in section:
            if field not in types:
                unknown = f"{name}.{entry}.{field}"
                settings = [f"{name}.{entry}.{setting}" for setting in types]
                raise UserError(f"{where}unknown field {unknown}; {hint(unknown, settings)}")


def _merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the entries of ``over``, of tables in both also those of the tables."""
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merged[key] = _merge_tables(base[key], value)
    return merged


def _validate(
    settings_type: type[SettingsT], values: Mapping[str, Any], *, source: str = ""
) -> SettingsT:
    """Make a dataclass from nested values, converted from text where a field has another type; raises as `merge`."""
    where = f"{source}: " if source else ""
    try:
        settings: SettingsT = cached_adapter(settings_type).validate_python(values)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    except ValidationError as error:
        raise UserError(f"{where}{_describe_refusal(error)}") from None
    for name, value in flatten_settings(settings).items():
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{where}{name} is {number}; expected a finite number")
            if isinstance(number, int) and abs(number) > _MAX_INT:
                raise UserError(f"{where}{name} is {number}; expected at most {_MAX_INT}")
    return settings


def _describe_refusal(error: ValidationError) -> str:
    """Return the first of pydantic's errors in this project's form."""
    first = error.errors()[0]
    location = first["loc"]
    if first["type"] == "missing" and isinstance(location[-1], int):
        return (
            f"{'.'.join(map(str, location[:-1]))} is {first['input']!r:.200}; expected more values"
        )
    field = ".".join(map(str, location))
    if first["type"] == "value_error":
        # Raised by the section's own checks, with the name of its field.
        prefix = f"{field}." if field else ""
        return prefix + first["msg"].removeprefix("Value error, ")
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown field {field}"
    return f"{field} is {first['input']!r:.200}; {describe_expected(first)}"


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return a TOML file's content; `UserError` if it is missing, or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"config is {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config is {path}: not TOML: {error}") from None
    except RecursionError:
        raise UserError(
            f"config is {path}: not TOML: more brackets in each other than can be read"
        ) from None


def to_toml(config: BaseRunConfig) -> str:
    """Return every field as TOML; unset ones (None) are left out."""
    values = flatten_settings(config).items()
    return tomli_w.dumps(nest({name: value for name, value in values if value is not None}))


def differences(old: BaseRunConfig, new: BaseRunConfig) -> list[str]:
    """Return the fields that differ, as ``name: old -> new``."""
    old_values = _filled_settings(old)
    new_values = _filled_settings(new)
    lines: list[str] = []
    for name in sorted(old_values.keys() | new_values.keys()):
        before = old_values.get(name)
        after = new_values.get(name)
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines


def _filled_settings(config: BaseRunConfig) -> dict[str, Any]:
    """Return the settings by their dotted names, without empty tables."""
    return {name: value for name, value in flatten_settings(config).items() if value != {}}
