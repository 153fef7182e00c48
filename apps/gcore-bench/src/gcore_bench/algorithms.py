"""`gcore-bench algorithms`: held-out accuracy over the steps of training, of several algorithms and seeds.

All runs train the demo task of `gcore-llm train` from one model, with the same rate, batches and updates.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gcore_bench.grpo import warm_up
from gcore_bench.harness.processes import Spec, run_processes, start_server, train_here
from gcore_bench.harness.report import (
    BenchOptions,
    BenchSession,
    Figures,
    OutputFile,
    Row,
    Turn,
    format_range,
)
from gcore_runs import Count, UserError, read_jsonl

AlgorithmName = Literal["grpo", "dapo", "gspo", "dppo_tv", "maxrl", "rloo"]

_ALL_GROUPS = "--algorithm.filter-groups=False"
_SEQUENCE_MEAN = "--actor.loss.loss-agg-mode=seq-mean-token-mean"
OPTIONS: dict[str, str] = {
    "grpo": f"{_ALL_GROUPS} --actor.loss.clip-ratio-high=0.2 {_SEQUENCE_MEAN}",
    "dapo": "--algorithm.filter-groups=True",
    "gspo": f"{_ALL_GROUPS} --actor.loss.loss-mode=gspo {_SEQUENCE_MEAN}",
    "dppo_tv": f"{_ALL_GROUPS} --actor.loss.loss-mode=dppo_tv --actor.loss.clip-ratio-high=0.2",
    "maxrl": f"{_ALL_GROUPS} --algorithm.adv-estimator=maxrl",
    "rloo": f"{_ALL_GROUPS} --algorithm.adv-estimator=rloo",
}
"""Options of `gcore-llm train` in which the algorithms differ."""
BASE = "grpo"
"""The algorithm that the plot shows next to each of the others."""
ACCURACIES = (0.8, 0.9)
"""Accuracies whose first step is reported."""

_TASK = (
    "--recipe=embedded --device=cpu --trainer.tensorboard=False --trainer.save-freq=100000 "
    "--trainer.log-samples=0"
)
# A step has four updates: with a single one most of the losses would be alike.
_TRAINING = "--actor.ppo-mini-batch-size=8 --actor.optim.lr=1e-4 --actor.optim.lr-warmup-steps=5"
_METRIC = "val/greedy/score/mean"
_NOTE = (
    "Share of held-out problems that are solved greedily: mean over the seeds, with its range. to: the first evaluated "
    "step with this accuracy; where not all seeds reach it, how many do."
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmsOptions(BenchOptions):
    """Train the demo task of `gcore-llm train` with several algorithms; finished runs are not made again."""

    algorithms: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
    """Algorithms in the order in which they run in every round."""
    rounds: Count = 3
    """Seeds; each round has a seed of its own."""
    steps: Count = 50
    """Steps of a run, each of 32 prompts with 8 responses."""
    test_freq: Count = 5
    """Steps between evaluations on held-out problems."""
    warmup_steps: Count = 500
    """Most updates of supervised fine-tuning before, which ends when two of five sampled answers are right."""
    work_dir: Path = Path("runs/bench-algorithms")
    """Folder of the model and the runs; those that are in it are used again."""
    plot: OutputFile = None
    """File to draw the curves in, such as curves.svg or curves.png."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "steps": 2,
        "test_freq": 1,
        "warmup_steps": 1,
    }

    @property
    def evaluated_steps(self) -> list[int]:
        """The steps after which a run is evaluated."""
        return [*range(0, self.steps, self.test_freq), self.steps]


def run(options: AlgorithmsOptions, session: BenchSession) -> None:
    """Make the runs that are not there yet; print and draw the figures of all."""
    model = options.work_dir.absolute() / f"{options.steps}-steps" / "model"
    if not model.is_dir():
        session.say("making the model")
        warm_up(model, [*_TASK.split(), f"--warmup.max-steps={options.warmup_steps}"])
    rounds = session.start_rounds("algorithms")
    curves: dict[str, list[Figures]] = defaultdict(list)
    for turn in rounds.turns(options.algorithms):
        name = f"{turn.contender}-{turn.round}"
        run = model.parent / "runs" / name
        if len(read_curve(run)) < len(options.evaluated_steps):
            _make_run(name, turn, model, options)
        curve = read_curve(run)
        curves[turn.contender].append(curve)
        turn.done(curve, f"{curve[str(options.steps)]:.3f} at the end")
    rows = {name: summarise_curves(curves[name]) for name in curves}
    columns = {f"step {step}": str(step) for step in options.evaluated_steps[::2]}
    columns |= {f"to {accuracy}": f"to_{accuracy}" for accuracy in ACCURACIES}
    title = "held-out accuracy"
    session.report(
        title,
        columns,
        rows,
        rounds.runs,
        lines=[_NOTE],
        statistic="means and ranges",
    )
    if options.plot is not None:
        draw(options.plot, curves)


def read_curve(run: Path) -> Figures:
    """Return the accuracies of a run by the steps after which it was evaluated."""
    curve: Figures = {}
    with suppress(UserError):  # there is no such run
        for row in read_jsonl(run / "metrics.jsonl"):
            if _METRIC in row:
                curve[str(row["step"])] = row[_METRIC]
    return curve


def _make_run(name: str, turn: Turn, model: Path, options: AlgorithmsOptions) -> None:
    """Make a run from its first step on, in a forked process."""
    words = (
        f"{_TASK} {_TRAINING} {OPTIONS[turn.contender]} --seed={turn.round} --data.shuffle-seed={turn.round} "
        f"--trainer.total-training-steps={options.steps} --trainer.test-freq={options.test_freq} --name={name}"
    )
    start_server(1, preload=("gcore_llm.training", "transformers.models.qwen3.modeling_qwen3"))
    spec = Spec(
        work="gcore_bench.algorithms:train_run",
        contender=name,
        folder=model.parent,
        options=[*words.split(), f"--runs-dir={model.parent / 'runs'}", f"--model={model}"],
    )
    run_processes([spec])


def train_run(spec: Spec) -> Figures:
    """Run `gcore-llm train` in this process; its figures are in the run's folder."""
    train_here(spec.options)
    return {}


def summarise_curves(curves: Sequence[Figures]) -> Row:
    """Return the accuracy after each evaluated step and the steps to `ACCURACIES`, as means and ranges over seeds."""
    row: Row = {}
    for step in curves[0]:
        row[step] = format_range([curve[step] for curve in curves], ".2f")
    for accuracy in ACCURACIES:
        first_steps: list[int] = []
        for curve in curves:
            steps = [int(step) for step, value in curve.items() if value >= accuracy]
            first_steps += steps[:1]
        row[f"to_{accuracy}"] = f"{len(first_steps)} of {len(curves)} seeds"
        if len(first_steps) == len(curves):
            row[f"to_{accuracy}"] = format_range(first_steps, ".0f")
    return row


def draw(file: Path, curves: Mapping[str, Sequence[Figures]]) -> None:
    """Draw a chart for each algorithm, next to the base in grey: means over the seeds, and their ranges as bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    charts = figure.subplots(
        2,
        3,
        sharex=True,
        sharey=True,
    )
    for chart, name in zip(charts.flat, curves, strict=False):
        for algorithm, color in {BASE: "gray", name: "tab:blue"}.items():
            if algorithm in curves:
                table = np.array([list(curve.values()) for curve in curves[algorithm]])
                steps = [int(step) for step in curves[algorithm][0]]
                chart.plot(
                    steps,
                    table.mean(0),
                    color=color,
                    label=algorithm,
                )
                chart.fill_between(
                    steps,
                    table.min(0),
                    table.max(0),
                    color=color,
                    alpha=0.2,
                )
        chart.legend(loc="lower right")
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy, greedy")
    figure.savefig(file)
