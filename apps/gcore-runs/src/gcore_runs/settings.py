"""From TOML and command line to a command's checked settings, and back."""

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import tomli_w
from pydantic import TypeAdapter, ValidationError

from gcore_runs.errors import UserError


class RunConfig(Protocol):
    """What the settings of every command that makes a run have in common. They are a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def runs_dir(self) -> str: ...
    @property
    def resume(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...


ConfigT = TypeVar("ConfigT", bound=RunConfig)


def merge(base: ConfigT, overrides: Mapping[str, Any], *, source: str) -> ConfigT:
    """``base`` with nested ``overrides`` on top.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value out of bounds.
    """
    values = dataclasses.asdict(base)
    _merge_known(values, overrides, prefix="", source=source)
    try:
        return TypeAdapter(type(base)).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        where = f"{field} is {first['input']!r}: " if field and first["type"] != "value_error" else ""
        raise UserError(f"{source}: {where}{message}") from None


def _merge_known(values: dict[str, Any], overrides: Mapping[str, Any], *, prefix: str, source: str) -> None:
    for key, value in overrides.items():
        if key not in values:
            near = difflib.get_close_matches(key, values, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(sorted(values))}"
            raise UserError(f"{source}: unknown field {prefix}{key}; {hint}")
        if isinstance(values[key], dict) and isinstance(value, Mapping) and key != "params":
            _merge_known(values[key], value, prefix=f"{prefix}{key}.", source=source)
        else:
            values[key] = value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's content.

    Raises:
        UserError: missing, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"config is {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config is {path}: not TOML: {error}") from None


def to_toml(config: RunConfig) -> str:
    """Every field, resolved; unset ones (None) are left out."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(entry) if isinstance(entry, dict) else entry
        for key, entry in value.items()
        if entry is not None
    }


def resolve(config: ConfigT) -> ConfigT:
    """Replace what depends on the machine (threads, device) by what this machine gives."""
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}: cpu, cuda, cuda:NUMBER or auto is needed") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return dataclasses.replace(config, threads=config.threads or len(os.sched_getaffinity(0)), device=device)


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Fields that differ, as ``name: old -> new``."""
    a, b = (dict(_flat(dataclasses.asdict(c), "")) for c in (old, new))
    return [
        f"{name}: {a.get(name)} -> {b.get(name)}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    ]


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs
