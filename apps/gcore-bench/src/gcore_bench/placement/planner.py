"""The part planner: small runs on this machine, laws fitted to some of them, and predictions of the others."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import Rounds, Row, verdict_on_all
from gcore_bench.placement.fitting import Constants, fit_constants
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.small_runs import SmallRun, make_small_runs
from gcore_bench.placement.tables import FigureTable
from gcore_placement import Cluster, Device, Efficiency, JobCosts, TrainingLayout, predict_step
from gcore_placement.planning.layouts import TrainingLayouts
from gcore_placement.planning.memory import total, training_memory
from gcore_placement.planning.options import EngineRoofline, training_laws

CPU = Device(
    name="CPU",
    memory_bytes=64e9,
    flops_per_s=1e12,
    memory_bytes_per_s=1e11,
    link_bytes_per_s=1e11,
    host_bytes_per_s=1e11,
)
"""Round numbers above what a core reaches: the fitted constants are shares of them."""

STEPS = 3
"""Steps of each run in a round."""
AIM_SECONDS = 0.20
AIM_BYTES = 0.15
"""Largest errors of predicted seconds and peak memory, as shares of the measurements."""

COLUMNS = {
    "": "{name}",
    "held out": "{held_out}",
    "measured s": "{measured_s:.3f}",
    "predicted s": "{predicted_s:.3f} ({error_s:+.0%})",
    "measured MB": "{measured_mb:,.0f}",
    "predicted MB": "{predicted_mb:,.0f} ({error_mb:+.0%})",
}

_ENGINE = ["decode", "prefill", "memory", "decode_step_s", "decode_sequence_s"]
_UPPER_BOUNDS: Constants = dict.fromkeys(
    ("training", "attention", "decode", "prefill", "memory", "links"), 1.0
)
"""These constants are shares of the device's rates."""

Law: TypeAlias = Callable[[SmallRun, Efficiency], float]
Figures: TypeAlias = Mapping[str, float]
"""Measured numbers by name."""
Laws: TypeAlias = dict[int, Efficiency]
"""Efficiencies by the number of training ranks."""


def run(options: PlacementOptions, say: Callable[[str], object]) -> list[FigureTable]:
    """Measure each run in every round, fit the laws to some, and predict all; seconds are medians of the rounds."""
    runs = {run.name: run for run in make_small_runs(seed=options.seed, quick=options.quick)}
    rounds = Rounds("planner", options.rounds, say=say)
    start_server(1)
    for turn in rounds.turns(runs):
        figures = _measure(runs[turn.contender], times=1 if options.quick else STEPS)
        turn.done({turn.contender: figures}, f"{figures['step_s']:.3f} s")
    measured = rounds.summarise()
    laws = fit_laws([run for run in runs.values() if not run.is_held_out], measured)
    for ranks, law in laws.items():
        say(f"planner: constants with {ranks} training ranks: {law}")
    rows: list[Row] = []
    for run in runs.values():
        row = compare_run(run, laws, measured[run.name])
        rows.append(row)
    return [
        FigureTable(
            title="small runs, predicted", columns=COLUMNS, rows=rows, aims=check_aims(rows)
        )
    ]


def _measure(run: SmallRun, *, times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        spec = Spec(
            work="gcore_bench.placement.small_run_work",
            contender=run.stage,
            folder=folder,
            options={"run": run, "steps": times},
            world_size=run.ranks,
        )
        return run_processes(spec.of_ranks())[run.stage]


def compare_run(run: SmallRun, laws: Laws, figures: Figures) -> Row:
    """Return the row of a run: what was measured, and what is predicted."""
    law = laws.get(run.ranks, laws[1])
    seconds = predict_seconds(run, law)
    row: Row = {
        "name": run.name,
        "stage": run.stage,
        "held_out": "yes" if run.is_held_out else "",
        "measured_s": figures["step_s"],
        "predicted_s": seconds,
        "error_s": seconds / figures["step_s"] - 1,
    }
    if run.stage == "training":
        peak = predict_bytes(run, law)
        row["measured_mb"] = figures["process_bytes"] / 1e6
        row["predicted_mb"] = peak / 1e6
        row["error_mb"] = peak / figures["process_bytes"] - 1
    return row


def predict_seconds(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the seconds of the stages that the run has, by `predict_step`."""
    job = run.job
    cluster = Cluster(num_devices=run.ranks, device=CPU)
    num_seqs = min(run.max_num_seqs, job.train_batch_size * job.n)
    roofline = EngineRoofline(
        model=job.policy, cluster=cluster, tp=1, compute_bytes=4, efficiency=efficiency
    )
    engine = roofline.laws(np.array([float(num_seqs)])).costs(0)
    training = training_laws(job, _make_layouts(run), cluster=cluster, efficiency=efficiency)
    costs = JobCosts(
        policy=engine, reward=None, training=training.costs(0, sync_s=0.0, moving_s=0.0)
    )
    step = predict_step(
        costs,
        job,
        strategy="colocated",
        num_devices=run.ranks,
        policy_devices=run.ranks,
        reward_devices=0,
    )
    if run.stage == "training":
        return step.training_s
    if run.stage == "generation":
        return step.generation_s
    return step.total_s


def predict_bytes(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the peak bytes of a training process."""
    memory = training_memory(run.job, _make_layouts(run), activations=efficiency.activations)
    return float(total(memory)[0])


def _make_layouts(run: SmallRun) -> TrainingLayouts:
    layout = TrainingLayout(
        backend="torch",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=run.ranks,
        gradient_checkpointing=run.gradient_checkpointing,
        ppo_max_token_len=run.max_tokens,
    )
    return TrainingLayouts(layout)


def fit_laws(runs: Sequence[SmallRun], measured: Mapping[str, Figures]) -> Laws:
    """Fit `Efficiency`, as docs/how-to/plan-a-run.md describes, and return it by the number of training ranks.

    Generation gives the engine's constants and the memory's rate, the peaks of all training runs give the activations,
    and training in one process its rates; the runs of two ranks have rates of their own.
    """
    generation: list[SmallRun] = []
    training: list[SmallRun] = []
    by_ranks: dict[int, list[SmallRun]] = {}
    for run in runs:
        if run.stage == "generation":
            generation.append(run)
        elif run.stage == "training":
            training.append(run)
            by_ranks.setdefault(run.ranks, []).append(run)
    seconds = {name: figures["step_s"] for name, figures in measured.items()}
    peaks = {run.name: measured[run.name]["process_bytes"] for run in training}
    alone = _fit(generation, _ENGINE, Efficiency(overlap=0.0), predict_seconds, seconds)
    alone = _fit(training, ["activations"], alone, predict_bytes, peaks)
    alone = _fit(
        by_ranks.pop(1), ["training", "micro_batch_s", "attention"], alone, predict_seconds, seconds
    )
    laws = {1: alone}
    for ranks, several in sorted(by_ranks.items()):
        laws[ranks] = _fit(
            several, ["training", "micro_batch_s", "links"], alone, predict_seconds, seconds
        )
    return laws


def _fit(
    runs: Sequence[SmallRun], names: Sequence[str], start: Efficiency, law: Law, measured: Figures
) -> Efficiency:
    """Return the efficiency with these constants fitted to the measurements."""
    expected = np.array([measured[run.name] for run in runs])

    def compute_residuals(constants: Constants) -> NDArray[np.float64]:
        efficiency = replace(start, **constants)
        predicted = [law(run, efficiency) for run in runs]
        return np.log(predicted / expected)

    first: Constants = {name: float(getattr(start, name)) for name in names}
    return replace(start, **fit_constants(first, compute_residuals, _UPPER_BOUNDS))


def check_aims(rows: Sequence[Row]) -> list[str]:
    """Compare the errors of the held-out runs with the aims."""
    held_out = [row for row in rows if row["held_out"]]
    return [
        _check_aim("step time", held_out, "error_s", AIM_SECONDS),
        _check_aim("peak memory", held_out, "error_mb", AIM_BYTES),
    ]


def _check_aim(what: str, rows: Sequence[Row], metric: str, aim: float) -> str:
    errors: list[float] = []
    worse: list[str] = []
    for row in rows:
        if metric in row:
            error = row[metric]
            errors.append(error)
            if abs(error) > aim:
                worse.append(f"{row['name']} {error:+.1%}")
    span = f"{min(errors):+.1%} to {max(errors):+.1%}"
    return (
        f"aim: predicted {what} of held-out runs within {aim:.0%}: {span} ({verdict_on_all(worse)})"
    )
