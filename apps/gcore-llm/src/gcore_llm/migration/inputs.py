"""Configs of other libraries as they are found: YAML, JSON, a launch script, or a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gcore_llm.migration.conversion import flattened
from gcore_llm.migration.hydra_files import TrainerCommand, is_trainer, read_command, read_hydra_config
from gcore_llm.migration.shell import ShellScript
from gcore_runs import UserError


@dataclass(frozen=True, kw_only=True)
class Given:
    """The settings of a config."""

    values: dict[str, Any]
    """Nested."""
    origin: str
    """The file that they are from, in words."""
    explicit: frozenset[str] = frozenset()
    """Dotted names of the overrides."""
    cautions: tuple[str, ...] = ()
    """Sentences on what may differ from the config's meaning."""
    trainer: str = ""
    """The module that a script starts."""


def read_config(path: str, words: Sequence[str], root: str = "") -> Given:
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
        return _with(_script(text, file, root), command.overrides)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"CONFIG is {path}; expected a file .yaml, .json or .sh")
    return _with(Given(values=_parsed(text, path), origin=file.name), command.overrides)


def _parsed(text: str, path: str) -> dict[str, Any]:
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


def _script(text: str, file: Path, root: str) -> Given:
    script = ShellScript(text, path=str(file), folder=str(Path(root).absolute()))
    try:
        commands = script.commands()
    except (ValueError, IndexError):
        raise UserError(f"CONFIG is {file}; expected a shell script whose quotes and brackets are closed") from None
    found = _find_trainers(commands)
    is_skipped = not found
    if is_skipped:
        found = _find_trainers(script.skipped_commands)[:1]
    if not found:
        raise UserError(f"CONFIG is {file}; expected a command with verl.trainer.main_ppo in it")
    command = read_command(found[0])
    # A script is in its repository, in whose folder it is started.
    parents = file.absolute().parents
    given = _command(command, [Path(root), *parents], file.name)
    cautions = [*_script_cautions(script, found), *given.cautions]
    if is_skipped:
        cautions.append("the trainer's command is in a branch that the script does not take with these values")
    return replace(given, cautions=tuple(cautions))


def _find_trainers(commands: Sequence[list[str]]) -> list[list[str]]:
    return [words for words in commands if any(is_trainer(word) for word in words)]


def _script_cautions(script: ShellScript, found: Sequence[Sequence[str]]) -> list[str]:
    cautions: list[str] = []
    left = [text for text in dict.fromkeys(script.unset) if any(text in word for word in found[0])]
    if left:
        cautions.append(f"the script does not set {', '.join(left)}: replace it in the TOML, or give the key again")
    if script.taken_as_empty:
        names = ", ".join(script.taken_as_empty)
        cautions.append(f"the script does not set {names}: conditions take it as empty")
    cautions += [f"not decided, and taken as false: {condition}" for condition in dict.fromkeys(script.undecided)]
    if script.exits:
        lines = ", ".join(str(line) for line in dict.fromkeys(script.exits))
        cautions.append(
            f"with these values the script ends at line {lines}; the commands after it were read all the same"
        )
    if len(found) > 1:
        cautions.append(f"the script starts the trainer {len(found)} times: this is the first")
    return cautions


def _command(command: TrainerCommand, folders: Sequence[Path], origin: str) -> Given:
    """Return the settings of a command of verl's trainer, over those of the config files that it names."""
    config = read_hydra_config(command, folders, _parsed)
    given = Given(
        values=config.values,
        origin=origin,
        explicit=frozenset(flattened(config.values)),
        cautions=tuple(config.cautions),
        trainer=command.trainer,
    )
    return _with(given, command.overrides)


def _with(given: Given, overrides: Sequence[str]) -> Given:
    """Return a config with overrides on top, and references from one value to another followed."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    plain = [word.lstrip("+") for word in overrides if not word.startswith("~")]
    try:
        merged: Any = OmegaConf.create(given.values)
        for word in plain:
            merged = OmegaConf.merge(merged, _parse_override(word))
        values: Any = _followed(merged, OmegaConf.to_container(merged, resolve=False))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"CONFIG is {given.origin}: {' '.join(str(error).split())}") from None
    explicit = given.explicit | {word.partition("=")[0] for word in plain}
    return replace(given, values=values, explicit=explicit)


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


def _followed(config: Any, values: Any, name: str = "") -> Any:
    """Return values with references to others replaced, where there are such others."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(values, Mapping):
        return {key: _followed(config, value, f"{name}.{key}".lstrip(".")) for key, value in values.items()}
    if not (isinstance(values, str) and "${" in values):
        return values
    try:
        found = OmegaConf.select(config, name)
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException:
        return values
