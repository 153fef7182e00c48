"""Settings of run folders that earlier versions wrote."""

from collections.abc import Mapping
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.migration.keys import find_key, read_keys
from gcore_runs.settings.checks import flatten, nest

_OLD_CRITIC_LR = 1e-5
"""Rate of the critic in earlier versions, where it was not set."""


def translate_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run folder under their present names, nested, without those that have no effect now.

    Raises:
        UserError: a setting that is a constant now has another value.
    """
    translated: dict[str, Any] = {}
    for name, value in flatten(values).items():
        key = find_key(read_keys("removed"), name)
        if key is None:
            translated[name] = value
        elif key.ours:
            target = key.ours[0]
            if target == "rollout.engine_options":
                target += f".{name.rpartition('.')[2]}"
            translated[target] = value
        elif key.off is not None and value not in key.off:
            raise UserError(f"{name} is {value!r}; expected {key.off[-1]!r}: {key.why}")
    tables = nest(translated)
    _drop_inherited(tables)
    return tables


def _drop_inherited(values: dict[str, Any]) -> None:
    """Leave out what a table of settings had of its own, in earlier versions, and would follow from others now."""
    actor = values.get("actor", {}).get("optim", {})
    critic = values.get("critic", {}).get("optim", {})
    inherited = {**actor, "lr": _OLD_CRITIC_LR}
    for name, value in list(critic.items()):
        if inherited.get(name) == value:
            del critic[name]
