"""Settings of earlier versions: where they are now, or why there are none."""

from gcore_runs.migration.key import Key, lacks, nothing, to

_COMMAND = "it is an option of the command train, and no setting of a run"
ENGINE_OPTIONS = "rollout.engine_options"
_IN_OPTIONS = ("async_scheduling", "seed_per_sample", "enable_expert_parallel", "decode_mode", "kv_cache_bytes")
_PROMETHEUS = ("prometheus_port", "prometheus_host")
_MODELS = ("actor", "critic")


REMOVED: dict[str, Key] = {
    "sim.*": nothing("simulate train has the section sim"),
    **dict.fromkeys(("dry_run", "dry_run_device", "dry_run_nodes", "dry_run_gpus_per_node"), nothing(_COMMAND)),
    **dict.fromkeys(("warmup.*", "demo.*"), nothing(_COMMAND)),
    **dict.fromkeys((f"rollout.{name}" for name in _IN_OPTIONS), to(ENGINE_OPTIONS)),
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
