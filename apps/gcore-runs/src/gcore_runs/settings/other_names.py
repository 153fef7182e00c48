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
    by_end: dict[str, Key] = {}
    unclear: set[str] = set()
    # A key with a setting here is what a name means, if others of the same name have none.
    for name, key in sorted([*trl.items(), *verl.items()], key=lambda item: not item[1].ours):
        for end in _ends(name):
            known = by_end.setdefault(end, key)
            if known.ours and not key.ours:
                continue
            if (known.ours[:1], known.why) != (key.ours[:1], key.why):
                unclear.add(end)
    names = {end: key for end, key in by_end.items() if end not in unclear}
    for name, key in verl.items():
        names[name.removeprefix(_ACTOR_AND_REF)] = key
    names.update(verl)
    names.update(trl)
    for name, key_of_trl in _TYPED_NAMES.items():
        names[name] = trl[key_of_trl]
    for name in ("default_local_dir", "output_dir"):
        names[name] = Key(ours=("runs_dir",))
    for name in ("log_prob_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        names[name] = verl["actor_rollout_ref.actor.ppo_micro_batch_size"]
    names.update(read_keys("removed"))
    return names


def _ends(name: str) -> list[str]:
    """Return a dotted name from each of its parts on; none of a name of a section."""
    parts = name.split(".")
    if parts[-1] == "*":
        return []
    return [".".join(parts[start:]) for start in range(len(parts))]


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Say what to write instead of an unknown dotted name, where ``known`` are all settings, spelled in some way."""
    name = name.removeprefix(_ACTOR_AND_REF)
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    removed = find_key(read_keys("removed"), name)
    if removed is not None and not removed.ours:
        return _with_relatives(f"there is no such setting: {removed.why}", parts, known, spelled)
    found: list[str] = [name] if name in known else []
    for key in filter(None, map(other_names().get, ends)):
        if not found:
            # Of a table of settings, its entries have names, too.
            found = [ours for ours in key.ours if ours in known or ours.rpartition(".")[0] in known][:1]
        if not found and not key.ours:
            return _with_relatives(f"there is no such setting: {key.why}", parts, known, spelled)
    last, by_last = parts[-1], {n.rpartition(".")[2]: n for n in known}
    found = (
        found
        or difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or [n for n in known if n.rpartition(".")[2] == last][:3]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        or [by_last[near] for near in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
    )
    named = " or ".join(map(spelled, found))
    return f"did you mean {named}?" if named else _with_relatives("", parts, known, spelled)


def _with_relatives(said: str, parts: list[str], known: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return ``said`` with the settings of the section that the name is in."""
    for depth in range(len(parts) - 1, -1, -1):
        section = "".join(f"{part}." for part in parts[:depth])
        relatives = sorted(n for n in known if n.startswith(section))
        if relatives:
            splits = [n.removeprefix(section).partition(".") for n in relatives]
            names = dict.fromkeys(spelled(section + own) + (".*" if inner else "") for own, _, inner in splits)
            return f"{said}{'; ' if said else ''}known here: {', '.join(names)}"
    return said or "no setting has a similar name"
