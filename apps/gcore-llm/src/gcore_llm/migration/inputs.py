"""Configs of other libraries as they are found: YAML, JSON, a launch script, or a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_llm.migration.hydra_files import (
    SourceConfig,
    TrainerCommand,
    is_trainer,
    read_command,
    read_hydra_config,
)
from gcore_llm.migration.shell import ShellScript
from gcore_runs import UserError
from gcore_runs.settings.checks import flatten


def read_config(path: str, words: Sequence[str], root: str = "") -> SourceConfig:
    """Read a YAML, JSON or shell file, with the overrides of a command line on top; no file if ``path`` is empty.

    Args:
        path: the file.
        words: overrides, ``a.b=c``, or a whole command of verl's trainer.
        root: the folder in which the script would be started; empty: this one.

    Raises:
        UserError: the file is missing or of another kind, or a shell script has no command of verl's trainer.
    """
    command = read_command(words)
    if not path:
        return _command(command, [Path(root)], "a command line")
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"CONFIG is {path}: {reason}") from None
    if file.suffix == ".sh":
        return _apply_overrides(_script(text, file, root), command.overrides)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"CONFIG is {path}; expected a file .yaml, .json or .sh")
    return _apply_overrides(
        SourceConfig(values=_parse_yaml(text, path), origin=file.name), command.overrides
    )


def _parse_yaml(text: str, path: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"CONFIG is {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise UserError(f"CONFIG is {path}; expected settings by name")
    return {str(name): value for name, value in values.items()}


def _script(text: str, file: Path, root: str) -> SourceConfig:
    script = ShellScript(text, path=str(file), folder=str(Path(root).absolute()))
    try:
        commands = script.commands()
    except (ValueError, IndexError):
        raise UserError(
            f"CONFIG is {file}; expected a shell script whose quotes and brackets are closed"
        ) from None
    trainers = _find_trainers(commands)
    is_skipped = not trainers
    if is_skipped:
        trainers = _find_trainers(script.skipped_commands)[:1]
    if not trainers:
        raise UserError(f"CONFIG is {file}; expected a command with verl.trainer.main_ppo in it")
    command = read_command(trainers[0])
    # A script is in its repository, in whose folder it is started.
    parents = file.absolute().parents
    source = _command(command, [Path(root), *parents], file.name)
    cautions = [*_script_cautions(script, trainers), *source.cautions]
    if is_skipped:
        cautions.append(
            "the trainer's command is in a branch that the script does not take with these values"
        )
    return replace(source, cautions=cautions)


def _find_trainers(commands: Sequence[list[str]]) -> list[list[str]]:
    return [words for words in commands if any(map(is_trainer, words))]


def _script_cautions(script: ShellScript, trainers: Sequence[Sequence[str]]) -> list[str]:
    cautions: list[str] = []
    unset = [
        text for text in dict.fromkeys(script.unset) if any(text in word for word in trainers[0])
    ]
    if unset:
        cautions.append(
            f"the script does not set {', '.join(unset)}: replace it in the TOML, or give the key again"
        )
    if script.taken_as_empty:
        names = ", ".join(script.taken_as_empty)
        cautions.append(f"the script does not set {names}: conditions take it as empty")
    cautions += [
        f"not decided, and taken as false: {condition}"
        for condition in dict.fromkeys(script.undecided)
    ]
    if script.exits:
        lines = ", ".join(map(str, dict.fromkeys(script.exits)))
        cautions.append(
            f"with these values the script ends at line {lines}; the commands after it were read all the same"
        )
    if len(trainers) > 1:
        cautions.append(f"the script starts the trainer {len(trainers)} times: this is the first")
    return cautions


def _command(command: TrainerCommand, folders: Sequence[Path], origin: str) -> SourceConfig:
    """Return the settings of a command of verl's trainer, over those of the config files that it names."""
    source = read_hydra_config(command, folders, origin, _parse_yaml)
    source = replace(source, explicit=frozenset(flatten(source.values)))
    return _apply_overrides(source, command.overrides)


def _apply_overrides(source: SourceConfig, overrides: Sequence[str]) -> SourceConfig:
    """Return a config with overrides on top, and references from one value to another followed."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    plain = [word.lstrip("+") for word in overrides if not word.startswith("~")]
    try:
        merged: Any = OmegaConf.create(source.values)
        for word in plain:
            merged = OmegaConf.merge(merged, _parse_override(word))
        values: Any = _resolve_references(merged, OmegaConf.to_container(merged, resolve=False))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"CONFIG is {source.origin}: {' '.join(str(error).split())}") from None
    explicit = source.explicit | {word.partition("=")[0] for word in plain}
    return replace(source, values=values, explicit=explicit)


def _parse_override(word: str) -> Any:
    """Return an override as a config; a value that is of Hydra's grammar and not YAML stays a text."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        return OmegaConf.from_dotlist([word])
    except YAMLError:
        name, _, value = word.partition("=")
        config = OmegaConf.create()
        OmegaConf.update(config, name, value)
        return config


def _resolve_references(config: Any, values: Any, name: str = "") -> Any:
    """Return values with references to others replaced, where there are such others."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(values, Mapping):
        return {
            key: _resolve_references(config, value, f"{name}.{key}".lstrip("."))
            for key, value in values.items()
        }
    if not (isinstance(values, str) and "${" in values):
        return values
    try:
        value = OmegaConf.select(config, name)
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True)
        return value
    except OmegaConfBaseException:
        return values
