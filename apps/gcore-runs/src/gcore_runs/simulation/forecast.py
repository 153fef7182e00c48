"""The forecast of a run's steps by the planner's laws, on devices of its data sheets or on CPU cores."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gcore_placement import (
    STRATEGIES,
    Cluster,
    Correction,
    Device,
    Job,
    ModelShape,
    PlacementError,
    forecast_step,
    plan,
    predict_step,
)
from gcore_runs.errors import UserError
from gcore_runs.run_folder import write_atomically
from gcore_runs.settings.run_config import BaseRLConfig

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


def forecast_job(
    config: BaseRLConfig,
    job: Job,
    path: Path,
    *,
    num_engines: int,
    num_judges: int,
    most_num_seqs: int,
) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Return what forecasts a step of a job by its metrics, with engines that each generate ``most_num_seqs`` at most.

    There are ``num_engines``, and ``num_judges`` engines of ``job.judge``; 0 without one. See
    `gcore_llm.forecast.run_forecast`.
    """
    if config.placement.lend_ranks is True:
        num_engines += config.sizes.num_lent
    correction = Correction(most=_MOST)
    if path.exists():
        correction.load_state(Correction.load(path).state())
    is_time_shared = STRATEGIES[config.strategy].is_time_shared
    num_ranks = config.trainer.num_processes
    num_serving = max(num_engines, num_judges) if is_time_shared else num_engines + num_judges
    num_devices = max(num_serving, num_ranks)
    cluster = Cluster(
        num_devices=num_devices, device=_device(config.device), devices_per_node=num_devices
    )
    costs = plan(cluster, job, most_num_seqs=most_num_seqs, engine_devices=1).costs
    # Ranks may be fewer than engines.
    share = num_devices / num_ranks
    training = replace(
        costs.training,
        per_token_s=costs.training.per_token_s * share,
        per_pair_s=costs.training.per_pair_s * share,
    )
    predict = partial(
        predict_step,
        replace(costs, training=training),
        strategy="split" if job.judge and not is_time_shared else "colocated",
        num_devices=num_devices,
        policy_devices=num_engines,
        reward_devices=num_judges,
    )
    return partial(
        forecast_step,
        job=job,
        predict=predict,
        correction=correction,
        save=partial(write_atomically, path),
    )


def model_shape(model: Path) -> ModelShape:
    """Return the shape of a model's folder; `PlacementError` if the planner does not know its architecture."""
    return ModelShape.from_config(json.loads((model / "config.json").read_text()))


def dry_run_device(name: str) -> Device:
    """Return the device that a dry run plans for: one of the planner's, or one with a number of gigabytes.

    Raises:
        UserError: ``name`` is neither; it is the setting dry_run_device.
    """
    if name.replace(".", "", 1).isdecimal():
        return Device.of_memory(f"a GPU of {name} GB", float(name) * 1e9)
    try:
        return Device.named(name)
    except PlacementError as error:
        raise UserError(f"dry_run_{error}, or a number of gigabytes") from None


def _device(name: str) -> Device:
    if not name.startswith("cuda"):
        return _CORE
    import torch

    if not torch.cuda.is_available():
        raise PlacementError(
            "the GPUs are those of a cluster's nodes; this machine has none to read their name from"
        )
    return replace(Device.matching(torch.cuda.get_device_name()), memory_bytes=1e12)
