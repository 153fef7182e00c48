"""The part planner: small runs on this machine, laws fitted to some of them, and predictions of the others."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import BenchSession, Figures, Row, verdict_on_all
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

AIMS = (("step time", "error_s", 0.20), ("peak memory", "error_mb", 0.15))
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
    ["training", "attention", "decode", "prefill", "memory", "links"], 1.0
)
"""These constants are shares of the device's rates."""

Laws: TypeAlias = dict[int, Efficiency]
"""Efficiencies by the number of training ranks."""


def run(options: PlacementOptions, session: BenchSession) -> list[FigureTable]:
    """Measure each run in every round, fit the laws to some, and predict all; seconds are medians of the rounds."""
    runs = {run.name: run for run in make_small_runs(seed=options.seed, quick=options.quick)}
    rounds = session.start_rounds("planner")
    start_server(1)
    for turn in rounds.turns(runs):
        figures = _measure(runs[turn.contender], times=1 if options.quick else 3)
        turn.done(figures, "{step_s:.3f} s")
    measured = rounds.summarise()
    laws = fit_laws([run for run in runs.values() if not run.is_held_out], measured)
    for ranks, law in laws.items():
        session.say(f"planner: constants with {ranks} training ranks: {law}")
    rows = [compare_run(run, laws, measured[name]) for name, run in runs.items()]
    title = "small runs, predicted"
    return [
        FigureTable(
            title=title,
            columns=COLUMNS,
            rows=rows,
            aims=check_aims(rows),
        )
    ]


def _measure(run: SmallRun, *, times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        spec = Spec(
            work="gcore_bench.placement.small_run_work",
            contender=run.stage,
            folder=Path(folder),
            options=(run, times),
            world_size=run.ranks,
        )
        return run_processes(spec.of_ranks())


def compare_run(run: SmallRun, laws: Laws, figures: Figures) -> Row:
    """Return the row of a run: what was measured, and what is predicted."""
    law = laws.get(run.ranks, laws[1])
    row: Row = {
        "name": run.name,
        "stage": run.stage,
        "held_out": "yes" if run.is_held_out else "",
        "measured_s": figures["step_s"],
        "predicted_s": predict_seconds(run, law),
    }
    row["error_s"] = row["predicted_s"] / row["measured_s"] - 1
    if run.stage == "training":
        row["measured_mb"] = figures["process_bytes"] / 1e6
        row["predicted_mb"] = predict_bytes(run, law) / 1e6
        row["error_mb"] = row["predicted_mb"] / row["measured_mb"] - 1
    return row


def predict_seconds(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the seconds of the stages that the run has, by `predict_step`."""
    job = run.job
    cluster = Cluster(num_devices=run.ranks, device=CPU)
    num_seqs = float(min(run.max_num_seqs, job.train_batch_size * job.n))
    roofline = EngineRoofline(
        model=job.policy, cluster=cluster, tp=1, compute_bytes=4, efficiency=efficiency
    )
    engine = roofline.laws(np.array([num_seqs])).costs(0)
    training = training_laws(
        job,
        _make_layouts(run),
        cluster=cluster,
        efficiency=efficiency,
    )
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
    seconds = {"training": step.training_s, "generation": step.generation_s}
    return seconds.get(run.stage, step.total_s)


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


def fit_laws(runs: Sequence[SmallRun], measured: Mapping[str, Row]) -> Laws:
    """Fit `Efficiency`, as docs/how-to/plan-a-run.md describes, and return it by the number of training ranks.

    Generation gives the engine's constants and the memory's rate, the peaks of all training runs give the activations,
    and training in one process its rates; the runs of two ranks have rates of their own.
    """
    by_kind: dict[tuple[str, int], list[SmallRun]] = defaultdict(list)
    for run in runs:
        by_kind[run.stage, run.ranks].append(run)
    training = [run for run in runs if run.stage == "training"]
    fit = partial(_fit, measured=measured)
    alone = fit(by_kind["generation", 1], _ENGINE, Efficiency(overlap=0.0))
    alone = fit(
        training,
        ["activations"],
        alone,
        law=predict_bytes,
        metric="process_bytes",
    )
    alone_rates = ["training", "micro_batch_s", "attention"]
    laws = {1: fit(by_kind["training", 1], alone_rates, alone)}
    for ranks in set(map(attrgetter("ranks"), training)) - {1}:
        shared_rates = ["training", "micro_batch_s", "links"]
        laws[ranks] = fit(by_kind["training", ranks], shared_rates, laws[1])
    return laws


def _fit(
    runs: Sequence[SmallRun],
    names: Sequence[str],
    start: Efficiency,
    *,
    measured: Mapping[str, Row],
    law: Callable[[SmallRun, Efficiency], float] = predict_seconds,
    metric: str = "step_s",
) -> Efficiency:
    """Return the efficiency with these constants fitted to the measurements."""
    expected = np.array([measured[run.name][metric] for run in runs])

    def compute_residuals(constants: Constants) -> NDArray[np.float64]:
        efficiency = replace(start, **constants)
        return np.log([law(run, efficiency) for run in runs] / expected)

    first: Constants = {name: float(getattr(start, name)) for name in names}
    return replace(start, **fit_constants(first, compute_residuals, _UPPER_BOUNDS))


def check_aims(rows: Sequence[Row]) -> list[str]:
    """Compare the errors of the held-out runs with the aims."""
    held_out = [row for row in rows if row["held_out"]]
    lines: list[str] = []
    for quantity, metric, aim in AIMS:
        errors = {row["name"]: row[metric] for row in held_out if metric in row}
        worse = [f"{name} {error:+.1%}" for name, error in errors.items() if abs(error) > aim]
        span = f"{min(errors.values()):+.1%} to {max(errors.values()):+.1%}"
        lines.append(
            f"aim: predicted {quantity} of held-out runs within {aim:.0%}: {span} ({verdict_on_all(worse)})"
        )
    return lines
