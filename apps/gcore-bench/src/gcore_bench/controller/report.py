"""Overheads and aims of dispatched steps, load of controllers in simulated clusters, and how both are shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.workload import ALONE, MEMCPY
from gcore_bench.harness.errors import BenchError
from gcore_bench.harness.rounds import Run
from gcore_bench.harness.summary import summarise
from gcore_bench.harness.tables import figures_table, mb, ratio, verdict
from gcore_llm.simulate.config import SimulateConfig
from gcore_llm.simulate.run import simulate
from gcore_runs.errors import UserError

_FLAT, _LESS_OVERHEAD, _OF_MEMCPY = 1.1, 5.0, 0.5
_AIM_MB = 1024
_DEVICE_STEPS = 8192
"""Devices times steps of one simulation, at most, unless it has a single step."""


@dataclass(frozen=True, kw_only=True)
class DispatchRow:
    """A contender at a payload: medians over all rounds, and the highest memory."""

    payload_mb: int
    contender: str
    step_s: float
    overhead_s: float | None = None
    """Seconds of a step less those of the same work alone in the same round."""
    over_memcpy: float | None = None
    """Rate of the payload in the overhead, over the rate of a copy in the same round."""
    peak_bytes: float | None = None
    grown_bytes: float | None = None
    """Peak less the memory before the first step."""


def dispatch_rows(runs: Sequence[Run]) -> list[DispatchRow]:
    """Return a row for each payload and contender."""
    found: list[DispatchRow] = []
    for part in dict.fromkeys(run.part for run in runs):
        of_part = [run for run in runs if run.part == part]
        seconds = {(run.round, run.contender): run.rows[run.contender]["step_s"] for run in of_part}
        for name, row in summarise(part, of_part).rows.items():
            figures = DispatchRow(payload_mb=int(part.split()[1]), contender=name, step_s=row["step_s"])
            if name not in (MEMCPY, ALONE):
                rounds = sorted(number for number, contender in seconds if contender == name)
                overheads = [seconds[number, name] - seconds[number, ALONE] for number in rounds]
                rates = [seconds[number, MEMCPY] / max(o, 1e-6) for number, o in zip(rounds, overheads, strict=True)]
                figures = replace(
                    figures,
                    overhead_s=median(overheads),
                    over_memcpy=median(rates),
                    peak_bytes=row["peak_bytes"],
                    grown_bytes=row["peak_bytes"] - row["idle_bytes"],
                )
            found.append(figures)
    return found


def aims(rows: Sequence[DispatchRow]) -> list[str]:
    """Return a line for each aim that the figures cover; gcore's worst number of controllers decides."""
    ours = [row for row in rows if row.contender.startswith("gcore")]
    if not ours:
        return []
    smallest, largest = (choose(row.payload_mb for row in ours) for choose in (min, max))
    lines: list[str] = []
    if smallest < largest:
        peak = {(row.payload_mb, row.contender): row.peak_bytes or 0.0 for row in ours}
        names = [row.contender for row in ours if row.payload_mb == largest and (smallest, row.contender) in peak]
        worst = max(peak[largest, name] / peak[smallest, name] for name in names)
        lines.append(
            f"the busiest controller's memory does not grow with the payload: at {largest:,} MB up to {worst:.2f} "
            f"times that at {smallest:,} MB ({verdict(worst <= _FLAT)}: at most {_FLAT})"
        )
    lines += _less_overhead(ours, [row for row in rows if row.contender.startswith("verl")])
    rates = [row.over_memcpy for row in ours if row.payload_mb == largest and row.over_memcpy is not None]
    lines.append(
        f"payload a second of overhead, at {largest:,} MB: {min(rates):.2f} to {max(rates):.2f} of a copy in memory "
        f"({verdict(min(rates) >= _OF_MEMCPY)}: at least {_OF_MEMCPY})"
    )
    return lines


def _less_overhead(ours: Sequence[DispatchRow], verls: Sequence[DispatchRow]) -> list[str]:
    payloads = {row.payload_mb for row in verls} & {row.payload_mb for row in ours}
    if not payloads:
        return []
    payload = _AIM_MB if _AIM_MB in payloads else max(payloads)
    driver_s = min(row.overhead_s or 0.0 for row in verls if row.payload_mb == payload)
    own = [row.overhead_s or 0.0 for row in ours if row.payload_mb == payload]
    ratios = [driver_s / max(overhead_s, 1e-6) for overhead_s in own]
    return [
        f"overhead of verl's driver, the faster of its forms, over gcore's at {payload:,} MB: {min(ratios):.1f} to "
        f"{max(ratios):.1f} ({verdict(min(ratios) >= _LESS_OVERHEAD)}: at least {_LESS_OVERHEAD:g})"
    ]


def dispatch_table(rows: Sequence[DispatchRow], options: ControllerOptions, load: float) -> Table:
    """Return a table of all payloads, one after the other."""
    columns = ("payload MB", "step s", "overhead s", "of memcpy's rate", "busiest process MB", "grown by MB")
    shown = figures_table("a step's payload, from rollout workers to trainer ranks", *columns)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            row.contender,
            f"{row.payload_mb:,}",
            f"{row.step_s:.3f}",
            "-" if row.overhead_s is None else f"{row.overhead_s:.3f}",
            ratio(row.over_memcpy),
            mb(row.peak_bytes),
            mb(row.grown_bytes),
            end_section=following is not None and following.payload_mb != row.payload_mb,
        )
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {load:.1f}"
    return shown


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
            count = min(most, devices // 2)
            try:
                found = simulate(SimulateConfig(devices=devices, controllers=count, steps=steps, seed=options.seed))
            except UserError as error:
                raise BenchError(f"{devices} devices: {error}") from error
            step_s = np.array([step.step_s for step in found.steps])
            loads = np.average([step.controller_load for step in found.steps], axis=0, weights=step_s)
            row = ScalingRow(
                devices=devices,
                most_controllers=most,
                controllers=count,
                steps=steps,
                step_s=float(step_s.mean()),
                load=float(loads.max()),
                wall_s=found.wall_s,
            )
            rows.append(row)
            say(
                f"sim: {devices:,} devices, {row.controllers} controllers: step {row.step_s:,.1f} s, busiest "
                f"controller {row.load:.3%} of a core, {row.wall_s:.1f} real seconds"
            )
    return rows


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """Return a table with a line for each simulated cluster."""
    columns = ("controllers", "steps", "step s", "busiest controller, of a core", "real s")
    shown = figures_table("simulated clusters, by devices", *columns)
    for row in rows:
        cells = [f"{row.step_s:,.1f}", f"{row.load:.3%}", f"{row.wall_s:.1f}"]
        shown.add_row(f"{row.devices:,}", str(row.controllers), str(row.steps), *cells)
    return shown


def write_page(path: Path, rows: Sequence[ScalingRow]) -> None:
    """Draw load and step time over the number of devices, with a line for each number of controllers."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = ("busiest controller, share of a core", "simulated step, s")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    colors = ("#d95f02", "#1f5fa8", "#1b9e77", "#7570b3", "#e7298a", "#666666")
    for color, most in zip(colors, dict.fromkeys(row.most_controllers for row in rows), strict=False):
        line = [row for row in rows if row.most_controllers == most]
        name = "1 controller" if most == 1 else f"up to {most} controllers"
        for column, values in enumerate(([row.load for row in line], [row.step_s for row in line]), start=1):
            look = {"name": name, "mode": "lines+markers", "line": {"color": color}, "showlegend": column == 1}
            figure.add_trace(Scatter(x=[row.devices for row in line], y=values, **look), row=1, col=column)
    figure.update_xaxes(type="log", title_text="devices")
    figure.update_yaxes(type="log", tickformat="~%", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_layout(title_text="Controllers of simulated clusters", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def notes(options: ControllerOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines: list[str] = []
    if "dispatch" in options.parts:
        lines.append(
            "dispatch: overhead: step less making the same features and reading them where they are. Of memcpy's rate: "
            "payload a second of overhead over that of a copy into shared memory. Busiest process: resident memory of "
            "the largest control process (RssAnon), sampled every 5 ms, without the pages of the object store."
        )
    if "sim" in options.parts:
        lines.append(
            "sim: the real program with the models of gcore-llm simulate. Load: processor seconds of the busiest "
            "controller's own code for a simulated second; the cost of messages is not modelled."
        )
    return lines
