"""Settings of earlier versions: where they are now, or why there are none. Their run folders are read by these."""

from collections.abc import Iterator, Mapping
from typing import Any

from gcore_runs.errors import UserError
from gcore_runs.migration.key import Key, find_key, lacks, nothing, to

_COMMAND = "it is an option of the command train, and no setting of a run"
_OPTIONS = "rollout.engine_options"
_IN_OPTIONS = ("async_scheduling", "seed_per_sample", "enable_expert_parallel", "decode_mode", "kv_cache_bytes")
_PROMETHEUS = ("prometheus_port", "prometheus_host")
_MODELS = ("actor", "critic")
_CRITIC_LR = 1e-5


REMOVED: dict[str, Key] = {
    "sim.*": nothing("simulate train has the section sim"),
    **dict.fromkeys(("dry_run", "dry_run_device", "dry_run_nodes", "dry_run_gpus_per_node"), nothing(_COMMAND)),
    **dict.fromkeys(("warmup.*", "demo.*"), nothing(_COMMAND)),
    **dict.fromkeys((f"rollout.{name}" for name in _IN_OPTIONS), to(_OPTIONS)),
    **{f"trainer.{name}": nothing("trainer.prometheus has host and port") for name in _PROMETHEUS},
    "trainer.best_mode": lacks("trainer.best_metric has a - before it where the lowest value is best", "max"),
    "local_checkpoints.save_freq": nothing("they are saved after each step"),
    "actor.share_prefix": nothing("prompts are always shared; the result is the same"),
    **{f"{section}.optim.max_nonfinite_steps": nothing("ten such steps in a row end a run") for section in _MODELS},
    **{f"{section}.optim.muon_momentum": lacks("it is a constant", 0.95) for section in _MODELS},
    "optim.muon_momentum": lacks("it is a constant", 0.95),
    "critic.loss.cliprange_value": to("critic.cliprange_value"),
    "critic.loss.loss_agg_mode": to("critic.loss_agg_mode"),
    "critic.loss.max_response_length": lacks("the divisor is data.max_response_length"),
    "rollout.speculative.*": nothing("speculative_config in rollout.engine_options"),
    **dict.fromkeys(
        ("rollout.server_args", "reward_model.judge.server_args", "reward.judge.server_args"),
        nothing("engine_options has the arguments of SGLang's server by name"),
    ),
}
"""Settings of earlier versions, by dotted name; see `Key`."""


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
            target = key.ours[0]
            if target == _OPTIONS:
                target += f".{name.rpartition('.')[2]}"
            _insert(translated, target, value)
        elif key.off is not None and value not in key.off:
            raise UserError(f"{name} is {value!r}; expected {key.off[-1]!r}: {key.why}")
    _drop_inherited(translated)
    return translated


def _drop_inherited(values: dict[str, Any]) -> None:
    """Leave out what a table of settings had of its own, in earlier versions, and would follow from others now."""
    actor = values.get("actor", {}).get("optim", {})
    critic = values.get("critic", {}).get("optim", {})
    inherited = {**actor, "lr": _CRITIC_LR}
    for name in [name for name, value in critic.items() if inherited.get(name) == value]:
        del critic[name]


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
