"""The command that starts verl's trainer, and the config files that Hydra would read for it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w@/.-]*=", re.ASCII)
_TRAINER = re.compile(r"(.*[./])?(main_(ppo|dapo)\w*|fully_async_main)(\.py)?")
_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "path",
    "-cd": "path",
    "--config-name": "name",
    "-cn": "name",
}
_OWN_CONFIG = re.compile(r"_?(generated_)?(transfer_queue_|one_step_off_|fully_async_)?ppo_(?:(\w+)_)?trainer(\.yaml)?")


@dataclass(frozen=True, kw_only=True)
class TrainerCommand:
    """A command line of verl's trainer."""

    trainer: str = ""
    """The module or file that is started; empty: the words are overrides alone."""
    overrides: Sequence[str]
    config_path: str = ""
    config_name: str = ""
    others: Sequence[str]
    """Words that are neither overrides nor options of Hydra."""


@dataclass(kw_only=True)
class HydraConfig:
    """The settings of config files."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """Nested."""
    cautions: list[str] = field(default_factory=list[str])


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
    trainer = next((word for word in words if is_trainer(word)), "")
    remaining = list(words[words.index(trainer) + 1 :]) if trainer else list(words)
    overrides: list[str] = []
    others: list[str] = []
    options = {"path": "", "name": ""}
    while remaining:
        word = remaining.pop(0)
        option, has_value, value = word.partition("=")
        if option in _OPTIONS and (has_value or remaining):
            options[_OPTIONS[option]] = value if has_value else remaining.pop(0)
        elif is_override(word):
            overrides.append(word)
        else:
            others.append(word)
    return TrainerCommand(
        trainer=trainer,
        overrides=overrides,
        config_path=options["path"],
        config_name=options["name"],
        others=others,
    )


def read_hydra_config(
    command: TrainerCommand, folders: Sequence[Path], parse: Callable[[str, str], dict[str, Any]]
) -> HydraConfig:
    """Return the settings of the config that a command names, with those that it is made of.

    Args:
        command: the command, whose ``config_path`` is absolute or relative to the trainer, as in Hydra.
        folders: where the path may begin: first where the script would be started.
        parse: reads the text of a YAML file, whose name is the second argument.
    """
    config = HydraConfig()
    if not command.config_name or _put_own_config(command.config_name, config):
        return config
    places = [place for folder in folders for place in _find_places(command, folder)]
    file = _find_file(command.config_name, places)
    if file is None:
        config.cautions.append(
            f"--config-name {command.config_name} is in no folder {command.config_path or 'config'}: its settings are "
            "missing here; give --root FOLDER, where the script is started"
        )
        return config
    _read_file(file, places, config, parse)
    return config


def _put_own_config(name: str, config: HydraConfig) -> bool:
    """Return whether a name is of verl's own config of all defaults; a backend in it is a setting."""
    found = _OWN_CONFIG.fullmatch(name)
    if found is not None and found[3]:
        config.values["model_engine"] = found[3]
    return found is not None


def _find_places(command: TrainerCommand, folder: Path) -> list[Path]:
    path = Path(command.config_path or "config")
    if path.is_absolute():
        # The part below the folder of another clone is the same in this one.
        tails = [Path(*path.parts[start:]) for start in range(1, len(path.parts))]
        return [path, *(folder / tail for tail in tails)]
    module = command.trainer.removesuffix(".py").replace(".", "/") if "/" not in command.trainer else command.trainer
    return [folder / Path(module).parent / path, folder / path]


def _find_file(name: str, places: Sequence[Path]) -> Path | None:
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    return next((place / file for place in places if (place / file).is_file()), None)


def _read_file(
    file: Path, places: Sequence[Path], config: HydraConfig, parse: Callable[[str, str], dict[str, Any]]
) -> None:
    """Put in the settings of a file, in the order of its ``defaults``."""
    own = parse(file.read_text(), str(file))
    own.pop("hydra", None)
    entries: list[Any] = own.pop("defaults", None) or []
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    for entry in entries:
        if entry == "_self_":
            _merge(config.values, own)
        elif isinstance(entry, str):
            _read_base(entry, file, places, config, parse)
        elif isinstance(entry, Mapping):
            _read_group(entry, file, config, parse)


def _read_base(
    name: str, file: Path, places: Sequence[Path], config: HydraConfig, parse: Callable[[str, str], dict[str, Any]]
) -> None:
    if _put_own_config(name, config):
        return
    base = _find_file(name, [file.parent, *places])
    if base is None or base == file:
        config.cautions.append(f"{file.name} is made of {name}, which was not found: its settings are missing here")
    else:
        _read_file(base, places, config, parse)


def _read_group(
    entry: Mapping[Any, Any], file: Path, config: HydraConfig, parse: Callable[[str, str], dict[str, Any]]
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


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        before = values.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            _merge(before, value)
        else:
            values[name] = value
