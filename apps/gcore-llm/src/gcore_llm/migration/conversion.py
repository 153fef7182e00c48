"""A config of another library, the settings that follow from it, and what is said of every key."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, get_args

import tomli_w

from gcore_runs import UserError
from gcore_runs.migration.keys import Key, find_key
from gcore_runs.settings.checks import nest, setting_types
from gcore_runs.settings.parsing import merge
from gcore_runs.settings.run_config import BaseRunConfig
from gcore_runs.settings.sections import TrackerName

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
    values: Mapping[str, Any]
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
        settings = list(setting_types(type(self.config)))
        for table, attribute in self.config.tables.items():
            entries = fields(attrgetter(attribute)(self.config))
            settings.extend(f"{table}.{entry.name}" for entry in entries)
        return settings

    def get(self, name: str) -> Any:
        """Return the value of a key, or the other library's default."""
        value = self.values.get(name)
        return self.default(name) if value is None else value

    def default(self, name: str) -> Any:
        """Return the other library's default of a key."""
        if name in self.defaults:
            return self.defaults[name]
        return self.keys[name].default

    def has(self, *names: str) -> bool:
        """Return whether one of the keys has a value that is not None."""
        return any(self.values.get(name) is not None for name in names)

    def put(self, setting: str, value: Any, *names: str) -> None:
        """Write a setting that follows from some keys."""
        self.settings[setting] = value
        self.sources[setting] = names

    def copy(self, *names: str) -> None:
        """Write the first setting here that each key has, unless its value is None: of a choice, what it is here."""
        for name in names:
            value = self.get(name)
            settings = self.known_settings(name)
            if value is None or not settings:
                continue
            choices = self.keys[name].values
            if choices:
                value = self.one_of(name, choices, next(iter(choices.values())))
            self.put(settings[0], value, name)

    def known_settings(self, name: str) -> list[str]:
        """Return the settings of the command that follow from a key."""
        return [setting for setting in self.keys[name].ours if setting in self.known]

    def copy_section(self, section: str, setting: str) -> None:
        """Write a table with all keys of a section, if there are any."""
        prefix = f"{section}."
        table: dict[str, Any] = {}
        for name, value in self.values.items():
            if name.startswith(prefix):
                table[name.removeprefix(prefix)] = value
        if table:
            self.put(setting, table, *(prefix + name for name in table))

    def one_of(
        self, name: str, choices: Mapping[Any, Any], instead: Any, expected: str = ""
    ) -> Any:
        """Return what is here for the value of a key, or ``instead``, where the value is missing here."""
        value = self.get(name)
        if value in choices:
            return choices[value]
        if not expected:
            expected = f"there are {', '.join(dict.fromkeys(map(str, choices.values())))}"
        self.missing[name] = f"{expected}; {instead} is written"
        return instead

    def result(self) -> BaseRunConfig:
        """Return the settings as the command's own; `UserError` if it refuses them."""
        # The other library's scripts set, for all algorithms, what only some of them read.
        return merge(
            self.config, nest(self.settings), source=f"converted from {self.library}", keep=()
        )

    def settings_to_write(self) -> dict[str, Any]:
        """Return the settings to write: those that were given, and defaults of the other library that differ."""
        result = self.result()
        written: dict[str, Any] = {}
        for setting, value in self.settings.items():
            table = next(
                (table for table in self.config.tables if setting.startswith(f"{table}.")), None
            )
            if table is not None:
                # An entry is in place of a value that may be another setting's.
                attribute = self.config.tables[table] + setting.removeprefix(table)
                if _plain(attrgetter(attribute)(result)) == _plain(value):
                    written[setting] = value
                continue
            is_read = _plain(attrgetter(setting)(result)) == _plain(value)
            is_given = any(name in self.values for name in self.sources[setting])
            differs = _plain(attrgetter(setting)(self.config)) != _plain(value)
            if is_read and (is_given or differs):
                written[setting] = value
        return written

    def lines(self) -> list[Line]:
        """Return a line for every key that was given, in their order, and for every default that is written."""
        written = self.settings_to_write()
        lines: list[Line] = []
        for name, value in self.values.items():
            verdict, text = self._verdict(name, value, written)
            lines.append(Line(key=name, value=value, verdict=verdict, text=text))
        for name, text in self.missing.items():
            if name not in self.values:
                lines.append(Line(key=name, value="(not set)", verdict="missing", text=text))
        for setting, value in written.items():
            names = self.sources[setting]
            if names and self.values.keys().isdisjoint(names):
                text = f"{setting} = {_format_value(value)}, where gcore has another default"
                lines.append(Line(key=names[0], value="(not set)", verdict="mapped", text=text))
        return lines

    def _verdict(self, name: str, value: Any, written: Mapping[str, Any]) -> tuple[Verdict, str]:
        if name in self.missing:
            return "missing", self.missing[name]
        note = self.notes.get(name)
        texts = [
            f"{setting} = {_format_value(value)}"
            for setting, value in written.items()
            if name in self.sources[setting]
        ]
        if texts:
            text = ", ".join(texts)
            return "mapped", f"{text}; {note}" if note else text
        if note:
            return "no meaning", note
        key = find_key(self.keys, name)
        is_class = name.rpartition(".")[2] == "_target_"
        if is_class or (key is None and value is None):
            return "no meaning", "not set, or a name of a class"
        if key is None:
            return (
                "unknown",
                f"no key of {self.library} that is known here: check whether it changes training",
            )
        if key.ours:
            return "no meaning", f"without effect with these settings; see {key.ours[0]}"
        if key.off is None:
            return "no meaning", key.why
        if value in key.off:
            return "no meaning", "off, as here"
        return "missing", key.why

    def toml(self, origin: str) -> str:
        """Return the settings as a TOML file, each line with the keys that it follows from, after what is missing."""
        text = [
            f"# Written by gcore-llm from-{self.library.lower()} from {origin}.",
            f"# Converted as {self.trainer}.",
            f"# gcore-llm {self.command} --config FILE",
        ]
        text += [f"# caution: {_format_value(caution)}" for caution in self.cautions]
        for line in self.lines():
            if line.verdict in ("missing", "unknown"):
                text.append(
                    f"# {line.verdict} here: {line.key} = {_format_value(line.value)}: {line.text}"
                )
        sections: dict[str, list[str]] = {}
        for setting, value in sorted(self.settings_to_write().items(), key=_toml_position):
            if isinstance(value, Mapping):
                sections[setting] = tomli_w.dumps(value).splitlines()
            else:
                section = setting.rpartition(".")[0]
                sections.setdefault(section, []).append(self._toml_line(setting, value))
        for section, lines in sections.items():
            if section:
                text.append(f"[{section}]")
            text += [*filter(None, lines), ""]
        return "\n".join(text)

    def _toml_line(self, setting: str, value: Any) -> str:
        """Return the line of a setting, with the keys that it follows from."""
        line = tomli_w.dumps({setting.rpartition(".")[2]: _plain(value)}).strip()
        one_line = line.replace("\n    ", " ").replace(",\n]", " ]")
        if len(one_line) < 100:
            line = one_line
        line += "  #"
        for name in self.sources[setting]:
            line += f" {name}"
            if name not in self.values:
                line += " (default)"
        return line


def _toml_position(entry: tuple[str, Any]) -> tuple[str, str]:
    """Return the section and the name of a setting, by which the lines of a TOML file are sorted."""
    return (entry[0].rpartition(".")[0], entry[0])


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tuples."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(str(value).split())


def folder_name(text: object) -> str:
    """Return a text as the name of a run's folder."""
    return re.sub(r"[^\w.-]", "-", str(text)).lstrip(".-") or "default"


def as_list(value: Any) -> list[Any]:
    """Return one text as a list of it, and a list as it is."""
    return [value] if isinstance(value, str) else value


def convert_trackers(c: Conversion, name: str, project: str, written: Collection[str]) -> None:
    """Convert the trackers of a key; those in ``written`` are none, or are written without a setting."""
    trackers: list[Any] = []
    unknown: list[str] = []
    for tracker in as_list(c.get(name)):
        if tracker in TRACKERS:
            trackers.append(tracker)
        elif tracker not in written:
            unknown.append(str(tracker))
    if trackers:
        c.put("trainer.trackers", trackers, name)
        c.put("trainer.project_name", str(c.get(project)), project)
    if unknown:
        c.missing[name] = f"{', '.join(unknown)}; {WRITTEN}"


def number_of(conversion: Conversion, name: str) -> float:
    """Return the number of a key; `UserError` if it is none."""
    value = conversion.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(
            f"{name} is {value!r}; expected a number, such as by {name}=NUMBER after the config's name"
        )
    return value


def count_of(conversion: Conversion, name: str) -> int:
    """Return the number of a key, rounded down; `UserError` if it is none."""
    return int(number_of(conversion, name))
