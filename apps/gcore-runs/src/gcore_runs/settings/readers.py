"""Settings that have an effect only with some values of others: declared once, refused elsewhere, listed in the docs.

A config class lists them as `read_with`; a setting without an entry is always read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.settings.bounds import Bound, format_value


@dataclass(frozen=True, kw_only=True)
class ReadWith:
    """Settings that are read only with some values of others.

    Example:
        >>> entry = ReadWith(settings=("actor.nft",), chosen_by={"algorithm.name": one_of("nft")})
        >>> entry.is_read({"algorithm.name": "dpo"})
        False
        >>> entry.readers
        'algorithm.name nft'
    """

    settings: tuple[str, ...]
    """Dotted names; that of a section stands for all of its settings."""
    chosen_by: Mapping[str, Bound]
    """The values of other settings, by dotted name, with which these are read: one that holds is enough."""
    hint: str = ""
    """Another way to what the setting seems to be for."""

    def concerns(self, name: str) -> bool:
        """Return whether a setting is one of these, or in one of these sections."""
        return any(f"{name}.".startswith(f"{setting}.") for setting in self.settings)

    def is_read(self, values: Mapping[str, Any]) -> bool:
        """Return whether the settings are read with the values of others, by dotted name."""
        return any(bound.holds(values[name]) for name, bound in self.chosen_by.items())

    @property
    def readers(self) -> str:
        """The others' values in words."""
        return " or ".join(
            f"{name} {bound.expected}".strip() for name, bound in self.chosen_by.items()
        )


def one_of(*values: str, own: bool = False) -> Bound:
    """Accept some names; with ``own`` also a user's function, ``PATH.py:function``, which may read anything."""
    words = ", ".join(values)
    if own:
        words += ", or PATH.py:function"
    return Bound(lambda value: value in values or (own and ".py:" in value), words or "of no value")


ABOVE_0 = Bound(lambda value: value > 0, "above 0")
IS_TRUE = Bound(lambda value: value is True, "true")
IS_SET = Bound(bool, "set")


@cache
def default_settings(config_type: type) -> Mapping[str, Any]:
    """Return the default of every setting of a config class, by dotted name."""
    defaults: dict[str, Any] = {}
    for field in fields(config_type):
        value: Any = field.default
        if field.default_factory is not MISSING:
            value = field.default_factory()
        defaults.update(_flatten(field.name, value))
    return defaults


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        yield from _flatten(f"{name}.{field.name}", getattr(value, field.name))


@cache
def conditional_settings(config_type: type) -> list[tuple[str, ReadWith]]:
    """Return the settings of a config class that are not always read, each with its condition."""
    settings: list[tuple[str, ReadWith]] = []
    entries: tuple[ReadWith, ...] = getattr(config_type, "read_with", ())
    for entry in entries:
        settings.extend(
            (name, entry) for name in default_settings(config_type) if entry.concerns(name)
        )
    return settings


def check_read(config: object) -> None:
    """Raise `UserError` for a setting that differs from its default and is not read with the others' values."""
    defaults = default_settings(type(config))
    for name, entry in conditional_settings(type(config)):
        value = attrgetter(name)(config)
        if value == defaults[name]:
            continue
        chosen = {chooser: attrgetter(chooser)(config) for chooser in entry.chosen_by}
        if not entry.is_read(chosen):
            raise UserError(_refusal(name, value, defaults[name], chosen, entry))


def _refusal(
    name: str, value: Any, default: Any, chosen: Mapping[str, Any], entry: ReadWith
) -> str:
    context = " and ".join(f"{chooser} {format_value(value)}" for chooser, value in chosen.items())
    expected = f"expected {format_value(default)} with {context}: it is read with {entry.readers}"
    if entry.hint:
        expected += f"; {entry.hint}"
    return f"{name} is {format_value(value)}; {expected}"
