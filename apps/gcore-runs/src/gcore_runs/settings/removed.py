"""Settings of earlier versions: where they are now, or why there are none. Run folders of these versions are read so."""

from collections.abc import Iterator, Mapping
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.migration.key import Key, find_key, nothing

_COMMAND = "it is an option of the command train, and no setting of a run"
_OPTIONS = "rollout.engine_options"


def _option(name: str) -> Key:
    return Key(ours=(f"{_OPTIONS}.{name}", _OPTIONS))


REMOVED: Mapping[str, Key] = {
    "sim.*": nothing("simulate train has the section sim"),
    **dict.fromkeys(("dry_run", "dry_run_device", "dry_run_nodes", "dry_run_gpus_per_node"), nothing(_COMMAND)),
    **dict.fromkeys(("warmup.*", "demo.*"), nothing(_COMMAND)),
    **{f"rollout.{name}": _option(name) for name in ("async_scheduling", "seed_per_sample", "enable_expert_parallel")},
    **{f"rollout.{name}": _option(name) for name in ("decode_mode", "kv_cache_bytes")},
    "rollout.speculative.*": nothing("speculative_config in rollout.engine_options"),
    **dict.fromkeys(
        ("rollout.server_args", "reward_model.judge.server_args", "reward.judge.server_args"),
        nothing("engine_options has the arguments of SGLang's server by name"),
    ),
}
"""Settings of earlier versions, by dotted name; see `Key`: ``ours`` has the present name first."""


def translate_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run folder under their present names, nested, without those that have no effect now.

    Raises:
        UserError: a setting that is a constant now has another value.
    """
    translated: dict[str, Any] = {}
    for name, value in _leaves(values, ""):
        key = find_key(REMOVED, name)
        if key is None:
            _insert(translated, name, value)
        elif key.ours:
            _insert(translated, key.ours[0], value)
        elif key.off is not None and value not in key.off:
            raise UserError(f"{name} is {value!r}; expected {key.off[-1]!r}: {key.why}")
    return translated


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _insert(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
    table[last] = value
