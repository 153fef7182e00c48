"""The forecast of a run's steps by the planner's laws, from its settings."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import has_critic, has_reference
from gcore_placement import (
    STRATEGIES,
    Cluster,
    Correction,
    Device,
    Forecast,
    Job,
    Lengths,
    ModelShape,
    plan,
    predict_step,
)
from gcore_runs.run_folder import write_atomically

_CORE = Device(
    name="CPU core",
    memory_bytes=1e12,
    flops_per_s=5e10,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=1e10,
    host_bytes_per_s=1e10,
)
"""Rough numbers, with memory that holds any model that runs: measurements correct the rest."""

_MOST = 1e6
"""Largest correction, for devices without a data sheet and models too small to be limited by arithmetic."""


def run_forecast(config: TrainConfig, model: Path, path: Path) -> Forecast:
    """Return the forecast of a run, on devices of the planner's data sheets, or on CPU cores.

    `gcore-placement plan --correction RUN` uses its corrections for plans of other jobs.

    Args:
        config: of the run, at its full size.
        model: the policy's folder.
        path: file of the corrections; it is read if it exists, and written after each step.

    Raises:
        PlacementError: the planner does not know such a model, or the file is damaged.
    """
    correction = Correction(most=_MOST)
    if path.exists():
        correction.load_state(Correction.load(path).state())
    judge = Path(config.reward_model.path) if config.sizes.judges else None
    job = Job(
        policy=_shape(model),
        prompt_lengths=Lengths.recorded([config.data.max_prompt_length]),
        response_lengths=Lengths.recorded([config.data.max_response_length]),
        train_batch_size=config.data.train_batch_size,
        n=config.rollout.n,
        judge=_shape(judge) if judge else None,
        judge_lengths=Lengths.recorded([config.reward_model.judge.max_response_length]) if judge else None,
        reference=has_reference(config),
        critic=_shape(Path(config.critic.model or model)) if has_critic(config) else None,
        compute_bytes=2 if config.dtype == "bfloat16" else 4,
        old_log_probs=config.algorithm.old_log_probs == "trainer",
    )
    is_time_shared = STRATEGIES[config.placement.strategy].is_time_shared
    num_policy = len(config.rollout.urls) or max(1, config.rollout.num_processes)
    num_judge = max(1, config.sizes.judges) if judge else 0
    num_engines = max(num_policy, num_judge) if is_time_shared else num_policy + num_judge
    num_devices = max(num_engines, config.trainer.num_processes)
    cluster = Cluster(num_devices=num_devices, device=_device(config.device), devices_per_node=num_devices)
    costs = plan(cluster, job, most_num_seqs=config.rollout.max_num_seqs).costs
    # Ranks may be fewer than engines.
    share, own = num_devices / config.trainer.num_processes, costs.training
    training = replace(own, per_token_s=own.per_token_s * share, per_pair_s=own.per_pair_s * share)
    predict = partial(
        predict_step,
        replace(costs, training=training),
        strategy="split" if judge and not is_time_shared else "colocated",
        num_devices=num_devices,
        policy_devices=num_policy,
        reward_devices=num_judge,
    )
    return Forecast(predict, job, correction, partial(write_atomically, path))


def _shape(model: Path) -> ModelShape:
    return ModelShape.from_config(json.loads((model / "config.json").read_text()))


def _device(name: str) -> Device:
    if not name.startswith("cuda"):
        return _CORE
    import torch

    return replace(Device.matching(torch.cuda.get_device_name()), memory_bytes=1e12)
