"""The command `gcore-llm simulate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gcore_llm.simulate.calibrate import run_calibrate
from gcore_llm.simulate.config import SimulateConfig
from gcore_runs.errors import UserError
from gcore_runs.settings.parsing import parse_over

_DESCRIPTION = """Run the program of train in simulated time, on simulated devices.

Simulated are generation with continuous batching, a reward, training by its FLOPs, and weight sync. The program, its
sampling, balancing and preparation are real, on as many controllers as are asked for.

--config FILE.toml: settings under the same names ([engine] base_s = 0.01); options override them.
--calibrate RUN [RUN ...]: write such a file from the timings of real runs; see --calibrate --help.
"""

_NAMES = {
    "generation": "generation",
    "reward": "reward",
    "preparation": "preparation",
    "training": "training",
    "sync": "weight sync",
    "long_tail": "idle: long tail of generation",
    "waiting_for_reward": "idle: waiting for reward",
    "reward_devices": "idle: reward's devices without a call",
    "imbalance": "idle: imbalance of training",
    "barriers": "idle: waiting at barriers",
}


def parse_simulate(args: Sequence[str]) -> SimulateConfig:
    """Parse the command line, whose options override those of a TOML file.

    Raises:
        UserError: see `merge`.
    """
    return parse_over(SimulateConfig(), args, prog="gcore-llm simulate", description=_DESCRIPTION)


def run_simulate(args: Sequence[str]) -> None:
    """Run the command."""
    if any(arg.split("=")[0] == "--calibrate" for arg in args):
        run_calibrate(args)
        return
    config = parse_simulate(args)
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise UserError(f"json is {config.json!r}; expected a file in an existing folder")
    from rich.table import Table

    from gcore_llm.simulate.run import StepFigures, simulate
    from gcore_placement.simulation.running_ledger import IDLE, WORK
    from gcore_runs.display import Display

    with Display() as display:
        display.phase("simulating", total=config.steps)

        def stepped(figures: StepFigures) -> None:
            cells = [
                ("simulated step", f"{figures.step_s:,.1f} s"),
                ("busiest controller", f"{max(figures.controller_load):.3%}"),
            ]
            display.progressed(figures.step, cells)

        result = simulate(config, stepped)
    step_s = np.array([step.step_s for step in result.steps])
    total_s = float(step_s.sum())
    shares = {
        name: sum(step.device_s[name] for step in result.steps) / (config.devices * total_s) for name in (*WORK, *IDLE)
    }
    loads = np.average([step.controller_load for step in result.steps], axis=0, weights=step_s)
    table = Table(
        title=f"{config.devices:,} simulated devices, {config.controllers:,} controllers, {config.steps:,} steps",
        title_justify="left",
        show_header=False,
    )
    table.add_row("step time, mean", f"{step_s.mean():,.1f} s")
    table.add_row("step time, 95th percentile", f"{np.quantile(step_s, 0.95):,.1f} s")
    table.add_row(
        "tokens a second", f"{sum(step.num_tokens for step in result.steps) / total_s:,.0f}", end_section=True
    )
    for name, share in shares.items():
        table.add_row(_NAMES[name], f"{share:.1%}", end_section=name in (WORK[-1], IDLE[-1]))
    table.add_row("busiest controller's load", f"{loads.max():.3%} of a core")
    table.add_row("real seconds", f"{result.wall_s:,.1f} s")
    display.console.print(table)
    if config.token_unit > 1:
        display.say(f"lengths are rounded to {config.token_unit} tokens, and the work scaled (--token-unit)")
    if config.json:
        Path(config.json).write_text(json.dumps(asdict(result), indent=1) + "\n")
        display.say(f"figures: {config.json}")
