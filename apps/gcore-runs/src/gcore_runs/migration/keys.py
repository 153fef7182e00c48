"""Settings of other libraries and of earlier versions, and the settings here that follow from each."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Key:
    """A setting of another library, or with a name that ends in ``.*`` a section of them."""

    ours: tuple[str, ...] = ()
    """Settings here that follow from it; of several that mean the same in different commands, each has its own."""
    default: Any = None
    """Its value in the other library if it is not set."""
    why: str = ""
    """Why there is no setting here, in a few words."""
    off: tuple[Any, ...] | None = None
    """None: it has no meaning here. Otherwise the values with which nothing is missing; with others something is."""


@cache
def read_keys(source: Literal["verl", "trl", "removed"]) -> Mapping[str, Key]:
    """Return the settings of verl, of TRL or of earlier versions, by their dotted names."""
    tables = tomllib.loads(
        (files("gcore_runs.migration") / f"{source}.toml").read_text(encoding="utf-8")
    )
    keys: dict[str, Key] = {}
    for name, table in tables.items():
        if "to" in table or "why" in table:
            keys[name] = _make_key(**table)
            continue
        for last, entry in table.items():
            keys[f"{name}.{last}"] = _make_key(**entry)
    return keys


def _make_key(
    to: list[str] | None = None, default: Any = None, why: str = "", off: list[Any] | None = None
) -> Key:
    return Key(
        ours=tuple(to or ()), default=default, why=why, off=None if off is None else (None, *off)
    )


def find_key(keys: Mapping[str, Key], name: str) -> Key | None:
    """Return the key of this name, or else of the innermost section that it is in; None: it is not known."""
    if name in keys:
        return keys[name]
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        section = ".".join([*parts[:depth], "*"])
        if section in keys:
            return keys[section]
    return None
