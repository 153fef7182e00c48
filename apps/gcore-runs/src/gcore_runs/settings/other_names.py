"""Hints for unknown settings: the name here of another library's setting, or the nearest name."""

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import cache

from gcore_runs.migration.key import Key, find_key, to
from gcore_runs.migration.removed_keys import REMOVED
from gcore_runs.migration.trl_keys import TRL
from gcore_runs.migration.verl_keys import MICRO_BATCH, VERL

_ACTOR_AND_REF = "actor_rollout_ref."
"""A section of verl that gcore does not have."""
_SPOKEN: dict[str, Key] = {
    **dict.fromkeys(("steps", "num_steps"), TRL["max_steps"]),
    **dict.fromkeys(("epochs",), TRL["num_train_epochs"]),
    **dict.fromkeys(("lr",), TRL["learning_rate"]),
    **dict.fromkeys(("batch_size",), TRL["per_device_train_batch_size"]),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_seq_length"), TRL["max_completion_length"]),
    **dict.fromkeys(("dataset",), TRL["dataset_name"]),
    **dict.fromkeys(("reward_function",), TRL["reward_funcs"]),
    "wandb_project": TRL["project"],
    **dict.fromkeys(("default_local_dir", "output_dir"), to("runs_dir")),
    **dict.fromkeys(("log_prob_micro_batch_size_per_gpu", "gradient_accumulation_steps"), MICRO_BATCH),
    "logger": TRL["report_to"],
}
"""Names that people type, of no library or for more commands than its own."""


@cache
def other_names() -> Mapping[str, Key]:
    """Return the settings of other libraries by the ends of their names that lead to one place."""
    found: dict[str, Key] = {}
    unclear: set[str] = set()
    # A key with a setting here is what a name means, if others of the same name have none.
    keys = sorted((*TRL.items(), *VERL.items()), key=lambda item: not item[1].ours)
    for name, key in keys:
        parts = name.split(".")
        for end in {".".join(parts[place:]) for place in range(len(parts))} if parts[-1] != "*" else ():
            if end in found and found[end].ours and not key.ours:
                continue
            is_same = end not in found or (found[end].ours[:1], found[end].why) == (key.ours[:1], key.why)
            unclear |= set() if is_same else {end}
            found.setdefault(end, key)
    of_actor = {name.removeprefix(_ACTOR_AND_REF): key for name, key in VERL.items()}
    return {name: key for name, key in found.items() if name not in unclear} | of_actor | VERL | TRL | _SPOKEN | REMOVED


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """Say what to write instead of an unknown dotted name, where ``known`` are all settings, spelled in some way."""
    name = name.removeprefix(_ACTOR_AND_REF)
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    removed = find_key(REMOVED, name)
    if removed is not None and not removed.ours:
        return _with_relatives(f"there is no such setting: {removed.why}", parts, known, spelled)
    found: list[str] = [name] if name in known else []
    for key in filter(None, map(other_names().get, ends)):
        if not found:
            # Of a table of settings, its entries have names, too.
            found = [ours for ours in key.ours if ours in known or ours.rpartition(".")[0] in known][:1]
        if not found and not key.ours:
            return _with_relatives(f"there is no such setting: {key.why}", parts, known, spelled)
    last = parts[-1]
    by_last = {n.rpartition(".")[2]: n for n in known}
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
