"""The part payloads: image features of growing size through one driver, several controllers, or none of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from rich.table import Table

from gcore_bench.controller.cluster import local_cluster
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.workload import ALONE, WARMUP_STEPS, ImagePayload, step_row
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import (
    Figures,
    Rounds,
    Row,
    Run,
    Session,
    figure,
    figures_table,
    mb,
    paired_ratio,
    ratio,
    summarise,
)
from gcore_bench.placement.simulations.study import payload_load
from gcore_placement.simulation.scenarios import SCALES, SCENARIOS

DRIVER = "one driver"
"""A single controller that every byte passes through."""
SIMULATED_DEVICES = 10_000
SIMULATED_CONTROLLERS = (1, 8, 64, 512)

NOTE = (
    "payloads: prompts with image features, [tokens, 1280] in float16, made by workers, redistributed by length and "
    "read by the workers. One driver, and N controllers that carry: every byte passes through a controller, in and "
    "out. By reference: features stay in the object store. Work alone: the workers make the same features and read "
    "them where they are. MB/s: the payload over the step. Busiest: the controller with most CPU seconds in a step, "
    "and the highest resident memory of one, with the pages of the object store that it has mapped."
)
_NAMES = {True: " that carry", False: ", by reference"}
_IN_STORE = 4.0
"""Objects of a step over its payload: from workers, between controllers, to workers, and some of the step before."""
_NEEDED = 8.0
_SPARE_BYTES = 256 << 20
_COLORS = ("#d95f02", "#1f5fa8", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")


def contenders(options: ControllerOptions) -> dict[str, tuple[int, bool]]:
    """Return number of controllers and whether they carry features, by name."""
    found = {DRIVER: (1, True)}
    for is_carried, n in product((True, False), options.controllers):
        if (n, is_carried) != (1, True):
            found[f"{n} controller{'s' * (n > 1)}{_NAMES[is_carried]}"] = (n, is_carried)
    return found


def run(options: ControllerOptions, session: Session) -> None:
    """Measure every size, and simulate larger clusters at the rate that was measured of the driver."""
    runs: list[Run] = []
    for prompt_mb in options.prompt_mb:
        runs += asyncio.run(_rounds_of(prompt_mb, options, session.say))
    if not runs:
        raise BenchError("prompt_mb has no size that fits into the free memory; expected smaller ones")
    rows = payload_rows(runs)
    # With the largest payload, next to which what a step takes without any is small.
    rate = [row["bytes_per_cpu_s"] for row in rows if row["contender"] == DRIVER][-1]
    simulated = simulated_rows(options.prompt_mb, rate, seed=options.seed)
    tables = [payload_table(rows, options, fmean(run.load for run in runs)), simulated_table(simulated, rate)]
    lines = findings(rows)
    session.add("payloads", tables=tables, lines=lines, rows=rows, simulated=simulated, runs=runs, findings=lines)
    if options.html is not None:
        write_page(options.html, rows)


async def _rounds_of(prompt_mb: float, options: ControllerOptions, say: Callable[[str], object]) -> list[Run]:
    """Measure one size with every contender in turn; it is left out where memory lacks."""
    nbytes = round(prompt_mb * 1e6) * options.prompts
    payload = ImagePayload.of(nbytes=nbytes, num_samples=options.prompts, seed=options.seed)
    rounds, free = Rounds(f"{prompt_mb:g} MB", options.rounds, say=say), psutil.virtual_memory().available
    if _NEEDED * nbytes > free:
        say(
            f"{prompt_mb:g} MB a prompt are left out; they need {mb(_NEEDED * nbytes)} MB, of which {mb(free)} are free"
        )
        return []
    wanted = int(_IN_STORE * nbytes) + _SPARE_BYTES
    with local_cluster(options.object_store_mb << 20 or min(wanted, int(0.45 * free))) as ray:
        from gcore_bench.controller.contenders.gcore import BenchWorker, dispatch_program, run_alone
        from gcore_controller import run_ray

        workers = [ray.remote(BenchWorker).options(num_cpus=1).remote() for _ in range(options.workers)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        known = contenders(options)
        for turn in rounds.turns([ALONE, *known]):
            if turn.contender == ALONE:
                row: Figures = {"step_s": await run_alone(workers, payload, num_steps=options.steps)}
            else:
                world_size, is_carried = known[turn.contender]
                num_steps = WARMUP_STEPS + options.steps
                program = partial(dispatch_program, payload=payload, num_steps=num_steps, is_carried=is_carried)
                row = step_row(await run_ray(program, roles=[*workers], world_size=world_size))
            turn.done({turn.contender: row | {"payload_bytes": float(payload.nbytes)}}, f"{row['step_s']:.3f} s")
    return rounds.runs


def payload_rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each size and contender: medians over the rounds, and the highest memory.

    ``bytes_per_s`` is the payload over a step, ``speed`` the driver's step over the contender's, of the same round, and
    ``bytes_per_cpu_s`` what the busiest controller would take in and give out, if it carries all, in a CPU second.
    """
    rows: list[Row] = []
    for part in dict.fromkeys(run.part for run in runs):
        own = [run for run in runs if run.part == part]
        for name, figures in summarise(part, own).rows.items():
            resident = [run.rows[name]["resident_bytes"] for run in own if "resident_bytes" in run.rows.get(name, {})]
            cpu_s = figures.get("cpu_s")
            rows.append(
                {
                    "prompt_mb": float(part.split()[0]),
                    "contender": name,
                    "step_s": figures["step_s"],
                    "bytes_per_s": figures["payload_bytes"] / figures["step_s"],
                    "speed": paired_ratio(own, DRIVER, name, "step_s"),
                    "cpu_s": cpu_s,
                    "bytes_per_cpu_s": 2 * figures["payload_bytes"] / cpu_s if cpu_s else None,
                    "resident_bytes": max(resident, default=None),
                }
            )
    return rows


def payload_table(rows: Sequence[Row], options: ControllerOptions, load: float) -> Table:
    """Return a table of all sizes, one after the other."""
    columns = {
        "MB a prompt": figure("prompt_mb", "g"),
        "step s": figure("step_s", ".3f"),
        "MB/s": lambda row: f"{row['bytes_per_s'] / 1e6:,.0f}",
        "driver's step over it": lambda row: ratio(row["speed"]),
        "busiest: CPU s a step": figure("cpu_s", ".3f"),
        "resident MB": lambda row: mb(row["resident_bytes"]),
    }
    shown = figures_table(f"{options.prompts} prompts with image features through controllers", *columns)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        is_last = following["prompt_mb"] != row["prompt_mb"]
        shown.add_row(row["contender"], *(cell(row) for cell in columns.values()), end_section=is_last)
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {load:.1f}"
    return shown


def simulated_rows(sizes_mb: Sequence[float], rate: float, *, seed: int) -> list[Row]:
    """Return the load of the busiest of many controllers that carry, in a step of a simulated cluster.

    Payloads are log-normal around each size. They come in once and go out three times (`payload_load`), at ``rate``,
    bytes a CPU second of one controller, in and out together.
    """
    rows: list[Row] = []
    batch = SCALES[SIMULATED_DEVICES].train_batch_size
    for size in sizes_mb:
        recipe = replace(SCENARIOS["multimodal"], num_steps=1, payload_median_bytes=size * 1e6, seed=seed)
        trace = replace(recipe, train_batch_size=batch).trace()
        for count in SIMULATED_CONTROLLERS:
            _, held_bytes, uneven = payload_load(trace, num_controllers=count)
            seconds = (1 + 3) * held_bytes / rate
            row = {"prompt_mb": size, "controllers": count, "busiest_s": seconds, "held_bytes": held_bytes}
            rows.append(row | {"uneven": uneven})
    return rows


def simulated_table(rows: Sequence[Row], rate: float) -> Table:
    """Return a table with a line for each size and number of controllers."""
    columns = ("controllers", "busiest, s a step", "it holds GB", "max / mean")
    shown = figures_table(f"simulated, {SIMULATED_DEVICES:,} devices, by MB a prompt", *columns)
    for row in rows:
        cells = [f"{row['busiest_s']:,.1f}", f"{row['held_bytes'] / 1e9:,.2f}", f"{row['uneven']:.2f}"]
        shown.add_row(f"{row['prompt_mb']:g} MB", str(row["controllers"]), *cells)
    shown.caption = f"at {rate / 1e6:,.0f} MB a CPU second, in and out together, as measured of one driver"
    return shown


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what the largest size and the growth from the smallest one show."""
    smallest, largest = (choose(row["prompt_mb"] for row in rows) for choose in (min, max))
    found = {(row["prompt_mb"], row["contender"]): row for row in rows if row["contender"] != ALONE}
    names = list(dict.fromkeys(name for _, name in found))
    speeds = ", ".join(f"{name} {ratio(found[largest, name]['speed'])}" for name in names if name != DRIVER)
    memory = (
        f"{name} {mb(found[smallest, name]['resident_bytes'])} to {mb(found[largest, name]['resident_bytes'])}"
        for name in names
    )
    return [
        f"the driver's step over that of others, at {largest:g} MB a prompt: {speeds}",
        f"resident MB of the busiest controller, at {smallest:g} and {largest:g} MB a prompt: {', '.join(memory)}",
    ]


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Draw a step's seconds and the busiest controller's memory over the size of a prompt's features."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = ("step, s", "resident memory of the busiest controller, MB")
    drawn: Any = make_subplots(rows=1, cols=2, subplot_titles=titles)
    for color, name in zip(_COLORS, dict.fromkeys(row["contender"] for row in rows), strict=False):
        own = [row for row in rows if row["contender"] == name]
        sizes = [row["prompt_mb"] for row in own]
        resident = [row["resident_bytes"] for row in own]
        values = ([row["step_s"] for row in own], [None if size is None else size / 2**20 for size in resident])
        for column, points in enumerate(values, start=1):
            look = {"line": {"color": color}, "legendgroup": name, "showlegend": column == 1}
            drawn.add_trace(Scatter(x=sizes, y=points, name=name, mode="lines+markers", **look), row=1, col=column)
    drawn.update_xaxes(type="log", title_text="MB of features a prompt")
    drawn.update_yaxes(type="log")
    drawn.update_layout(title_text="Image features through controllers", template="plotly_white")
    drawn.write_html(path, include_plotlyjs=True)
