"""The settings of `gcore-llm train` for a plan, in TOML."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from gcore_placement.forecast import Job
from gcore_placement.planning.planner import Plan

_KL_LOSS_COEF = 0.001
"""Weight of the KL to the reference, where the job has one: verl's examples'."""

Settings = Mapping[str, "str | int | float | bool | Settings"]


def run_settings(plan: Plan, job: Job, *, model: str, judge: str) -> str:
    """Return the settings of a runnable plan (see `plan`), as the text of a TOML file.

    Args:
        model: the policy's folder, or its `config.json`.
        judge: the judge's; empty without one.
    """
    used = f"{plan.num_devices} of {plan.cluster.num_devices} x {plan.cluster.device.name}"
    usable = f"{plan.peak_bytes / 1e9:.1f} of {plan.usable_bytes / 1e9:.1f} GB"
    header = f"# {used}: {plan.step_s:.1f} s a step predicted, {usable} of a device"
    lines = "\n".join(_toml_lines(_build_settings(plan, job, model, judge)))
    return f"{header}\n{lines}\n"


def _build_settings(plan: Plan, job: Job, model: str, judge: str) -> Settings:
    policy = plan.policy
    training = plan.training
    nodes = plan.cluster.num_nodes(plan.num_devices)
    actor: dict[str, str | int | float | bool | Settings] = {
        "ppo_max_token_len": training.ppo_max_token_len
    }
    if job.ppo_mini_batch_size:
        actor["ppo_mini_batch_size"] = int(job.ppo_mini_batch_size)
    actor["enable_gradient_checkpointing"] = training.gradient_checkpointing
    if plan.lora_rank:
        actor["lora_rank"] = plan.lora_rank
    if plan.optimizer_offload:
        actor["offload"] = "optimizer"
    if job.reference:
        actor["loss"] = {"kl_loss_coef": _KL_LOSS_COEF}
    settings: dict[str, str | int | float | bool | Settings] = {
        "model": _model_folder(model),
        "runtime": "ray",
        # One a node, each with an engine or more of its own.
        "controllers": min(nodes, policy.num_engines),
        "data": {
            "train_batch_size": job.train_batch_size,
            "max_prompt_length": int(job.prompt_lengths.longest),
            "max_response_length": int(job.response_lengths.longest),
        },
        "rollout": {
            "engine": "vllm",
            "n": job.n,
            "num_processes": policy.num_engines,
            "tensor_parallel_size": policy.devices_per_engine,
            "max_num_seqs": policy.max_num_seqs,
            "colocated": True,
        },
        "actor": actor,
        "trainer": {
            "backend": training.backend,
            "num_processes": training.num_ranks,
            "parallel": {"context_parallel_size": training.context_parallel_size},
        },
    }
    algorithm: dict[str, str] = {}
    if job.critic is not None:
        algorithm["adv_estimator"] = "gae"
    if job.old_log_probs:
        algorithm["old_log_probs"] = "trainer"
    if algorithm:
        settings["algorithm"] = algorithm
    if plan.judge is not None and job.judge_lengths is not None:
        settings["placement"] = {"strategy": plan.strategy}
        settings["reward_model"] = {
            "kind": "judge",
            "path": _model_folder(judge),
            "judge": {
                "engine": "vllm",
                "num_processes": plan.judge.num_engines,
                "tensor_parallel_size": plan.judge.devices_per_engine,
                "max_response_length": int(job.judge_lengths.longest),
            },
        }
    return settings


def _model_folder(model: str) -> str:
    path = Path(model)
    return str(path.parent if path.name == "config.json" else path)


def _toml_lines(settings: Settings, table: str = "") -> Iterator[str]:
    values = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    if table and values:
        yield f"\n[{table}]"
    for name, value in values.items():
        # Strings, numbers, true and false are in JSON as they are in TOML.
        yield f"{name} = {json.dumps(value)}"
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, f"{table}.{name}".lstrip("."))
