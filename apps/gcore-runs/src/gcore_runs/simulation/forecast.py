"""The forecast of a run's steps by the law of dry runs, on devices of the planner's data sheets or on CPU cores."""

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
    EngineLayout,
    Job,
    ModelShape,
    PlacementError,
    StepTime,
    Strategy,
    TrainingLayout,
    forecast_step,
    predict_layout,
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
    layout: TrainingLayout,
    *,
    engines: EngineLayout,
    judges: EngineLayout | None,
) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Return what forecasts a step of a job by its metrics, as a dry run of a cluster predicts it.

    See `gcore_llm.forecast.run_forecast`. ``judges`` are engines of ``job.judge``; None without one.
    """
    correction = Correction(most=_MOST)
    if path.exists():
        correction.load_state(Correction.load(path).state())
    num_devices = layout.num_ranks + engines.num_devices
    strategy: Strategy = "colocated"
    if judges is not None:
        num_devices += judges.num_devices
        if not STRATEGIES[config.strategy].is_time_shared:
            strategy = "split"
    cluster = Cluster(
        num_devices=num_devices, device=_device(config.device), devices_per_node=num_devices
    )

    def predict(job: Job) -> StepTime:
        return predict_layout(
            cluster,
            job,
            layout,
            engines,
            judges,
            strategy=strategy,
            takes_turns=config.takes_turns or config.lends_ranks,
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
