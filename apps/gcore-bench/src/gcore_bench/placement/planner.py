"""The part planner: small runs on this machine, laws fitted to some of them, and predictions of the others."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import least_squares

from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import figures_table
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.small_runs import Kind, SmallRun, small_runs
from gcore_placement import Cluster, Device, Efficiency, JobCosts, TrainingLayout, predict_step
from gcore_placement.planning.layouts import TrainingLayouts, total, training_memory
from gcore_placement.planning.options import EngineRoofline, training_laws

CPU = Device(
    name="CPU",
    memory_bytes=64e9,
    flops_per_s=1e12,
    memory_bytes_per_s=1e11,
    link_bytes_per_s=1e11,
    host_bytes_per_s=1e11,
)
"""Round numbers that no core of today reaches: what it does reach is fitted."""

AIM_SECONDS, AIM_BYTES = 0.20, 0.15
"""Largest errors of predicted seconds and peak memory, as shares of the measurements."""

_ENGINE = ("decode", "prefill", "memory", "decode_step_s", "decode_sequence_s")
_TRAINING = ("training", "micro_batch_s")
_SHARES = ("training", "attention", "decode", "prefill", "memory", "links")


def predicted_seconds(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the seconds of the stages that the run has, by `predict_step`."""
    job, cluster = run.job, Cluster(num_devices=run.ranks, device=CPU)
    num_seqs = min(run.max_num_seqs, job.train_batch_size * job.n)
    roofline = EngineRoofline(model=job.policy, cluster=cluster, tp=1, compute_bytes=4, efficiency=efficiency)
    laws = training_laws(job, _layouts(run), cluster=cluster, efficiency=efficiency)
    policy = roofline.laws(np.array([float(num_seqs)])).costs(0)
    costs = JobCosts(policy=policy, reward=None, training=laws.costs(0, sync_s=0.0, moving_s=0.0))
    devices = {"num_devices": run.ranks, "policy_devices": run.ranks, "reward_devices": 0}
    step = predict_step(costs, job, strategy="colocated", **devices)
    return {"training": step.training_s, "generation": step.generation_s, "step": step.total_s}[run.kind]


def predicted_bytes(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the peak bytes of a training process."""
    return float(total(training_memory(run.job, _layouts(run), activations=efficiency.activations))[0])


def fit_laws(
    runs: Sequence[SmallRun], seconds: Sequence[float], peak_bytes: Sequence[float | None]
) -> dict[int, Efficiency]:
    """Fit `Efficiency`, as gcore-placement's README says, to measured seconds, and to the peaks of those that train.

    Engines give the memory's rate, which predicts training's update, and training alone gives attention's; each
    number of training ranks is fitted by itself; activations are fitted to the peaks of all.

    Returns:
        The efficiencies of the devices, by the number of training ranks.
    """
    measured = dict(zip((run.name for run in runs), zip(seconds, peak_bytes, strict=True), strict=True))
    training = [run for run in runs if run.kind == "training"]

    def fit(
        chosen: Sequence[SmallRun], names: Sequence[str], start: Efficiency, *, to_bytes: bool = False
    ) -> Efficiency:
        """Fit fields above 0, so that the logarithms of law and measurement differ least."""
        law = predicted_bytes if to_bytes else predicted_seconds
        expected = np.array([measured[run.name][to_bytes] for run in chosen], dtype=np.float64)

        def applied(logs: NDArray[np.float64]) -> Efficiency:
            return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

        def misses(logs: NDArray[np.float64]) -> NDArray[np.float64]:
            efficiency = applied(logs)
            return np.log([law(run, efficiency) for run in chosen] / expected)

        logs = np.log([float(getattr(start, name)) for name in names])
        most = [0.0 if name in _SHARES else np.inf for name in names]
        return applied(least_squares(misses, logs, bounds=(-np.inf, most)).x)

    alone = fit([run for run in runs if run.kind == "generation"], _ENGINE, Efficiency(overlap=0.0))
    alone = fit(training, ["activations"], alone, to_bytes=True)
    alone = fit([run for run in training if run.ranks == 1], (*_TRAINING, "attention"), alone)
    counts = sorted({run.ranks for run in training} - {1})
    own = {count: [run for run in training if run.ranks == count] for count in counts}
    return {1: alone, **{count: fit(own[count], (*_TRAINING, "links"), alone) for count in counts}}


def _layouts(run: SmallRun) -> TrainingLayouts:
    return TrainingLayouts.of(
        TrainingLayout(
            backend="torch",
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            context_parallel_size=1,
            data_parallel_size=run.ranks,
            gradient_checkpointing=run.gradient_checkpointing,
            ppo_max_token_len=run.max_tokens,
        )
    )


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
    """Measure each run ``options.rounds`` times in turn, fit the laws to some, and predict all."""
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
    training = [run.name for run in runs if run.kind == "training"]
    peaks = {name: median(figures["peak_bytes"] for figures in found[name]) for name in training}
    fitted = [run for run in runs if not run.is_held_out]
    laws = fit_laws(fitted, [seconds[run.name] for run in fitted], [peaks.get(run.name) for run in fitted])
    rows: list[PlannerRow] = []
    for run in runs:
        law = laws.get(run.ranks, laws[1])
        row = PlannerRow(
            name=run.name,
            kind=run.kind,
            is_held_out=run.is_held_out,
            measured_s=seconds[run.name],
            rounds_s=[figures["step_s"] for figures in found[run.name]],
            predicted_s=predicted_seconds(run, law),
            measured_bytes=peaks.get(run.name),
            predicted_bytes=predicted_bytes(run, law) if run.kind == "training" else None,
        )
        rows.append(row)
    efficiencies = {str(count): asdict(efficiency) for count, efficiency in laws.items()}
    return PlannerFigures(rows=rows, efficiencies=efficiencies, load=load)


def _measured(run: SmallRun, options: PlacementOptions) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        first = Spec(
            work="gcore_bench.placement.small_run_work",
            contender=run.kind,
            folder=folder,
            options={"run": run, "steps": options.steps},
            world_size=run.ranks,
        )
        return run_processes([replace(first, rank=rank) for rank in range(run.ranks)])[run.kind]


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
