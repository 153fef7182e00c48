"""Settings of run folders that earlier versions wrote."""

import re
from collections.abc import Mapping
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.migration.keys import find_key, read_keys
from gcore_runs.settings.checks import flatten, nest

_CHECKPOINTING = "actor.enable_gradient_checkpointing"
_JUDGE_SETTING = re.compile(
    r"(reward_model\.judge|reward_model\.judges\.\w+|reward\.judge)\.(low|high|server_python|pairwise)"
)
_OLD_CRITIC_LR = 1e-5
"""Rate of the critic in earlier versions, where it was not set."""


def translate_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run folder under their present names, nested, without those that have no effect now.

    Raises:
        UserError: a setting that is a constant now has another value.
    """
    earlier = flatten(values)
    _merge_choices(earlier)
    _translate_judges(earlier)
    translated: dict[str, Any] = {}
    for name, value in earlier.items():
        key = find_key(read_keys("removed"), name)
        if key is None:
            translated[name] = value
        elif key.ours and key.off is not None and value in key.off:
            continue
        elif key.ours:
            translated[key.ours[0]] = value
        elif key.off is not None and value not in key.off:
            raise UserError(f"{name} is {value!r}; expected {key.off[-1]!r}: {key.why}")
    tables = nest(translated)
    _drop_inherited(tables)
    return tables


def _merge_choices(values: dict[str, Any]) -> None:
    """Give a setting the choice that several made in earlier versions."""
    if values.pop("reward_calls.in_threads", False):
        values["reward_calls.run_in"] = "thread"
    if values.pop("reward_calls.in_process", False):
        values["reward_calls.run_in"] = "process"
    on_error = values.pop("reward_calls.on_error", "")
    if on_error == "raise":
        values["reward_calls.max_failed_share"] = 0.0
    elif on_error == "drop":
        values.setdefault("reward_calls.max_failed_share", 1.0)
    checkpointed_share = values.pop("actor.checkpointed_layers", 1.0)
    if checkpointed_share < 1 and values.get(_CHECKPOINTING) is not False:
        values[_CHECKPOINTING] = checkpointed_share
    if values.pop("rollout.window_schedule", "") == "random":
        values["rollout.window_steps"] = 0
    if "algorithm.name" in values:
        # Of images the algorithm sets it.
        values.pop("actor.loss.loss_mode", None)


def _translate_judges(values: dict[str, Any]) -> None:
    """Give judges, of which there may be any number, their present settings."""
    for name, value in list(values.items()):
        match = _JUDGE_SETTING.fullmatch(name)
        if match is None:
            continue
        section, setting = match.groups()
        del values[name]
        if setting == "server_python":
            if value:
                values[f"{section}.engine_options.server_python"] = value
            continue
        if setting == "pairwise":
            if value:
                values[f"{section}.method"] = "all_pairs"
            continue
        score_range = values.setdefault(f"{section}.score_range", [0.0, 10.0])
        position = 0 if setting == "low" else 1
        score_range[position] = value


def _drop_inherited(values: dict[str, Any]) -> None:
    """Leave out what a table of settings had of its own, in earlier versions, and would follow from others now."""
    actor = values.get("actor", {}).get("optim", {})
    critic = values.get("critic", {}).get("optim", {})
    inherited = {**actor, "lr": _OLD_CRITIC_LR}
    for name, value in list(critic.items()):
        if inherited.get(name) == value:
            del critic[name]
