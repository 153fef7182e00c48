"""The part planner: small runs on this machine, laws fitted to some of them, and predictions of the others."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import least_squares

from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_bench.harness.report import Rounds, Row, figures_table, summarise
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.small_runs import SmallRun, small_runs
from gcore_placement import Cluster, Device, Efficiency, JobCosts, TrainingLayout, predict_step
from gcore_placement.planning.layouts import TrainingLayouts, total, training_memory
from gcore_placement.planning.options import EngineRoofline, training_laws

_RATES = dict.fromkeys(("memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"), 1e11)
CPU = Device(name="CPU", memory_bytes=64e9, flops_per_s=1e12, **_RATES)
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


def fit_laws(runs: Sequence[SmallRun], measured: Mapping[str, Mapping[str, float]]) -> dict[int, Efficiency]:
    """Fit `Efficiency`, as docs/how-to/plan-a-run.md says, to ``step_s`` and, of runs that train, to ``process_bytes``.

    Engines give the memory's rate, which predicts training's update, and training alone gives attention's; each
    number of training ranks is fitted by itself; activations are fitted to the peaks of all.

    Returns:
        The efficiencies of the devices, by the number of training ranks.
    """
    training = [run for run in runs if run.kind == "training"]

    def fit(chosen: Sequence[SmallRun], names: Sequence[str], start: Efficiency, metric: str = "step_s") -> Efficiency:
        """Fit fields above 0, so that the logarithms of law and measurement differ least."""
        law = {"step_s": predicted_seconds, "process_bytes": predicted_bytes}[metric]
        expected = np.array([measured[run.name][metric] for run in chosen])

        def applied(logs: NDArray[np.float64]) -> Efficiency:
            return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

        def misses(logs: NDArray[np.float64]) -> NDArray[np.float64]:
            efficiency = applied(logs)
            return np.log([law(run, efficiency) for run in chosen] / expected)

        logs = np.log([float(getattr(start, name)) for name in names])
        most = [0.0 if name in _SHARES else np.inf for name in names]
        return applied(least_squares(misses, logs, bounds=(-np.inf, most)).x)

    alone = fit([run for run in runs if run.kind == "generation"], _ENGINE, Efficiency(overlap=0.0))
    alone = fit(training, ["activations"], alone, "process_bytes")
    by_ranks = {count: [run for run in training if run.ranks == count] for count in {run.ranks for run in training}}
    alone = fit(by_ranks.pop(1), (*_TRAINING, "attention"), alone)
    return {1: alone, **{count: fit(own, (*_TRAINING, "links"), alone) for count, own in sorted(by_ranks.items())}}


def _layouts(run: SmallRun) -> TrainingLayouts:
    sizes = dict.fromkeys((f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")), 1)
    layout = TrainingLayout(
        backend="torch",
        **sizes,
        data_parallel_size=run.ranks,
        gradient_checkpointing=run.gradient_checkpointing,
        ppo_max_token_len=run.max_tokens,
    )
    return TrainingLayouts.of(layout)


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Measure each run in every round, fit the laws to some, and predict all.

    Returns:
        ``rows``, one a run, with the medians of its rounds: bytes are those of a training process, None elsewhere;
        ``efficiencies`` by the number of training ranks; ``load``, the highest of the machine before a run.
    """
    runs = {run.name: run for run in small_runs(seed=options.seed, quick=options.quick)}
    rounds = Rounds("planner", options.rounds, say=say)
    start_server(1)
    for turn in rounds.turns(runs):
        figures = _measured(runs[turn.contender], options)
        turn.done({turn.contender: figures}, f"{figures['step_s']:.3f} s")
    measured = summarise("planner", rounds.runs).rows
    laws = fit_laws([run for run in runs.values() if not run.is_held_out], measured)
    rows: list[Row] = []
    for name, run in runs.items():
        law, found = laws.get(run.ranks, laws[1]), measured[name]
        row: Row = {"name": name, "kind": run.kind, "is_held_out": run.is_held_out, "measured_s": found["step_s"]}
        row |= {"rounds_s": [one.rows[name]["step_s"] for one in rounds.runs if one.contender == name]}
        row |= {"predicted_s": predicted_seconds(run, law), "measured_bytes": found.get("process_bytes")}
        rows.append(row | {"predicted_bytes": predicted_bytes(run, law) if run.kind == "training" else None})
    efficiencies = {str(count): asdict(efficiency) for count, efficiency in laws.items()}
    return {"rows": rows, "efficiencies": efficiencies, "load": max(run.load for run in rounds.runs)}


def _measured(run: SmallRun, options: PlacementOptions) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="gcore-bench-") as folder:
        work, given = "gcore_bench.placement.small_run_work", {"run": run, "steps": options.steps}
        spec = Spec(work=work, contender=run.kind, folder=folder, options=given, world_size=run.ranks)
        return run_processes(spec.of_ranks())[run.kind]


def _off(row: Row, unit: str) -> float | None:
    """Return predicted over measured, less 1; None where nothing is predicted."""
    measured, predicted = row[f"measured_{unit}"], row[f"predicted_{unit}"]
    return None if measured is None or predicted is None else predicted / measured - 1


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each run, those that the laws are fitted to first."""
    columns = ("", "measured s", "predicted s", "off", "measured MB", "predicted MB", "off")
    shown = figures_table("small runs, and the predictions of the planner", *columns)
    for row in figures["rows"]:
        cells = ["held out" if row["is_held_out"] else "fitted to"]
        for unit, scale, form in (("s", 1.0, ".3f"), ("bytes", 1e6, ",.0f")):
            if (off := _off(row, unit)) is not None:
                values = (row[f"{kind}_{unit}"] / scale for kind in ("measured", "predicted"))
                cells += [*(format(value, form) for value in values), f"{off:+.0%}"]
        shown.add_row(row["name"], *cells)
    shown.caption = f"seconds: the median of the rounds; load of the machine up to {figures['load']:.1f}"
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether gcore's aims are met by the held-out runs."""
    lines: list[str] = []
    for what, unit, aim in (("step time", "s", AIM_SECONDS), ("peak memory", "bytes", AIM_BYTES)):
        off = {row["name"]: _off(row, unit) for row in rows if row["is_held_out"]}
        found = {name: value for name, value in off.items() if value is not None}
        worse = [f"{name} {value:+.1%}" for name, value in found.items() if not abs(value) <= aim]
        verdict = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(found)}"
        span = f"{min(found.values()):+.1%} to {max(found.values()):+.1%}"
        lines.append(f"aim: predicted {what} of held-out runs within {aim:.0%}: {span} ({verdict})")
    return lines
