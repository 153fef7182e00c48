"""Overheads and aims of dispatched steps, load of controllers in simulated clusters, and how both are shown."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.workload import ALONE, MEMCPY
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Run, figures_table, mb, ratio, summarise, verdict
from gcore_llm.simulate import simulate
from gcore_runs.errors import UserError
from gcore_runs.simulation.config import SimulateConfig

_FLAT, _LESS_OVERHEAD, _OF_MEMCPY = 1.1, 5.0, 0.5
_AIM_MB = 1024
_DEVICE_STEPS = 8192
"""Devices times steps of one simulation, at most, unless it has a single step."""

NOTES = {
    "dispatch": "dispatch: overhead: step less making the same features and reading them where they are. Of memcpy's "
    "rate: payload a second of overhead over that of a copy into shared memory. Busiest process: resident memory of "
    "the largest control process (RssAnon), sampled every 5 ms, without the pages of the object store.",
    "sim": "sim: the real program with the models of gcore-llm simulate. Load: processor seconds of the busiest "
    "controller's own code for a simulated second; the cost of messages is not modelled.",
}
"""A line for each part, without which its figures cannot be judged."""


Row = dict[str, Any]
"""Figures by name; None where a row has none."""


def dispatch_rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each payload and contender: medians over all rounds, and the highest memory.

    An overhead is the seconds of a step less those of the same work alone in the same round; ``over_memcpy`` is the
    rate of the payload in it over that of a copy, and ``grown_bytes`` the peak less the memory before the first step.
    """
    found: list[Row] = []
    for part in dict.fromkeys(run.part for run in runs):
        of_part = [run for run in runs if run.part == part]
        seconds = {(run.round, run.contender): run.rows[run.contender]["step_s"] for run in of_part}
        for name, figures in summarise(part, of_part).rows.items():
            row = {"payload_mb": int(part.split()[1]), "contender": name, "step_s": figures["step_s"]}
            row |= dict.fromkeys(("overhead_s", "over_memcpy", "peak_bytes", "grown_bytes"))
            if name not in (MEMCPY, ALONE):
                rounds = [number for number, contender in seconds if contender == name]
                overheads = [seconds[number, name] - seconds[number, ALONE] for number in rounds]
                rates = [seconds[number, MEMCPY] / max(o, 1e-6) for number, o in zip(rounds, overheads, strict=True)]
                row |= {"overhead_s": median(overheads), "over_memcpy": median(rates)}
                row["peak_bytes"] = figures["peak_bytes"]
                row["grown_bytes"] = figures["peak_bytes"] - figures["idle_bytes"]
            found.append(row)
    return found


def aims(rows: Sequence[Row]) -> list[str]:
    """Return a line for each aim that the figures cover; gcore's worst number of controllers decides."""
    ours, verls = ([row for row in rows if row["contender"].startswith(name)] for name in ("gcore", "verl"))
    if not ours:
        return []
    smallest, largest = (choose(row["payload_mb"] for row in ours) for choose in (min, max))
    lines: list[str] = []
    if smallest < largest:
        peak = {(row["payload_mb"], row["contender"]): row["peak_bytes"] for row in ours}
        names = [name for payload_mb, name in peak if payload_mb == largest and (smallest, name) in peak]
        worst = max(peak[largest, name] / peak[smallest, name] for name in names)
        lines.append(
            f"the busiest controller's memory does not grow with the payload: at {largest:,} MB up to {worst:.2f} "
            f"times that at {smallest:,} MB ({verdict(worst <= _FLAT)}: at most {_FLAT})"
        )
    if payloads := {row["payload_mb"] for row in verls} & {row["payload_mb"] for row in ours}:
        payload = _AIM_MB if _AIM_MB in payloads else max(payloads)
        driver_s = min(row["overhead_s"] for row in verls if row["payload_mb"] == payload)
        ratios = [driver_s / max(row["overhead_s"], 1e-6) for row in ours if row["payload_mb"] == payload]
        lines.append(
            f"overhead of verl's driver, the faster of its forms, over gcore's at {payload:,} MB: {min(ratios):.1f} to "
            f"{max(ratios):.1f} ({verdict(min(ratios) >= _LESS_OVERHEAD)}: at least {_LESS_OVERHEAD:g})"
        )
    rates = [row["over_memcpy"] for row in ours if row["payload_mb"] == largest]
    lines.append(
        f"payload a second of overhead, at {largest:,} MB: {min(rates):.2f} to {max(rates):.2f} of a copy in memory "
        f"({verdict(min(rates) >= _OF_MEMCPY)}: at least {_OF_MEMCPY})"
    )
    return lines


def dispatch_table(rows: Sequence[Row], options: ControllerOptions, load: float) -> Table:
    """Return a table of all payloads, one after the other."""
    columns = ("payload MB", "step s", "overhead s", "of memcpy's rate", "busiest process MB", "grown by MB")
    shown = figures_table("a step's payload, from rollout workers to trainer ranks", *columns)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        overhead = "-" if row["overhead_s"] is None else f"{row['overhead_s']:.3f}"
        cells = [f"{row['payload_mb']:,}", f"{row['step_s']:.3f}", overhead, ratio(row["over_memcpy"])]
        is_last = following["payload_mb"] != row["payload_mb"]
        shown.add_row(row["contender"], *cells, mb(row["peak_bytes"]), mb(row["grown_bytes"]), end_section=is_last)
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {load:.1f}"
    return shown


def run_sizes(options: ControllerOptions, *, say: Callable[[str], object]) -> list[Row]:
    """Simulate all sizes, each with every number of controllers: at most one for each prompt of a step.

    ``step_s`` is the mean step in simulated seconds, ``load`` the fraction of a core that the busiest controller uses.
    """
    rows: list[Row] = []
    for devices, most in product(sorted(set(options.devices)), options.sim_controllers):
        steps = max(1, min(options.sim_steps, _DEVICE_STEPS // devices))
        count = min(most, devices // 2)
        try:
            found = simulate(SimulateConfig(devices=devices, controllers=count, steps=steps, seed=options.seed))
        except UserError as error:
            raise BenchError(f"{devices} devices: {error}") from error
        seconds = np.array([step.step_s for step in found.steps])
        loads = np.average([step.controller_load for step in found.steps], axis=0, weights=seconds)
        step_s, load, wall_s = float(seconds.mean()), float(loads.max()), found.wall_s
        row = {"devices": devices, "most_controllers": most, "controllers": count, "steps": steps}
        rows.append(row | {"step_s": step_s, "load": load, "wall_s": wall_s})
        say(
            f"sim: {devices:,} devices, {count} controllers: step {step_s:,.1f} s, busiest controller {load:.3%} of a "
            f"core, {wall_s:.1f} real seconds"
        )
    return rows


def scaling_table(rows: Sequence[Row]) -> Table:
    """Return a table with a line for each simulated cluster."""
    columns = ("controllers", "steps", "step s", "busiest controller, of a core", "real s")
    shown = figures_table("simulated clusters, by devices", *columns)
    for row in rows:
        cells = [f"{row['step_s']:,.1f}", f"{row['load']:.3%}", f"{row['wall_s']:.1f}"]
        shown.add_row(f"{row['devices']:,}", str(row["controllers"]), str(row["steps"]), *cells)
    return shown


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Draw load and step time over the number of devices, with a line for each number of controllers."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = ("busiest controller, share of a core", "simulated step, s")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    colors = ("#d95f02", "#1f5fa8", "#1b9e77", "#7570b3", "#e7298a", "#666666")
    for color, most in zip(colors, dict.fromkeys(row["most_controllers"] for row in rows), strict=False):
        line = [row for row in rows if row["most_controllers"] == most]
        name = "1 controller" if most == 1 else f"up to {most} controllers"
        for column, metric in enumerate(("load", "step_s"), start=1):
            points = {axis: [row[key] for row in line] for axis, key in (("x", "devices"), ("y", metric))}
            look = {"name": name, "mode": "lines+markers", "line": {"color": color}, "showlegend": column == 1}
            figure.add_trace(Scatter(**points, **look), row=1, col=column)
    figure.update_xaxes(type="log", title_text="devices")
    figure.update_yaxes(type="log", tickformat="~%", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_layout(title_text="Controllers of simulated clusters", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)
