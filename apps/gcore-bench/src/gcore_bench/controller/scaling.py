"""The part sim: load of the controllers and seconds of a step in simulated clusters of several sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.harness.options import BenchError
from gcore_llm.simulate.run import simulate
from gcore_runs.errors import UserError
from gcore_runs.simulation.cluster import Simulation
from gcore_runs.simulation.config import SimulateConfig

_DEVICE_STEPS = 8192
"""Devices times steps of one simulation, at most, unless it has a single step."""


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One simulated cluster."""

    devices: int
    most_controllers: int
    """Number in the options."""
    controllers: int
    """Number in the simulation: at most one for each prompt of a step."""
    steps: int
    step_s: float
    """Mean step, in simulated seconds."""
    load: float
    """Fraction of a core that the busiest controller's own code uses."""
    wall_s: float


def run_sizes(options: ControllerOptions, *, say: Callable[[str], object]) -> list[ScalingRow]:
    """Simulate all sizes, each with every number of controllers.

    Raises:
        BenchError: a size cannot be simulated.
    """
    rows: list[ScalingRow] = []
    for devices in sorted(set(options.devices)):
        steps = max(1, min(options.sim_steps, _DEVICE_STEPS // devices))
        for most in options.sim_controllers:
            try:
                config = SimulateConfig(
                    devices=devices, controllers=min(most, devices // 2), steps=steps, seed=options.seed
                )
                row = _row(simulate(config), most)
            except UserError as error:
                raise BenchError(f"{devices} devices: {error}") from error
            rows.append(row)
            say(
                f"sim: {devices:,} devices, {row.controllers} controllers: step {row.step_s:,.1f} s, busiest "
                f"controller {row.load:.3%} of a core, {row.wall_s:.1f} real seconds"
            )
    return rows


def _row(simulation: Simulation, most_controllers: int) -> ScalingRow:
    step_s = np.array([step.step_s for step in simulation.steps])
    loads = np.average([step.controller_load for step in simulation.steps], axis=0, weights=step_s)
    return ScalingRow(
        devices=simulation.config.devices,
        most_controllers=most_controllers,
        controllers=simulation.config.controllers,
        steps=simulation.config.steps,
        step_s=float(step_s.mean()),
        load=float(loads.max()),
        wall_s=simulation.wall_s,
    )
