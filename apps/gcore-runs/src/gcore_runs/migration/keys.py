"""Settings of other libraries and of earlier versions, the settings here that follow from each, and hints by them."""

import difflib
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
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
    values: Mapping[str, Any] | None = None
    """The value here for each value of a choice; with any other value, the first of them is taken."""
    read_by: Collection[str] = ()
    """The algorithms that have this option."""


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
    *,
    to: Sequence[str] = (),
    off: list[Any] | None = None,
    values: Mapping[str, Any] | list[str] | None = None,
    **fields: Any,
) -> Key:
    if isinstance(values, list):
        values = {name: name for name in values}
    return Key(ours=tuple(to), off=None if off is None else (None, *off), values=values, **fields)


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


_ACTOR_AND_REF = "actor_rollout_ref."
"""A section of verl that gcore does not have."""
_TYPED_NAMES = {
    "steps": "max_steps",
    "num_steps": "max_steps",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "max_seq_length": "max_completion_length",
    "dataset": "dataset_name",
    "reward_function": "reward_funcs",
    "wandb_project": "project",
    "logger": "report_to",
}
"""TRL's names for what people type, of no library or for more commands than its own."""


@cache
def other_names() -> Mapping[str, Key]:
    """Return the settings of other libraries by the ends of their names that lead to one place."""
    verl = read_keys("verl")
    trl = read_keys("trl")
    names: dict[str, Key] = {}
    unclear: set[str] = set()
    # A key with a setting here is what a name means, if others of the same name have none.
    for name, key in sorted([*trl.items(), *verl.items()], key=lambda item: not item[1].ours):
        if name.rpartition(".")[2] == "*":
            continue
        for ending in _endings(name):
            first = names.setdefault(ending, key)
            if first.ours and not key.ours:
                continue
            if (first.ours[:1], first.why) != (key.ours[:1], key.why):
                unclear.add(ending)
    for ending in unclear:
        del names[ending]
    for name, key in verl.items():
        names[name.removeprefix(_ACTOR_AND_REF)] = key
    names.update(verl)
    names.update(trl)
    for name, trl_name in _TYPED_NAMES.items():
        names[name] = trl[trl_name]
    for name in ("default_local_dir", "output_dir"):
        names[name] = Key(ours=("runs_dir",))
    for name in ("log_prob_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        names[name] = verl["actor_rollout_ref.actor.ppo_micro_batch_size"]
    names.update(read_keys("removed"))
    return names


def _endings(name: str) -> list[str]:
    """Return a dotted name, and what is left of it without its first parts: of a.b.c also b.c and c."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def hint(name: str, settings: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Say what to write instead of an unknown dotted name; ``settings`` are all known ones, ``spelled`` in some way."""
    name = name.removeprefix(_ACTOR_AND_REF)
    removed = find_key(read_keys("removed"), name)
    if removed is not None and not removed.ours:
        return _add_relatives(f"there is no such setting: {removed.why}", name, settings, spelled)
    matches = [name] if name in settings else []
    for key in filter(None, map(other_names().get, _endings(name))):
        if not matches:
            # Of a table of settings, its entries have names, too.
            matches = [
                ours for ours in key.ours if ours in settings or ours.rpartition(".")[0] in settings
            ][:1]
        if not matches and not key.ours:
            return _add_relatives(f"there is no such setting: {key.why}", name, settings, spelled)
    matches = matches or _find_similar(name, settings)
    if not matches:
        return _add_relatives("", name, settings, spelled)
    return f"did you mean {' or '.join(map(spelled, matches))}?"


def _find_similar(name: str, settings: Collection[str]) -> list[str]:
    """Return the settings that a name is most like: as a whole, or by its last part."""
    matches = difflib.get_close_matches(name, settings, n=1, cutoff=0.85)
    if matches:
        return matches
    settings_by_last: dict[str, list[str]] = {}
    for setting in settings:
        settings_by_last.setdefault(setting.rpartition(".")[2], []).append(setting)
    last = name.rpartition(".")[2]
    if last in settings_by_last:
        return settings_by_last[last][:3]
    matches = difflib.get_close_matches(name, settings, n=1, cutoff=0.75)
    if matches:
        return matches
    for near in difflib.get_close_matches(last, settings_by_last, n=1, cutoff=0.75):
        return settings_by_last[near][-1:]
    return []


def _add_relatives(
    reason: str, name: str, settings: Collection[str], spelled: Callable[[str], str]
) -> str:
    """Return ``reason`` with the settings of the section that the name is in."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        prefix = "".join(f"{part}." for part in parts[:depth])
        names: dict[str, None] = {}
        for setting in sorted(settings):
            if setting.startswith(prefix):
                part, dot, _ = setting.removeprefix(prefix).partition(".")
                names[spelled(prefix + part) + dot.replace(".", ".*")] = None
        if names:
            return "; ".join(filter(None, (reason, f"known here: {', '.join(names)}")))
    return reason or "no setting has a similar name"
