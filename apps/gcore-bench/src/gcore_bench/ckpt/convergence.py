"""The part convergence: the same runs without checkpoints, with asynchronous and with synchronous ones, in pairs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from scipy.stats import t as student

from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.training_runs import Outcome, Saving, TrainingRuns
from gcore_bench.harness.report import Row, Session, figures_table, verdict

NONE = Saving(period=0)
"""The runs that all others are compared with."""
_CONFIDENCE = 0.95
_COLORS = ("#444444", "#1f5fa8", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e")

NOTES = [
    "Runs of gcore-llm train on its built-in task, all from the same warmed-up model; seed by seed every way to save "
    "in turn. Reward: mean over all steps, then over seeds, with the 95 % interval of Student's t. Largest difference: "
    "of the reward of any step to the run of the same seed without checkpoints. Same to the bit: every metric that no "
    "clock gives, and the exported weights.",
]
"""Lines without which the figures cannot be judged."""

Runs = Mapping[str, Sequence[Outcome]]
"""Runs of each way to save, by seed."""


class Band(NamedTuple):
    """Mean over seeds of each step, and half the width of its confidence interval; nan with a single seed."""

    mean: "np.ndarray[Any, Any]"
    half: "np.ndarray[Any, Any]"


def band(curves: Sequence[Sequence[float]]) -> Band:
    """Return the mean of curves, one a seed, with its 95 % interval by Student's t."""
    values = np.asarray(curves, dtype=float)
    count = len(values)
    if count < 2:
        return Band(values[0], np.full(values.shape[1], np.nan))
    quantile = float(student.ppf((1 + _CONFIDENCE) / 2, count - 1))
    return Band(values.mean(axis=0), quantile * values.std(axis=0, ddof=1) / np.sqrt(count))


def run(options: CkptOptions, runs: TrainingRuns, session: Session) -> None:
    """Make all runs, seed by seed, and report their curves and differences."""
    ways = [Saving(period=period, waits=waits) for waits in (False, True) for period in options.save_periods]
    found: dict[str, list[Outcome]] = {}
    loads: list[float] = []
    for seed in range(options.seeds):
        for saving in (NONE, *ways):
            loads.append(os.getloadavg()[0])
            outcome = runs.make(saving, seed)
            assert outcome is not None, "nothing kills it"
            found.setdefault(saving.name, []).append(outcome)
            session.say(
                f"convergence, seed {seed}: {saving.name}: reward {outcome.rewards[-1]:.3f}, "
                f"{outcome.step_s:.2f} s a step, load {loads[-1]:.1f}"
            )
    rows = compared(found)
    session.add(
        "convergence",
        tables=[table(rows, options, fmean(loads))],
        lines=aims(rows),
        rows=rows,
        curves={name: [outcome.rewards for outcome in outcomes] for name, outcomes in found.items()},
        loads=loads,
        aims=aims(rows),
    )
    if options.html is not None:
        write_page(options.html, found)


def compared(found: Runs) -> list[Row]:
    """Return a row for each way to save.

    ``reward`` and its ``half`` are the mean of all steps with its interval over seeds; ``difference`` is the largest of
    any step and seed to the run without checkpoints, and ``num_same`` how many runs are equal to that one, to the bit.
    """
    base, rows = found[NONE.name], list[Row]()
    for name, outcomes in found.items():
        whole = band([[fmean(outcome.rewards)] for outcome in outcomes])
        pairs = list(zip(outcomes, base, strict=True))
        gaps = [abs(a - b) for one, other in pairs for a, b in zip(one.rewards, other.rewards, strict=True)]
        rows.append(
            {
                "way": name,
                "reward": float(whole.mean[0]),
                "half": None if len(outcomes) < 2 else float(whole.half[0]),
                "difference": max(gaps),
                "num_same": sum(one.is_same(other) for one, other in pairs),
                "num_runs": len(outcomes),
                "stall_s": median(outcome.stall_s for outcome in outcomes),
                "step_s": median(outcome.step_s for outcome in outcomes),
            }
        )
    return rows


def table(rows: Sequence[Row], options: CkptOptions, load: float) -> Table:
    """Return a table with a line for each way to save."""
    columns = ("reward, 95 %", "largest difference", "same to the bit", "stall ms", "step s")
    shown = figures_table(f"checkpoints and convergence: {options.train_steps} steps of GRPO", *columns)
    for row in rows:
        reward = f"{row['reward']:.4f}" + ("" if row["half"] is None else f" +- {row['half']:.4f}")
        same = f"{row['num_same']} of {row['num_runs']}"
        shown.add_row(
            row["way"], reward, f"{row['difference']:g}", same, f"{1000 * row['stall_s']:.1f}", f"{row['step_s']:.3f}"
        )
    shown.caption = f"{options.seeds} seeds; medians of stalls and steps; load of the machine {load:.1f}"
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether runs with checkpoints are those without, to the bit."""
    others = [row for row in rows if row["way"] != NONE.name]
    same, count = (sum(row[name] for row in others) for name in ("num_same", "num_runs"))
    return [
        "aim: with checkpoints, every metric of every step and every bit of the policy are as without: "
        f"{same} of {count} runs ({verdict(same == count)})"
    ]


def write_page(path: Path, found: Runs) -> None:
    """Draw the reward of each step, mean and band over seeds, and its difference to the runs without checkpoints."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    base = [outcome.rewards for outcome in found[NONE.name]]
    titles = ("reward, mean over seeds with its 95 % band", "difference to the same seed without checkpoints")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    for color, (name, outcomes) in zip(_COLORS, found.items(), strict=False):
        curves = [outcome.rewards for outcome in outcomes]
        gaps = [np.subtract(curve, other).tolist() for curve, other in zip(curves, base, strict=True)]
        for column, lines in enumerate((curves, gaps), start=1):
            mean, half = band(lines)
            steps = list(range(1, len(mean) + 1))
            look = {"legendgroup": name, "line": {"color": color}}
            line = Scatter(x=steps, y=mean, name=name, mode="lines", showlegend=column == 1, **look)
            figure.add_trace(line, row=1, col=column)
            if not np.isnan(half).any():
                edge = {"x": steps + steps[::-1], "y": [*(mean + half), *(mean - half)[::-1]], "fill": "toself"}
                look = {"legendgroup": name, "line": {"width": 0}, "fillcolor": color, "opacity": 0.12}
                figure.add_trace(Scatter(**edge, **look, showlegend=False, hoverinfo="skip"), row=1, col=column)
    figure.update_xaxes(title_text="step")
    figure.update_layout(title_text="Checkpoints and convergence", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)
