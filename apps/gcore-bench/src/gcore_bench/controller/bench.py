"""`gcore-bench controller`: steps of every payload under every contender, in turn, and simulated clusters."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from gcore_bench.controller import payloads
from gcore_bench.controller.cluster import local_cluster
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.workload import ALONE, MEMCPY, WARMUP_STEPS, Payload, memcpy_seconds, step_row
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import stderr_to
from gcore_bench.harness.report import (
    Figures,
    Rounds,
    Row,
    Run,
    Session,
    figures_table,
    mb,
    ratio,
    summarise,
    verdict,
)
from gcore_llm.simulate import simulate
from gcore_runs.errors import UserError
from gcore_runs.simulation.config import SimulateConfig

NEEDS = {"gcore": 3.0, "verl": 6.0, "verl-numpy": 6.0}
"""Peak memory over the payload: objects of this step and the last one; under verl also the serialised copies of
workers and those of the driver, up to four."""

_IN_STORE = 2.0
_SPARE_BYTES = 128 << 20
_VERL_ENVIRONMENT = {"verl": {}, "verl-numpy": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}}
_FLAT, _LESS_OVERHEAD, _OF_MEMCPY = 1.1, 5.0, 0.5
_AIM_MB = 1024
_DEVICE_STEPS = 8192
"""Devices times steps of one simulation, at most, unless it has a single step."""

NOTES = {
    "dispatch": "dispatch: overhead: step less making the same features and reading them where they are. Of memcpy's "
    "rate: payload a second of overhead over that of a copy into shared memory. Busiest process: resident memory of "
    "the largest control process (RssAnon), sampled every 5 ms, without the pages of the object store.",
    "payloads": payloads.NOTE,
    "sim": "sim: the real program with the models of gcore-llm simulate. Load: processor seconds of the busiest "
    "controller's own code for a simulated second; the cost of messages is not modelled.",
}
"""A line for each part, without which its figures cannot be judged."""


def run(options: ControllerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or features arrived with other bytes.
    """
    options = options.sized()
    with Session(options, console, notes=[NOTES[part] for part in NOTES if part in options.parts]) as session:
        for part in dict.fromkeys(options.parts):
            if part == "dispatch":
                runs: list[Run] = []
                with stderr_to(session.folder / "log"):
                    for payload_mb in sorted(set(options.payload_mb)):
                        runs += asyncio.run(_rounds_of(payload_mb, options, session.say))
                rows = dispatch_rows(runs)
                table = dispatch_table(rows, options, fmean(run.load for run in runs))
                session.add(part, tables=[table], lines=aims(rows), rows=rows, runs=runs, aims=aims(rows))
                continue
            if part == "payloads":
                with stderr_to(session.folder / "log"):
                    payloads.run(options, session)
                continue
            sizes = run_sizes(options, say=session.say)
            session.add(part, tables=[scaling_table(sizes)], rows=sizes)
            if options.html is not None:
                write_page(options.html, sizes)


def object_store_bytes(options: ControllerOptions, payload_mb: int) -> int:
    """Return the size of Ray's object store for a payload."""
    wanted = int(2.25 * (payload_mb << 20)) + _SPARE_BYTES
    return options.object_store_mb << 20 or min(wanted, int(0.45 * psutil.virtual_memory().available))


async def _rounds_of(payload_mb: int, options: ControllerOptions, say: Callable[[str], object]) -> list[Run]:
    """Measure a payload; contenders that lack the memory for it are reported and left out."""
    store_bytes = object_store_bytes(options, payload_mb)
    payload = Payload.of(nbytes=payload_mb << 20, num_samples=options.samples, seed=options.seed)
    rounds = Rounds(f"dispatch {payload_mb} MB", options.rounds, say=say)
    names: list[str] = []
    # A new cluster each time, because a store keeps every page that it has used.
    with local_cluster(store_bytes) as ray:
        from gcore_bench.controller.contenders.gcore import BenchWorker

        for contender in options.contenders:
            if missing := lack(contender, payload.nbytes, store_bytes):
                say(f"{rounds.part}: {contender} is left out; it needs {missing}")
            else:
                names += [f"gcore-{n}" for n in options.controllers] if contender == "gcore" else [contender]
        if not names:
            return []
        driver = ray.remote(_DriverProcess)
        drivers = {
            name: driver.options(num_cpus=1, runtime_env={"env_vars": variables}).remote(options.workers)
            for name, variables in _VERL_ENVIRONMENT.items()
            if name in names
        }
        workers = [ray.remote(BenchWorker).options(num_cpus=1).remote() for _ in range(options.workers)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        names = [MEMCPY, ALONE, *names]
        for turn in rounds.turns(names):
            row = await _measure(turn.contender, payload, workers, drivers, options.steps)
            if row is None:
                say(f"{turn.where} is left out from now on; it ran out of memory")
                names.remove(turn.contender)
            else:
                turn.done({turn.contender: row}, f"{row['step_s']:.3f} s")
    return rounds.runs


def lack(contender: str, payload_bytes: int, store_bytes: int) -> str:
    """Return what a payload lacks to fit, or an empty string."""
    if _IN_STORE * payload_bytes > store_bytes:
        return f"{_IN_STORE * payload_bytes / 2**20:,.0f} MB of the object store, which has {store_bytes / 2**20:,.0f}"
    needed, free = NEEDS[contender] * payload_bytes, psutil.virtual_memory().available
    is_short = needed > free
    return f"about {needed / 2**20:,.0f} MB of memory, of which {free / 2**20:,.0f} are free" if is_short else ""


async def _measure(
    name: str, payload: Payload, workers: Sequence[Any], drivers: Mapping[str, Any], num_steps: int
) -> Figures | None:
    """Return the figures of one turn; None: Ray ended processes before the machine ran out of memory."""
    from gcore_bench.controller.contenders.gcore import dispatch_program, run_alone
    from gcore_controller import run_ray

    if name == MEMCPY:
        return {"step_s": memcpy_seconds(payload.nbytes)}
    if name == ALONE:
        return {"step_s": await run_alone(workers, payload, num_steps=num_steps)}
    try:
        if name in drivers:
            return step_row([await drivers[name].run.remote(payload, num_steps)])
        program = partial(dispatch_program, payload=payload, num_steps=WARMUP_STEPS + num_steps)
        return step_row(await run_ray(program, roles=[*workers], world_size=int(name.rpartition("-")[2])))
    except Exception as raised:
        # Ray's own error of an actor's error holds hundreds of lines about all processes of the machine.
        error = getattr(raised, "cause", None) or raised
        if isinstance(error, BenchError):
            raise error from None
        if "running low on memory" in str(error):
            return None
        reason = str(error).strip().partition("\n")[0]
        raise BenchError(f"{name} failed at {payload.nbytes / 2**20:,.0f} MB: {reason}") from error


class _DriverProcess:
    """The actor of verl's driver; this process and its workers are the only ones that import verl."""

    def __init__(self, num_workers: int) -> None:
        from gcore_bench.controller.contenders.verl import VerlDriver

        self._driver = VerlDriver(num_workers)

    def run(self, payload: Payload, num_steps: int) -> Any:
        return self._driver.run(payload, num_steps)


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
