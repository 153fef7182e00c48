"""The part planner: rounds of small runs on this machine, fitted and held out in turn, and their predictions."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

from rich.table import Table

from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import figures_table
from gcore_bench.placement.laws import fit_laws
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.small_runs import Kind, SmallRun, small_runs

AIM_SECONDS, AIM_BYTES = 0.20, 0.15
"""Largest errors of predicted seconds and peak memory, as shares of the measurements."""


@dataclass(frozen=True, kw_only=True)
class PlannerRow:
    """One run: the median of its rounds. Bytes are those of a training process, None elsewhere."""

    name: str
    kind: Kind
    is_held_out: bool
    measured_s: float
    rounds_s: list[float]
    predicted_s: float
    measured_bytes: float | None
    predicted_bytes: float | None

    @property
    def seconds_off(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_off(self) -> float | None:
        """The same of the peak."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, kw_only=True)
class PlannerFigures:
    """All runs, and the laws that predicted them."""

    rows: list[PlannerRow]
    efficiencies: dict[str, dict[str, float]]
    """Efficiencies by the number of training ranks."""
    load: float
    """Runnable processes on the machine, the most at the start of a round."""


def run_planner(options: PlacementOptions, *, say: Callable[[str], object]) -> PlannerFigures:
    """Measure each run ``options.rounds`` times in turn, fit the laws to some, and predict all.

    Raises:
        BenchError: a process failed.
    """
    runs = small_runs(seed=options.seed, quick=options.quick)
    found: dict[str, list[dict[str, float]]] = {run.name: [] for run in runs}
    load = 0.0
    start_server(1)
    for number in range(1, options.rounds + 1):
        load = max(load, os.getloadavg()[0])
        for run in runs:
            found[run.name].append(_measured(run, options))
            say(f"planner, round {number} of {options.rounds}: {run.name} {found[run.name][-1]['step_s']:.3f} s")
    seconds = {name: median(figures["step_s"] for figures in rounds) for name, rounds in found.items()}
    peaks = {
        run.name: median(figures["peak_bytes"] for figures in found[run.name]) if run.kind == "training" else None
        for run in runs
    }
    fitted = [run for run in runs if not run.is_held_out]
    laws = fit_laws(fitted, [seconds[run.name] for run in fitted], [peaks[run.name] for run in fitted])
    rows = [
        PlannerRow(
            name=run.name,
            kind=run.kind,
            is_held_out=run.is_held_out,
            measured_s=seconds[run.name],
            rounds_s=[figures["step_s"] for figures in found[run.name]],
            predicted_s=laws.seconds(run),
            measured_bytes=peaks[run.name],
            predicted_bytes=laws.peak_bytes(run),
        )
        for run in runs
    ]
    efficiencies = {str(count): asdict(efficiency) for count, efficiency in laws.ranks.items()}
    return PlannerFigures(rows=rows, efficiencies=efficiencies, load=load)


def _measured(run: SmallRun, options: PlacementOptions) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        specs = [
            Spec(
                work="gcore_bench.placement.small_run_work",
                contender=run.kind,
                folder=folder,
                options={"threads": 1, "run": run, "steps": options.steps},
                rank=rank,
                world_size=run.ranks,
            )
            for rank in range(run.ranks)
        ]
        return run_processes(specs)[run.kind]


def planner_table(figures: PlannerFigures) -> Table:
    """A line for each run, those that the laws are fitted to first."""
    columns = ("", "measured s", "predicted s", "off", "measured MB", "predicted MB", "off")
    shown = figures_table("small runs, and the predictions of the planner", *columns)
    for row in figures.rows:
        seconds = (f"{row.measured_s:.3f}", f"{row.predicted_s:.3f}", f"{row.seconds_off:+.0%}")
        memory = ("", "", "")
        if row.measured_bytes is not None and row.predicted_bytes is not None:
            memory = (f"{row.measured_bytes / 1e6:,.0f}", f"{row.predicted_bytes / 1e6:,.0f}", f"{row.bytes_off:+.0%}")
        shown.add_row(row.name, "held out" if row.is_held_out else "fitted to", *seconds, *memory)
    shown.caption = f"seconds: the median of the rounds; load of the machine up to {figures.load:.1f}"
    return shown


def planner_aims(figures: PlannerFigures) -> list[str]:
    """Return whether gcore's aims are met by the held-out runs."""
    held_out = [row for row in figures.rows if row.is_held_out]
    return [
        _within("step time", AIM_SECONDS, {row.name: row.seconds_off for row in held_out}),
        _within("peak memory", AIM_BYTES, {row.name: row.bytes_off for row in held_out if row.bytes_off is not None}),
    ]


def _within(what: str, aim: float, off: Mapping[str, float]) -> str:
    worse = [f"{name} {value:+.1%}" for name, value in off.items() if not abs(value) <= aim]
    verdict = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(off)}"
    span = f"{min(off.values()):+.1%} to {max(off.values()):+.1%}"
    return f"aim: predicted {what} of held-out runs within {aim:.0%}: {span} ({verdict})"
