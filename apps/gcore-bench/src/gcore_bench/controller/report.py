"""Overheads, aims, tables and notes of the bench of controllers."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from gcore_bench.controller.dispatch import ALONE, MEMCPY
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.harness.report import Run, figures_table, mb, ratio, summarise, verdict

if TYPE_CHECKING:
    from gcore_bench.controller.scaling import ScalingRow

_FLAT, _LESS_OVERHEAD, _OF_MEMCPY = 1.1, 5.0, 0.5
_AIM_MB = 1024


@dataclass(frozen=True, kw_only=True)
class DispatchRow:
    """A contender at a payload: medians over all rounds, and the highest memory."""

    payload_mb: int
    contender: str
    step_s: float
    overhead_s: float | None
    """Seconds of a step less those of the same work alone in the same round."""
    over_memcpy: float | None
    """Rate of the payload in the overhead, over the rate of a copy in the same round."""
    peak_bytes: float | None
    grown_bytes: float | None
    """Peak less the memory before the first step."""


def dispatch_rows(runs: Sequence[Run]) -> list[DispatchRow]:
    """Return a row for each payload and contender."""
    found: list[DispatchRow] = []
    for part in dict.fromkeys(run.part for run in runs):
        of_part = [run for run in runs if run.part == part]
        seconds = {(run.round, run.contender): run.rows[run.contender]["step_s"] for run in of_part}
        rounds = sorted({run.round for run in of_part})
        for name, row in summarise(part, of_part).rows.items():
            has_overhead = name not in (MEMCPY, ALONE)
            overheads = [seconds[number, name] - seconds[number, ALONE] for number in rounds]
            rates = [seconds[number, MEMCPY] / max(o, 1e-6) for number, o in zip(rounds, overheads, strict=True)]
            found.append(
                DispatchRow(
                    payload_mb=int(part.split()[1]),
                    contender=name,
                    step_s=row["step_s"],
                    overhead_s=median(overheads) if has_overhead else None,
                    over_memcpy=median(rates) if has_overhead else None,
                    peak_bytes=row.get("peak_bytes"),
                    grown_bytes=row["peak_bytes"] - row["idle_bytes"] if "peak_bytes" in row else None,
                )
            )
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


def scaling_table(rows: "Sequence[ScalingRow]") -> Table:
    """Return a table with a line for each simulated cluster."""
    columns = ("controllers", "steps", "step s", "busiest controller, of a core", "real s")
    shown = figures_table("simulated clusters, by devices", *columns)
    for row in rows:
        cells = [f"{row.step_s:,.1f}", f"{row.load:.3%}", f"{row.wall_s:.1f}"]
        shown.add_row(f"{row.devices:,}", str(row.controllers), str(row.steps), *cells)
    return shown


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
