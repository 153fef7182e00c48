"""The planner's laws for this machine, fitted to some runs to predict others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gcore_bench.placement.planner.runs import SmallRun
from gcore_placement import Cluster, Device, Efficiency, JobCosts, TrainingLayout, predict_step
from gcore_placement.planning.engines import EngineRoofline
from gcore_placement.planning.layouts import TrainingLayouts, total, training_memory
from gcore_placement.planning.training import training_laws

CPU = Device(
    name="CPU",
    memory_bytes=64e9,
    flops_per_s=1e12,
    memory_bytes_per_s=1e11,
    link_bytes_per_s=1e11,
    host_bytes_per_s=1e11,
)
"""Round numbers that no core of today reaches: what it does reach is fitted."""

_ENGINE = ("decode", "prefill", "memory", "decode_step_s", "decode_sequence_s")
_TRAINING = ("training", "micro_batch_s")
_ALONE = (*_TRAINING, "attention")
_RANKS = (*_TRAINING, "links")
_SHARES = ("training", "attention", "decode", "prefill", "memory", "links")
_ROUNDS = 200
_DIFFERENCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Efficiencies of the devices, by the number of training ranks."""

    alone: Efficiency
    ranks: Mapping[int, Efficiency]

    def efficiency(self, run: SmallRun) -> Efficiency:
        """Return the efficiency for the run's number of ranks."""
        return self.ranks.get(run.ranks, self.alone)

    def seconds(self, run: SmallRun) -> float:
        """Predict the seconds of a run."""
        return predicted_seconds(run, self.efficiency(run))

    def peak_bytes(self, run: SmallRun) -> float | None:
        """Predict the peak of a training process; None where none is measured alone."""
        return predicted_bytes(run, self.efficiency(run)) if run.kind == "training" else None


def predicted_seconds(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the seconds of the stages that the run has, by `predict_step`."""
    job, cluster = run.job, Cluster(num_devices=run.ranks, device=CPU)
    num_seqs = min(run.max_num_seqs, job.train_batch_size * job.n)
    roofline = EngineRoofline(model=job.policy, cluster=cluster, tp=1, compute_bytes=4, efficiency=efficiency)
    laws = training_laws(job, _layouts(run), cluster=cluster, efficiency=efficiency)
    costs = JobCosts(
        policy=roofline.laws(np.array([float(num_seqs)])).costs(0),
        reward=None,
        training=laws.costs(0, sync_s=0.0, moving_s=0.0),
    )
    step = predict_step(
        costs, job, strategy="colocated", num_devices=run.ranks, policy_devices=run.ranks, reward_devices=0
    )
    stages = {"training": step.training_s, "generation": step.generation_s, "step": step.total_s}
    return stages[run.kind]


def predicted_bytes(run: SmallRun, efficiency: Efficiency) -> float:
    """Predict the peak bytes of a training process."""
    return float(total(training_memory(run.job, _layouts(run), activations=efficiency.activations))[0])


def fit_laws(runs: Sequence[SmallRun], seconds: Sequence[float], peak_bytes: Sequence[float | None]) -> Laws:
    """Fit `Efficiency` as gcore-placement's README says.

    Engines give the memory's rate, which predicts training's update, and training alone gives attention's; each
    number of training ranks is fitted by itself; activations are fitted to the peaks of all.

    Args:
        seconds: of each run, measured.
        peak_bytes: of each run, of those that train.
    """
    measured = dict(zip((run.name for run in runs), zip(seconds, peak_bytes, strict=True), strict=True))

    def fit(chosen: Sequence[SmallRun], names: Sequence[str], start: Efficiency) -> Efficiency:
        expected = np.array([measured[run.name][0] for run in chosen])
        return _fitted(lambda e: np.array([predicted_seconds(run, e) for run in chosen]), expected, names, start)

    training = [run for run in runs if run.kind == "training"]
    alone = fit([run for run in runs if run.kind == "generation"], _ENGINE, Efficiency(overlap=0.0))
    peaks = np.array([measured[run.name][1] for run in training], dtype=np.float64)
    alone = _fitted(lambda e: np.array([predicted_bytes(run, e) for run in training]), peaks, ["activations"], alone)
    alone = fit([run for run in training if run.ranks == 1], _ALONE, alone)
    counts = sorted({run.ranks for run in training} - {1})
    ranks = {count: fit([run for run in training if run.ranks == count], _RANKS, alone) for count in counts}
    return Laws(alone=alone, ranks={1: alone, **ranks})


def _fitted(
    law: Callable[[Efficiency], NDArray[np.float64]],
    measured: NDArray[np.float64],
    names: Sequence[str],
    start: Efficiency,
) -> Efficiency:
    """Some fields so that the logarithms of law and measurement differ least, in squares (Levenberg-Marquardt).

    Args:
        law: [num_runs] of the fields.
        names: fields that are fitted, all above 0.
        start: the other fields, and where to begin.
    """

    def applied(logs: NDArray[np.float64]) -> Efficiency:
        return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def misses(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(law(applied(logs)) / measured)

    logs = np.log([float(getattr(start, name)) for name in names])
    most = np.array([0.0 if name in _SHARES else np.inf for name in names])
    damping, miss = 1e-2, misses(logs)
    for _ in range(_ROUNDS):
        slopes = np.stack([(miss - misses(logs + d)) / _DIFFERENCE for d in -_DIFFERENCE * np.eye(len(logs))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ miss)
        further = np.minimum(logs + step, most)
        tried = misses(further)
        if tried @ tried < miss @ miss:
            logs, miss, damping = further, tried, damping / 4
        else:
            damping *= 4
    return applied(logs)


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
