"""The command that starts verl's trainer, and the config files that Hydra would read for it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w@/.-]*=", re.ASCII)
_TRAINER = re.compile(r"(.*[./])?(main_(ppo|dapo)\w*|fully_async_main)(\.py)?")
_OPTIONS = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-dir": "config_path",
    "-cd": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
}
"""Options of Hydra, and the fields of `TrainerCommand` that have their values."""
_VERL_CONFIG = re.compile(
    r"_?(generated_)?(transfer_queue_|one_step_off_|fully_async_)?ppo_(?:(\w+)_)?trainer(\.yaml)?"
)


@dataclass(frozen=True, kw_only=True)
class TrainerCommand:
    """A command line of verl's trainer."""

    trainer: str = ""
    """The module or file that is started; empty: the words are overrides alone."""
    overrides: Sequence[str]
    config_path: str = ""
    config_name: str = ""
    options: Sequence[str]
    """Words that are neither overrides nor options of Hydra."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The settings of a config."""

    values: dict[str, Any]
    """Nested."""
    origin: str
    """The file that they are from, in words."""
    explicit: frozenset[str] = frozenset()
    """Dotted names of the overrides."""
    cautions: list[str] = field(default_factory=list[str])
    """Sentences on what may differ from the config's meaning."""
    trainer: str = ""
    """The module that a script starts."""


def is_override(word: str) -> bool:
    """Return whether a word of a command line is an override of Hydra's, ``a.b=c``."""
    return _OVERRIDE.match(word) is not None


def is_trainer(word: str) -> bool:
    """Return whether a word of a command line names verl's trainer."""
    return _TRAINER.fullmatch(word) is not None


def read_command(words: Sequence[str]) -> TrainerCommand:
    """Return the parts of a command line; words before the trainer are left out.

    Example:
        >>> read_command(["python3", "-m", "verl.trainer.main_ppo", "--config-name=gsm8k", "a.b=1"]).config_name
        'gsm8k'
    """
    trainer = next(filter(is_trainer, words), "")
    remaining = list(words)
    if trainer:
        del remaining[: words.index(trainer) + 1]
    overrides: list[str] = []
    options: list[str] = []
    hydra_options: dict[str, str] = {}
    while remaining:
        word = remaining.pop(0)
        option, has_value, value = word.partition("=")
        if option in _OPTIONS and (has_value or remaining):
            hydra_options[_OPTIONS[option]] = value if has_value else remaining.pop(0)
        elif is_override(word):
            overrides.append(word)
        else:
            options.append(word)
    return TrainerCommand(trainer=trainer, overrides=overrides, options=options, **hydra_options)


def read_hydra_config(
    command: TrainerCommand,
    folders: Sequence[Path],
    origin: str,
    parse: Callable[[str, str], dict[str, Any]],
) -> SourceConfig:
    """Return the settings of the config that a command names, with those that it is made of.

    Args:
        command: the command, whose ``config_path`` is absolute or relative to the trainer, as in Hydra.
        folders: where the path may begin: first where the script would be started.
        origin: where the command is from, in words.
        parse: reads the text of a YAML file, whose name is the second argument.
    """
    config = SourceConfig(values={}, origin=origin, trainer=command.trainer)
    if not command.config_name or _put_own_config(command.config_name, config):
        return config
    config_folders: list[Path] = []
    for folder in folders:
        config_folders += _config_folders(command, folder)
    file = _find_file(command.config_name, config_folders)
    if file is None:
        config.cautions.append(
            f"--config-name {command.config_name} is in no folder {command.config_path or 'config'}: its settings are "
            "missing here; give --root FOLDER, where the script is started"
        )
        return config
    _read_file(file, config_folders, config, parse)
    return config


def _put_own_config(name: str, config: SourceConfig) -> bool:
    """Return whether a name is of verl's own config of all defaults; a backend in it is a setting."""
    match = _VERL_CONFIG.fullmatch(name)
    if match is None:
        return False
    if match[3]:
        config.values["model_engine"] = match[3]
    return True


def _config_folders(command: TrainerCommand, folder: Path) -> list[Path]:
    """Return the folders in and below a folder that may hold the config of a command."""
    path = Path(command.config_path or "config")
    if path.is_absolute():
        # The part below the folder of another clone is the same in this one.
        candidates = [folder.joinpath(*path.parts[start:]) for start in range(1, len(path.parts))]
        return [path, *candidates]
    module = command.trainer
    if "/" not in module:
        module = module.removesuffix(".py").replace(".", "/")
    return [folder / Path(module).parent / path, folder / path]


def _find_file(name: str, folders: Sequence[Path]) -> Path | None:
    if not name.endswith((".yaml", ".yml")):
        name += ".yaml"
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    return None


def _read_file(
    file: Path,
    folders: Sequence[Path],
    config: SourceConfig,
    parse: Callable[[str, str], dict[str, Any]],
) -> None:
    """Put in the settings of a file, in the order of its ``defaults``."""
    values = parse(file.read_text(), str(file))
    values.pop("hydra", None)
    entries: list[Any] = values.pop("defaults", None) or []
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    for entry in entries:
        if entry == "_self_":
            _merge(config.values, values)
        elif isinstance(entry, str):
            _read_base(entry, file, folders, config, parse)
        elif isinstance(entry, Mapping):
            _read_group(entry, file, config, parse)


def _read_base(
    name: str,
    file: Path,
    folders: Sequence[Path],
    config: SourceConfig,
    parse: Callable[[str, str], dict[str, Any]],
) -> None:
    if _put_own_config(name, config):
        return
    base = _find_file(name, [file.parent, *folders])
    if base is None or base == file:
        config.cautions.append(
            f"{file.name} is made of {name}, which was not found: its settings are missing here"
        )
    else:
        _read_file(base, folders, config, parse)


def _read_group(
    entry: Mapping[Any, Any],
    file: Path,
    config: SourceConfig,
    parse: Callable[[str, str], dict[str, Any]],
) -> None:
    """Put in the settings of ``group@section: name``."""
    for target, name in entry.items():
        group, _, section = str(target).removeprefix("override ").partition("@")
        part = _find_file(str(name), [file.parent / group])
        if group == "model_engine":
            config.values["model_engine"] = name
        elif part is None:
            config.cautions.append(f"{file.name} is made of {target}: {name}, which was not found")
        else:
            values = parse(part.read_text(), str(part))
            values.pop("defaults", None)
            for name in reversed((section or group.replace("/", ".")).split(".")):
                values = {name: values}
            _merge(config.values, values)


def _merge(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        before = values.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            _merge(before, value)
        else:
            values[name] = value
