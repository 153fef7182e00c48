"""Read a command's settings from its recipe, a TOML file and ``--name value`` options, check them, and write them."""

import dataclasses
import json
import math
import os
import re
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import ValidationError

from gcore_runs.errors import UserError
from gcore_runs.migration.key import find_key
from gcore_runs.migration.removed_keys import ENGINE_OPTIONS, REMOVED
from gcore_runs.settings.fingerprints import names_code, take_fingerprints
from gcore_runs.settings.readers import conditional_settings, default_settings
from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig
from gcore_runs.settings.tables import cached_adapter, converted as converted, describe_expected
from gcore_trainer import ConfigError

if TYPE_CHECKING:
    import torch

ConfigT = TypeVar("ConfigT", bound=BaseRunConfig)
SettingsT = TypeVar("SettingsT")

_HELP = ("-h", "--help")
_MAX_INT = 2**63 - 1
_OLD_CRITIC_LR = 1e-5
"""Rate of the critic in earlier versions, where it was not set."""
_MAX_THREADS = 4096
_HUB_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[^\s:]+)?")


def parse(args: Sequence[str], *, prog: str, recipes: Mapping[str, Callable[[], ConfigT]], description: str) -> ConfigT:
    """Return settings from a recipe, a TOML file and the command line, each over the one before; raises as `merge`.

    ``prog`` is the command as users type it, ``gcore-llm train``; ``own_data`` and ``embedded`` are among the recipes.
    """
    options = _options(args, type(recipes["embedded"]()), extra=("config", "recipe"))
    config = options.get("config", "")
    recipe = options.pop("recipe", "")
    if recipe and recipe not in recipes:
        raise UserError(f"recipe is {recipe!r}; expected one of {', '.join(sorted(recipes))}")
    own = options.get("model") or (read_toml(config).get("model") if config else None)
    description = (
        f"{description}\n\n"
        f"--recipe {{{','.join(sorted(recipes))}}}: settings to start from; default: own_data with --model, else "
        "embedded. --config FILE.toml: settings over these, under the same names ([actor.optim] lr = 1e-6). "
        "Options go over both."
    )
    base = recipes[recipe or ("own_data" if own else "embedded")]()
    return _over(base, options, args, prog=prog, description=description)


def extend_recipes(
    recipes: Mapping[str, Callable[[], BaseRunConfig]], kind: type[ConfigT]
) -> dict[str, Callable[[], ConfigT]]:
    """Return recipes as those of a command whose class of settings, ``kind``, has further ones."""
    return {name: partial(_make_recipe, recipe, kind) for name, recipe in recipes.items()}


def _make_recipe(recipe: Callable[[], BaseRunConfig], kind: type[ConfigT]) -> ConfigT:
    return convert_settings(recipe(), kind)


def convert_settings(config: BaseRunConfig, kind: type[ConfigT]) -> ConfigT:
    """Return the settings as ``kind``: those that both classes have, and the defaults of the others."""
    shared = {field.name for field in dataclasses.fields(config)} - {"command"}
    names = [field.name for field in dataclasses.fields(kind) if field.name in shared]
    return kind(**{name: getattr(config, name) for name in names})


def parse_over(base: SettingsT, args: Sequence[str], *, prog: str, description: str) -> SettingsT:
    """Return ``base`` with a TOML file (``--config``) and then the command line over it; raises as `merge`."""
    return _over(base, _options(args, type(base), extra=("config",)), args, prog=prog, description=description)


def parse_arguments(kind: type[SettingsT], args: Sequence[str], *, prog: str, description: str = "") -> SettingsT:
    """Return a dataclass of ``kind``, whose fields without a default are positional, from the command line."""
    _help_if_asked(args, kind, prog=prog, description=description)
    wanted = [f.name for f in dataclasses.fields(cast(Any, kind)) if f.default is dataclasses.MISSING]
    options, given = _read_arguments(args, {n: t for n, t in setting_types(kind).items() if n not in wanted})
    usage = f"{prog} {' '.join(name.upper() for name in wanted)}"
    if len(given) < len(wanted):
        raise UserError(f"{wanted[len(given)].upper()} is missing; expected {usage}")
    if len(given) > len(wanted):
        raise UserError(f"unexpected argument {given[len(wanted)]!r}; expected {usage}")
    return validated(kind, options | dict(zip(wanted, given, strict=True)))


def _over(base: SettingsT, options: dict[str, Any], args: Sequence[str], *, prog: str, description: str) -> SettingsT:
    over = nested(options)
    over_file = base
    if config := options.pop("config", ""):
        over = nested(options)
        values = read_toml(config)
        # Alone at first, so that its errors name it; what it sets may be read only with the options.
        over_file = merge(base, values, source=config, keep=())
        over = _merged(values, over)
    _help_if_asked(args, type(base), prog=prog, description=description, default=over_file)
    return merge(base, over, keep=[name for name, _ in _flat(over, setting_types(type(base)))])


def _help_if_asked(args: Sequence[str], kind: type, *, prog: str, description: str, **default: Any) -> None:
    """Print every option with its documentation and default, and exit, if ``args`` ask for help."""
    if any(argument in _HELP for argument in args):
        import tyro

        config = (tyro.conf.FlagConversionOff,)
        tyro.cli(kind, args=["--help"], prog=prog, description=description or None, config=config, **default)


@cache
def setting_types(kind: type, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of every setting of a dataclass, by its dotted name: ``{"rollout.n": int, ...}``."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        own = hints[field.name]
        name = prefix + field.name
        is_section = isinstance(own, type) and dataclasses.is_dataclass(own)
        found |= setting_types(own, f"{name}.") if is_section else {name: own}
    return found


def as_option(name: str) -> str:
    """Spell a setting as an option: ``--rollout.n``."""
    return "--" + name.replace("_", "-")


def _options(args: Sequence[str], kind: type, *, extra: Sequence[str]) -> dict[str, Any]:
    """Read the options for the settings of ``kind``, and the ``extra`` ones, without positional arguments."""
    known = {**setting_types(kind), **dict.fromkeys(extra, str)}
    options, positional = _read_arguments([a for a in args if a not in _HELP], known)
    if not positional:
        return options
    given, is_pair, value = positional[0].lstrip("+~-").partition("=")
    expected = "expected --NAME VALUE for every setting"
    if is_pair:
        expected = hint(given.replace("-", "_"), known, lambda name: f"{as_option(name)} {value}")
    raise UserError(f"unexpected argument {positional[0]!r}; {expected}")


def _read_arguments(args: Sequence[str], types_by_name: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Divide arguments into options, by dotted name, and positional ones.

    An option has one value, or all up to the next option where its type has several. ``--name=value`` is the same. A
    switch may be given without a value. Values are text; below a mapping such as ``task.params`` they are parsed.
    """
    options: dict[str, Any] = {}
    positional: list[str] = []
    tables = [name for name, kind in types_by_name.items() if get_origin(kind) is dict]
    rest = deque(args)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        given, has_value, value = argument[2:].partition("=")
        name = given.replace("-", "_")
        is_entry = name.startswith(tuple(f"{table}." for table in tables))
        if name in tables:
            pairs = [value] if has_value else []
            while rest and not rest[0].startswith("--"):
                pairs.append(rest.popleft())
            for key, entry in _table_entries(name, pairs).items():
                options[f"{name}.{key}"] = entry
            continue
        kind = str if is_entry else types_by_name.get(name)
        if kind is None:
            raise UserError(f"unknown option --{given}; {hint(name, types_by_name, as_option)}")
        is_sequence = get_origin(kind) in (tuple, list)
        values = [value] if has_value else []
        takes_more = is_sequence or (is_entry and not has_value)
        while rest and not rest[0].startswith("--") and (takes_more or not values):
            values.append(rest.popleft())
        if bool in (kind, *get_args(kind)) and not is_sequence and not values:
            values = ["true"]
        if is_sequence:
            options[name] = values
        elif not values:
            raise UserError(f"--{given} has no value; expected {as_option(name)} VALUE")
        elif is_entry:
            parsed = [_parsed(v) for v in values]
            options[name] = parsed[0] if len(parsed) == 1 else parsed
        else:
            options[name] = None if values[0].lower() == "none" and type(None) in get_args(kind) else values[0]
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
            entries[key.replace("-", "_")] = _parsed(value)
        else:
            option = as_option(name)
            raise UserError(f"{name} is a table; expected {option}.NAME VALUE, {option} NAME=VALUE, or JSON")
    return entries


def _parsed(text: str) -> Any:
    """Return a value as TOML reads it, and any other text unchanged."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise UserError(f"a value is {text[:20]!r}...; expected fewer brackets in each other") from None
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def merge(
    base: SettingsT, overrides: Mapping[str, Any], *, source: str = "", keep: Collection[str] | None = None
) -> SettingsT:
    """Return ``base``, a dataclass, with ``overrides`` on top, nested as a TOML file has them, or by dotted names.

    Settings that nothing reads (see `gcore_runs.settings.readers`) are refused if their names are in ``keep``, or if
    that is None; otherwise they have their defaults, so that a recipe's settings of one algorithm do not stand in the
    way of another one.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value out of bounds; it names the file
            ``source`` that they are from, if there is one.
    """
    known = setting_types(type(base))
    where = f"{source}: " if source else ""
    values = dict(_flat(dataclasses.asdict(cast(Any, base)), known))
    for name, value in _flat(overrides, known):
        if name not in known:
            if not any(setting.startswith(f"{name}.") for setting in known):
                raise UserError(f"{where}unknown field {name}; {hint(name, known)}")
            if value != {}:
                raise UserError(f"{where}{name} is {value!r:.200}; expected a table")
        elif isinstance(value, bool) and isinstance(values[name], int | float) and not isinstance(values[name], bool):
            raise UserError(f"{where}{name} is {value}; expected a number")
        elif isinstance(values[name], dict) and isinstance(value, Mapping):
            _check_entries(name, value, get_args(known[name])[-1], where)
            values[name] = _merged(values[name], value)
        else:
            values[name] = value
    if keep is not None:
        _reset_unread(type(base), values, keep)
    return validated(type(base), nested(values), source=source)


def _reset_unread(kind: type, values: dict[str, Any], keep: Collection[str]) -> None:
    """Give settings that nothing reads their defaults, unless they are to be kept; values may still be text."""
    known = setting_types(kind)
    defaults = default_settings(kind)
    for name, entry in conditional_settings(kind):
        if name in keep or values[name] == defaults[name]:
            continue
        try:
            chosen = {chooser: converted(chooser, values[chooser], known[chooser]) for chooser in entry.chosen_by}
            is_read = entry.is_read(chosen)
        except (UserError, ConfigError):
            # The settings are refused for this value.
            continue
        if not is_read:
            values[name] = defaults[name]


def _check_entries(name: str, table: Mapping[str, Any], kind: Any, where: str) -> None:
    """Raise `UserError` if an entry of a table of sections has a field that these do not have."""
    if not dataclasses.is_dataclass(kind):
        return
    own = setting_types(cast(type, kind))
    for entry, section in table.items():
        for field in section if isinstance(section, Mapping) else ():
            if field not in own:
                full = [f"{name}.{entry}.{known}" for known in own]
                raise UserError(f"{where}unknown field {name}.{entry}.{field}; {hint(f'{name}.{entry}.{field}', full)}")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the entries of ``over``, of tables in both also those of the tables."""
    own = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, Mapping) and isinstance(base.get(k), dict)}
    return {**base, **over, **own}


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Return what to write instead of an unknown name; the tables of other libraries' names are read only then."""
    from gcore_runs.settings import other_names

    return other_names.hint(name, known, spelled)


def _flat(values: Mapping[str, Any], leaves: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value by its dotted name; a mapping is a value if it is empty, or one of the ``leaves``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and prefix + key not in leaves:
            yield from _flat(value, leaves, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by their dotted names as nested tables."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        table = found
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    return found


def validated(kind: type[SettingsT], values: Mapping[str, Any], *, source: str = "") -> SettingsT:
    """Make a dataclass from nested values, converted from text where a field has another type; raises as `merge`."""
    where = f"{source}: " if source else ""
    try:
        made: SettingsT = cached_adapter(kind).validate_python(values)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    except ValidationError as error:
        raise UserError(f"{where}{_refused(error)}") from None
    for name, value in _flat(dataclasses.asdict(cast(Any, made))):
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{where}{name} is {number}; expected a finite number")
            if isinstance(number, int) and abs(number) > _MAX_INT:
                raise UserError(f"{where}{name} is {number}; expected at most {_MAX_INT}")
    return made


def _refused(error: ValidationError) -> str:
    """Return the first of pydantic's errors in this project's form."""
    first = error.errors()[0]
    location = first["loc"]
    if first["type"] == "missing" and isinstance(location[-1], int):
        return f"{'.'.join(map(str, location[:-1]))} is {first['input']!r:.200}; expected more values"
    field = ".".join(map(str, location))
    if first["type"] == "value_error":
        # Raised by the section's own checks, with the name of its field.
        return f"{field}{'.' if field else ''}{first['msg'].removeprefix('Value error, ')}"
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
        raise UserError(f"config is {path}: not TOML: more brackets in each other than can be read") from None


def translate_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run folder under their present names, nested, without those that have no effect now.

    Raises:
        UserError: a setting that is a constant now has another value.
    """
    translated: dict[str, Any] = {}
    for name, value in _flat(values):
        key = find_key(REMOVED, name)
        if key is None:
            translated[name] = value
        elif key.ours:
            target = key.ours[0]
            if target == ENGINE_OPTIONS:
                target += f".{name.rpartition('.')[2]}"
            translated[target] = value
        elif key.off is not None and value not in key.off:
            raise UserError(f"{name} is {value!r}; expected {key.off[-1]!r}: {key.why}")
    tables = nested(translated)
    _drop_inherited(tables)
    return tables


def _drop_inherited(values: dict[str, Any]) -> None:
    """Leave out what a table of settings had of its own, in earlier versions, and would follow from others now."""
    actor = values.get("actor", {}).get("optim", {})
    critic = values.get("critic", {}).get("optim", {})
    inherited = {**actor, "lr": _OLD_CRITIC_LR}
    for name, value in list(critic.items()):
        if inherited.get(name) == value:
            del critic[name]


def to_toml(config: BaseRunConfig) -> str:
    """Return every field as TOML; unset ones (None) are left out."""
    return tomli_w.dumps(nested({name: v for name, v in _flat(dataclasses.asdict(config)) if v is not None}))


def resolve(config: ConfigT, *, is_local: bool = False) -> ConfigT:
    """Return the settings with ``threads``, ``device`` and ``dtype`` of this machine in place of 0 and auto.

    On a Ray cluster the device is that of its nodes, unless ``is_local``: then models are loaded in this process.

    Models and data on the Hugging Face Hub get the commit that they have now. A run that is resumed keeps its commits,
    and its data type, whatever auto was when it began. `UserError` for a name that the Hub does not have.
    """
    if config.threads > _MAX_THREADS:
        raise UserError(f"threads is {config.threads}; expected at most {_MAX_THREADS}, or 0 for one a core")
    if isinstance(config, BaseRLConfig) and config.runtime == "ray":
        device = _resolve_device("auto") if is_local else _resolve_device_on_cluster(config)
    else:
        device = _resolve_device(config.device)
    changes: dict[str, Any] = {"threads": config.threads or len(os.sched_getaffinity(0)), "device": device}
    if getattr(config, "dtype", "") == "auto":
        before = str(_resumed(config).get("dtype", "auto"))
        changes["dtype"] = before if before != "auto" else "bfloat16" if device.startswith("cuda") else "float32"
    resolved = dataclasses.replace(config, **changes)
    models = _models(config)
    names = [name for value in models.values() for name in ((value,) if isinstance(value, str) else value)]
    data = getattr(config, "data", None)
    sources = {f"data.{name}": getattr(data, name) for name in ("train_files", "val_files")} if data else {}
    if any(map(is_hub_model, names)) or any("hf://" in source for own in sources.values() for source in own):
        from gcore_runs.data.hub import pinned

        return merge(resolved, nested(pinned(models, sources, _resumed(config), is_hub_model)))
    return resolved


def _resolve_device(device: str) -> str:
    """Return a device of this machine, as torch names it; `UserError` if it has none of this name."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    index = _parse_device(device).index or 0
    if device.startswith("cuda") and index >= torch.cuda.device_count():
        raise UserError(
            f"device is {device!r}; expected one of this machine's {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _resolve_device_on_cluster(config: BaseRLConfig) -> str:
    """Check the cluster, and return the device of its nodes, as torch names it."""
    from gcore_runs.settings.cluster import check_cluster, cluster_address, resolve_device

    check_cluster(config.ray)
    if not cluster_address(config.ray):
        # The cluster is going to be this machine.
        return _resolve_device(config.device)
    device = resolve_device(config.device, config.ray)
    _parse_device(device)
    return device


def _parse_device(device: str) -> "torch.device":
    """Return a device as torch has it; `UserError` if it is none."""
    import torch

    try:
        return torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}; expected cpu, cuda, cuda:NUMBER or auto") from None


def _models(config: BaseRunConfig) -> dict[str, str | Sequence[str]]:
    """Return the folders and names of the run's models, by dotted name."""
    found: dict[str, str | Sequence[str]] = {}
    for name in config.model_settings:
        table, is_table, field = name.partition(".*.")
        own = attrgetter(table)(config)
        found |= (
            {f"{table}.{key}.{field}": getattr(entry, field) for key, entry in own.items()} if is_table else {name: own}
        )
    return found


def is_hub_model(name: str) -> bool:
    """Return whether a name is of a model on the Hub, ``NAMESPACE/NAME[@REVISION]``, and not of a folder there is."""
    return _HUB_MODEL.fullmatch(name) is not None and not Path(name).exists()


def _resumed(config: BaseRunConfig) -> dict[str, Any]:
    """Return the settings of the run that these resume, as its file has them; none: there is no such run."""
    folder = Path(config.runs_dir) / config.name
    is_resumed = (folder / "model").is_dir() or any((folder / "checkpoints").glob("*"))
    if config.resume == "never" or not is_resumed or not (folder / "config.toml").is_file():
        return {}
    return read_toml(folder / "config.toml")


def content_fingerprints(config: BaseRunConfig) -> dict[str, str]:
    """Return a hash of the files that each setting names; see `take_fingerprints`."""
    return take_fingerprints(dict(_flat(dataclasses.asdict(config))), _models(config))


def is_of_code(config: BaseRunConfig, setting: str) -> bool:
    """Return whether the files of a setting, which have a fingerprint, are code of the user's."""
    return names_code(setting, _models(config))


def differences(old: BaseRunConfig, new: BaseRunConfig) -> list[str]:
    """Return the fields that differ, as ``name: old -> new``."""
    a, b = ({name: v for name, v in _flat(dataclasses.asdict(c)) if v != {}} for c in (old, new))
    changed = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return [f"{name}: {a.get(name)} -> {b.get(name)}" for name in changed]
