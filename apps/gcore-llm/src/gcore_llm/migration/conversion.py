"""A config of another library, the settings that follow from it, and what is said of every key."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, get_args

import tomli_w

from gcore_runs import UserError
from gcore_runs.migration.keys import Key, find_key
from gcore_runs.settings.parsing import merge, nest, setting_types
from gcore_runs.settings.run_config import BaseRunConfig, TrackerName

NEVER = 1_000_000
"""Steps between events that another library's config does not ask for."""
TRACKERS = get_args(TrackerName)
WRITTEN = "metrics.jsonl and TensorBoard are always written"


Verdict = Literal["mapped", "no meaning", "missing", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of a conversion for one key."""

    key: str
    value: Any
    verdict: Verdict
    text: str
    """The settings here with their values, or why there is none."""


@dataclass(kw_only=True)
class Conversion:
    """A conversion under way: values are read by `get`, and settings written by `put`."""

    library: str
    command: str
    """The command of gcore-llm that takes the settings."""
    config: BaseRunConfig
    """Its defaults."""
    keys: Mapping[str, Key]
    given: Mapping[str, Any]
    """Values by dotted name."""
    trainer: str = ""
    """The trainer of the other library that the settings are for."""
    cautions: Sequence[str] = ()
    """Sentences on what may differ from the config's meaning."""
    explicit: Collection[str] = ()
    """Names that were given on a command line, and not in a file of all settings."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of the other library that are not those of ``keys``."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The keys that each setting follows from."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    notes: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def known(self) -> Collection[str]:
        """The settings of the command."""
        known = [*setting_types(type(self.config))]
        for table, attribute in self.config.tables.items():
            entries = fields(attrgetter(attribute)(self.config))
            known.extend(f"{table}.{entry.name}" for entry in entries)
        return known

    def get(self, name: str) -> Any:
        """Return the value of a key, or the other library's default."""
        value = self.given.get(name)
        return self.default(name) if value is None else value

    def default(self, name: str) -> Any:
        """Return the other library's default of a key."""
        return self.defaults[name] if name in self.defaults else self.keys[name].default

    def has(self, *names: str) -> bool:
        """Return whether one of the keys has a value that is not None."""
        return any(self.given.get(name) is not None for name in names)

    def put(self, setting: str, value: Any, *names: str) -> None:
        """Write a setting that follows from some keys."""
        self.settings[setting] = value
        self.sources[setting] = names

    def copy(self, *names: str) -> None:
        """Write the first setting here that each key has, with its value unchanged, unless that is None."""
        for name in names:
            value = self.get(name)
            setting = next((own for own in self.keys[name].ours if own in self.known), None)
            if value is not None and setting is not None:
                self.put(setting, value, name)

    def copy_section(self, section: str, setting: str) -> None:
        """Write a table with all keys of a section, if there are any."""
        names = [name for name in self.given if name.startswith(f"{section}.")]
        if names:
            self.put(setting, {name.removeprefix(f"{section}."): self.given[name] for name in names}, *names)

    def one_of(self, name: str, choices: Mapping[Any, Any], instead: Any, expected: str = "") -> Any:
        """Return what is here for the value of a key, or ``instead``, where the value is missing here."""
        value = self.get(name)
        if value in choices:
            return choices[value]
        accepted = expected or f"there are {', '.join(dict.fromkeys(str(own) for own in choices.values()))}"
        self.missing[name] = f"{accepted}; {instead} is written"
        return instead

    def result(self) -> BaseRunConfig:
        """Return the settings as the command's own; `UserError` if it refuses them."""
        # The other library's scripts set, for all algorithms, what only some of them read.
        return merge(self.config, nest(self.settings), source=f"converted from {self.library}", keep=())

    def written(self) -> dict[str, Any]:
        """Return the settings to write: those that were given, and defaults of the other library that differ."""
        result = self.result()
        written: dict[str, Any] = {}
        for setting, value in self.settings.items():
            table = next((table for table in self.config.tables if setting.startswith(f"{table}.")), None)
            if table is not None:
                # An entry is in place of a value that may be another setting's.
                attribute = self.config.tables[table] + setting.removeprefix(table)
                if _plain(attrgetter(attribute)(result)) == _plain(value):
                    written[setting] = value
                continue
            is_read = _plain(attrgetter(setting)(result)) == _plain(value)
            is_given = any(name in self.given for name in self.sources[setting])
            differs = _plain(attrgetter(setting)(self.config)) != _plain(value)
            if is_read and (is_given or differs):
                written[setting] = value
        return written

    def lines(self) -> list[Line]:
        """Return a line for every key that was given, in their order, and for every default that is written."""
        written = self.written()
        found: list[Line] = []
        for name, value in self.given.items():
            verdict, text = self._verdict(name, value, written)
            found.append(Line(key=name, value=value, verdict=verdict, text=text))
        found += [
            Line(key=name, value="(not set)", verdict="missing", text=text)
            for name, text in self.missing.items()
            if name not in self.given
        ]
        for setting, value in written.items():
            unset = [name for name in self.sources[setting] if name not in self.given]
            if unset and len(unset) == len(self.sources[setting]):
                text = f"{setting} = {_shown(value)}, where gcore has another default"
                found.append(Line(key=unset[0], value="(not set)", verdict="mapped", text=text))
        return found

    def _verdict(self, name: str, value: Any, written: Mapping[str, Any]) -> tuple[Verdict, str]:
        key, is_class = find_key(self.keys, name), name.rpartition(".")[2] == "_target_"
        ours = [setting for setting in written if name in self.sources[setting]]
        if name in self.missing:
            return "missing", self.missing[name]
        if ours:
            text = ", ".join(f"{setting} = {_shown(written[setting])}" for setting in ours)
            return "mapped", "; ".join(filter(None, (text, self.notes.get(name))))
        if self.notes.get(name):
            return "no meaning", self.notes[name]
        if is_class or (key is None and value is None):
            return "no meaning", "not set, or a name of a class"
        if key is None:
            return "unknown", f"no key of {self.library} that is known here: check whether it changes training"
        if key.ours:
            return "no meaning", f"without effect with these settings; see {key.ours[0]}"
        if key.off is None:
            return "no meaning", key.why
        return ("no meaning", "off, as here") if value in key.off else ("missing", key.why)

    def toml(self, origin: str) -> str:
        """Return the settings as a TOML file, each line with the keys that it follows from, after what is missing."""
        head = [
            f"# Written by gcore-llm from-{self.library.lower()} from {origin}.",
            f"# Converted as {self.trainer}.",
            f"# gcore-llm {self.command} --config FILE",
        ]
        head += [f"# caution: {_shown(caution)}" for caution in self.cautions]
        for line in self.lines():
            if line.verdict in ("missing", "unknown"):
                head.append(f"# {line.verdict} here: {line.key} = {_shown(line.value)}: {line.text}")
        written = self.written()
        sections: dict[str, list[str]] = {}
        for setting in sorted(written, key=lambda own: (own.rpartition(".")[0], own)):
            if isinstance(written[setting], Mapping):
                sections[setting] = tomli_w.dumps(written[setting]).splitlines()
                continue
            section, _, last = setting.rpartition(".")
            line = tomli_w.dumps({last: _plain(written[setting])}).strip()
            if len(one_line := line.replace("\n    ", " ").replace(",\n]", " ]")) < 100:
                line = one_line
            names = " ".join(name if name in self.given else f"{name} (default)" for name in self.sources[setting])
            sections.setdefault(section, []).append(f"{line}  # {names}")
        body = [[f"[{section}]" if section else "", *lines] for section, lines in sections.items()]
        return "\n".join(["\n".join(head), *("\n".join(filter(None, lines)) + "\n" for lines in body)])


def _plain(value: Any) -> Any:
    return [_plain(own) for own in value] if isinstance(value, tuple | list) else value


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted names; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def folder_name(text: object) -> str:
    """Return a text as the name of a run's folder."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in str(text)).lstrip(".-") or "default"


def number_of(conversion: Conversion, name: str) -> float:
    """Return the number of a key; `UserError` if it is none."""
    value = conversion.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}; expected a number, such as by {name}=NUMBER after the config's name")
    return value
