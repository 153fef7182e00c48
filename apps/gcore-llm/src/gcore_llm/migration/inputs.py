"""Configs of other libraries as they are found: YAML, JSON, a launch script, or a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_llm.migration.shell import ShellScript
from gcore_runs import UserError

_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w@/.-]*=", re.ASCII)
_TRAINER = re.compile(r"(.*[./])?main_(ppo|dapo)\w*(\.py)?")


@dataclass(frozen=True, kw_only=True)
class Given:
    """The settings of a config."""

    values: dict[str, Any]
    """Nested."""
    origin: str
    """The file that they are from, in words."""
    explicit: frozenset[str] = frozenset()
    """Dotted names of the overrides."""
    cautions: tuple[str, ...] = field(default=())
    """Parts that were not read, in sentences."""


def is_override(word: str) -> bool:
    """Return whether a word of a command line is an override of Hydra's, ``a.b=c``."""
    return _OVERRIDE.match(word) is not None


def is_trainer(word: str) -> bool:
    """Return whether a word of a command line names verl's trainer."""
    return _TRAINER.fullmatch(word) is not None


def read_config(path: str, overrides: Sequence[str]) -> Given:
    """Read a YAML, JSON or shell file, with overrides on top; no file if ``path`` is empty.

    Raises:
        UserError: the file is missing or of another kind, or a shell script has no command of verl's trainer.
    """
    if not path:
        return _with(Given(values={}, origin="a command line"), overrides)
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"CONFIG is {path}: {reason}") from None
    if file.suffix == ".sh":
        return _with(_script(text, file), overrides)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"CONFIG is {path}; expected a file .yaml, .json or .sh")
    return _with(Given(values=_parsed(text, path), origin=file.name), overrides)


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


def _script(text: str, file: Path) -> Given:
    script = ShellScript(text)
    try:
        commands = list(script.commands())
    except (ValueError, IndexError):
        raise UserError(f"CONFIG is {file}; expected a shell script whose quotes and brackets are closed") from None
    found = next((words for words in commands if any(map(is_trainer, words))), None)
    if found is None:
        raise UserError(f"CONFIG is {file}; expected a command with verl.trainer.main_ppo in it")
    cautions: list[str] = []
    left = [text for text in dict.fromkeys(script.unset) if any(text in word for word in found)]
    if left:
        cautions.append(f"the script does not set {', '.join(left)}: replace it in the TOML, or give the key again")
    if script.has_conditions:
        cautions.append("conditions of the script were not decided: the last value before the command counts")
    given = _with(Given(values={}, origin=file.name), overrides_of(found))
    return Given(values=given.values, origin=given.origin, explicit=given.explicit, cautions=tuple(cautions))


def overrides_of(words: Sequence[str]) -> list[str]:
    """Return the overrides of a command of verl's trainer; a config of Megatron's is one, too."""
    after = max((place for place, word in enumerate(words) if is_trainer(word)), default=-1) + 1
    own = [word for word in words[after:] if is_override(word)]
    is_megatron = any("megatron" in word for word in words[after:] if not is_override(word))
    return [*(["model_engine=megatron"] if is_megatron else []), *own]


def _with(given: Given, overrides: Sequence[str]) -> Given:
    """Return a config with overrides on top, and references from one value to another followed."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    plain = [word.lstrip("+") for word in overrides if not word.startswith("~")]
    try:
        merged = OmegaConf.merge(OmegaConf.create(given.values), OmegaConf.from_dotlist(plain))
        values: Any = _followed(merged, OmegaConf.to_container(merged, resolve=False))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"CONFIG is {given.origin}: {' '.join(str(error).split())}") from None
    explicit = given.explicit | {word.partition("=")[0] for word in plain}
    return Given(values=values, origin=given.origin, explicit=explicit, cautions=given.cautions)


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
