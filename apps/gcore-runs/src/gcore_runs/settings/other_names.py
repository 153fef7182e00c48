"""Hints for unknown settings: the name here of another library's setting, or the nearest name."""

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import cache

from gcore_runs.migration.keys import Key, find_key, read_keys

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
    last = name.rpartition(".")[2]
    by_last = {setting.rpartition(".")[2]: setting for setting in settings}
    matches = (
        matches
        or difflib.get_close_matches(name, settings, n=1, cutoff=0.85)
        or [setting for setting in settings if setting.rpartition(".")[2] == last][:3]
        or difflib.get_close_matches(name, settings, n=1, cutoff=0.75)
        or [by_last[near] for near in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
    )
    if not matches:
        return _add_relatives("", name, settings, spelled)
    return f"did you mean {' or '.join(map(spelled, matches))}?"


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
