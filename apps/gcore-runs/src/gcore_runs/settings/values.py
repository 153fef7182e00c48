"""Conversion of nested values, from TOML or the command line, to checked settings, and back."""

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import TypeAdapter, ValidationError

from gcore_runs.errors import UserError
from gcore_runs.settings.arguments import setting_types
from gcore_runs.settings.other_names import hint
from gcore_runs.settings.run_config import BaseRunConfig

ConfigT = TypeVar("ConfigT", bound=BaseRunConfig)
SettingsT = TypeVar("SettingsT")

_MAX_INT = 2**63 - 1
_MAX_THREADS = 4096


def merge(base: SettingsT, overrides: Mapping[str, Any], *, source: str = "") -> SettingsT:
    """Return ``base``, a dataclass, with nested ``overrides`` on top.

    Args:
        base: settings to start from.
        overrides: as a TOML file has them.
        source: the file that they are from, for errors; empty: options of a command line.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value out of bounds.
    """
    values: dict[str, Any] = dataclasses.asdict(cast(Any, base))
    known = setting_types(type(base))
    _merge_known(values, overrides, prefix="", known=known, source=f"{source}: " if source else "")
    return validated(type(base), values, source=source)


def validated(kind: type[SettingsT], values: Mapping[str, Any], *, source: str = "") -> SettingsT:
    """Make a dataclass from nested values; text is converted where a field has another type.

    Raises:
        UserError: a wrong type, a number that is not finite, a value out of bounds.
    """
    where = f"{source}: " if source else ""
    try:
        made: SettingsT = _adapter(kind).validate_python(values)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        location = first["loc"]
        if first["type"] == "missing" and isinstance(location[-1], int):
            name = ".".join(map(str, location[:-1]))
            raise UserError(f"{where}{name} is {first['input']!r:.200}; expected more values") from None
        field = ".".join(map(str, location))
        if first["type"] == "value_error":
            # Raised by the section's own checks, with the name of its field.
            message = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{where}{field}{'.' if field else ''}{message}") from None
        raise UserError(f"{where}{field} is {first['input']!r:.200}; {_expected(first)}") from None
    for name, value in _flat(dataclasses.asdict(cast(Any, made)), ""):
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{where}{name} is {number}; expected a finite number")
            if isinstance(number, int) and abs(number) > _MAX_INT:
                raise UserError(f"{where}{name} is {number}; expected at most {_MAX_INT}")
    return made


def converted(field: str, value: object, kind: Any) -> Any:
    """Return a value as the type ``kind``: lists as tuples, text as enumerations or dates, and so on.

    Raises:
        UserError: it cannot be one; ``field`` names it.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{field} is {value!r:.200}; {_expected(error.errors()[0])}") from None


def _expected(error: Mapping[str, Any]) -> str:
    """Return what pydantic would accept, as the second half of an error."""
    expected: str = error["msg"].replace("Input should be ", "expected ")
    return expected.partition(",")[0] if error["type"].endswith("_parsing") else expected


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return a cached adapter: making one takes longer than using it."""
    return TypeAdapter(kind)


def _merge_known(
    values: dict[str, Any], overrides: Mapping[str, Any], *, prefix: str, known: Mapping[str, Any], source: str
) -> None:
    for key, value in overrides.items():
        if key not in values:
            name = prefix + _innermost(key, value)
            raise UserError(f"{source}unknown field {name}; {hint(name, known)}")
        is_section = isinstance(values[key], dict) and prefix + key not in known
        if is_section and isinstance(value, Mapping):
            _merge_known(values[key], value, prefix=f"{prefix}{key}.", known=known, source=source)
        elif is_section:
            raise UserError(f"{source}{prefix}{key} is {value!r:.200}; expected a table")
        elif isinstance(value, bool) and isinstance(values[key], int | float) and not isinstance(values[key], bool):
            raise UserError(f"{source}{prefix}{key} is {value}; expected a number")
        elif isinstance(values[key], dict) and isinstance(value, Mapping):
            values[key] = {**values[key], **value}
        else:
            values[key] = value


def _innermost(key: str, value: object) -> str:
    """Return the name of an unknown field, or of the first one in an unknown section."""
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        key = f"{key}.{inner}"
    return key


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return a TOML file's content.

    Raises:
        UserError: missing, or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"config is {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config is {path}: not TOML: {error}") from None


def to_toml(config: BaseRunConfig) -> str:
    """Return every field as TOML; unset ones (None) are left out."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(entry) if isinstance(entry, dict) else entry
        for key, entry in value.items()
        if entry is not None
    }


def resolve(config: ConfigT) -> ConfigT:
    """Return the settings with ``threads`` and ``device`` of this machine in place of 0 and auto."""
    import torch

    if config.threads > _MAX_THREADS:
        raise UserError(f"threads is {config.threads}; expected at most {_MAX_THREADS}, or 0 for one a core")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}; expected cpu, cuda, cuda:NUMBER or auto") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {device!r}; expected one of this machine's {torch.cuda.device_count()} CUDA devices"
        )
    return dataclasses.replace(config, threads=config.threads or len(os.sched_getaffinity(0)), device=device)


def differences(old: BaseRunConfig, new: BaseRunConfig) -> list[str]:
    """Return the fields that differ, as ``name: old -> new``."""
    a, b = (dict(_flat(dataclasses.asdict(c), "")) for c in (old, new))
    return [
        f"{name}: {a.get(name)} -> {b.get(name)}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    ]


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs
