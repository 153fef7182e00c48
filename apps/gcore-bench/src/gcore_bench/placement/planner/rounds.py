"""Rounds of small runs, fitted and held out in turn, and their predictions."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from gcore_bench.harness.child import Spec
from gcore_bench.harness.forked import run_processes, start_server
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.planner.laws import Laws, fit_laws
from gcore_bench.placement.planner.runs import Kind, SmallRun, small_runs


@dataclass(frozen=True, kw_only=True)
class PlannerRow:
    """One run. Bytes are those of a training process, None elsewhere."""

    name: str
    kind: Kind
    is_held_out: bool
    measured_s: float
    """Median of the rounds."""
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
    return PlannerFigures(rows=rows, efficiencies=_plain(laws), load=load)


def _measured(run: SmallRun, options: PlacementOptions) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        specs = [
            Spec(
                work="gcore_bench.placement.planner.work",
                contender=run.kind,
                folder=str(Path(folder)),
                options={"threads": 1, "run": run, "steps": options.steps},
                rank=rank,
                world_size=run.ranks,
            )
            for rank in range(run.ranks)
        ]
        return run_processes(specs)[run.kind]


def _plain(laws: Laws) -> dict[str, dict[str, float]]:
    return {str(count): asdict(efficiency) for count, efficiency in laws.ranks.items()}
