"""The part recovery: runs that are killed at random moments and resumed, and what each failure takes."""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.table import Table

from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.training_runs import Outcome, Saving, TrainingRuns
from gcore_bench.harness.report import Row, Session, figure, figures_table, verdict

NOTES = [
    "Runs with asynchronous checkpoints whose process gets SIGKILL after a random, exponential number of steps and "
    "part of one, and which the same command resumes, against the same runs without failures. Work lost: between the "
    "checkpoint that is resumed from and the failure; formula: its mean, M - P / (exp(P / M) - 1) of period P and "
    "mean M. Restart: from the failure until training continues, in a process forked from one that has imported torch. "
    "All work: over that without failures; formula: Daly's, M / P (exp(P / M) - 1), without the stall of a checkpoint. "
    "Young's and Daly's periods are those of least loss, for measured stalls.",
]
"""Lines without which the figures cannot be judged."""

_COLORS = ("#d95f02", "#1f5fa8", "#1b9e77", "#7570b3", "#e7298a")


def young_s(cost_s: float, mean_s: float) -> float:
    """Return the period of least loss to first order: sqrt(2 C M) (Young, 1974).

    Args:
        cost_s: C, by which a checkpoint delays training.
        mean_s: M, the mean time between failures.
    """
    return math.sqrt(2 * cost_s * mean_s)


def daly_s(cost_s: float, mean_s: float) -> float:
    """Return the period of least loss to higher order (Daly, 2006, equation 37), without the checkpoint's own time."""
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = cost_s / (2 * mean_s)
    return young_s(cost_s, mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_of(period: float, mean: float) -> float:
    """Return the mean work that a failure undoes: its time after a checkpoint, if it comes before the next one.

    Failures are exponential with this mean; all are of one unit, such as steps.
    """
    return mean - period / math.expm1(period / mean)


def stretch_of(period: float, mean: float, cost: float = 0.0) -> float:
    """Return the time that work takes with failures and checkpoints, over that without, restarts not counted.

    Daly's model with exponential failures: a period of work and its checkpoint are repeated until none hits them.
    """
    return mean / period * math.expm1((period + cost) / mean)


def run(options: CkptOptions, runs: TrainingRuns, session: Session) -> None:
    """Make the runs without failures, then those with failures of each frequency, and report what these took."""
    rows: list[Row] = []
    waiting = runs.make(Saving(period=1, waits=True), 0)
    assert waiting is not None, "nothing kills it"
    for seed in range(options.seeds):
        for period in options.save_periods:
            saving, base = Saving(period=period), runs.make(Saving(period=period), seed)
            assert base is not None, "nothing kills it"
            for mean in options.failure_steps:
                load, rng = os.getloadavg()[0], np.random.default_rng((seed, round(1000 * mean)))
                kills = rng.exponential(mean, options.most_failures)
                outcome = runs.make(saving, seed, kills=kills.tolist())
                row = {"mean": mean, "period": period, "seed": seed, "load": load, "wait_s": waiting.stall_s}
                rows.append(row | figures_of(outcome, base))
                words = f"{rows[-1]['num_failures']} failures, load {load:.1f}" if outcome else "not finished"
                session.say(f"recovery, seed {seed}: a failure in {mean:g} steps, saved every {period}: {words}")
    found = by_condition(rows)
    tables = [failures_table(found, options), optima_table(found)]
    session.add("recovery", tables=tables, lines=aims(rows), rows=rows, conditions=found, aims=aims(rows))
    if options.html is not None:
        write_page(options.html, found)


def figures_of(outcome: Outcome | None, base: Outcome) -> Row:
    """Return the failures of a run and what was lost in each; ``base`` is the same run without any.

    ``lost`` is the work between the checkpoint that was resumed from and the failure, in steps, of which ``repeated``
    were complete, and ``lost_s`` its seconds; ``stretch`` is all work over that without failures.
    """
    row: Row = {"step_s": base.step_s, "stall_s": base.stall_s, "is_same": None, "num_failures": None}
    if outcome is None:
        return row
    lost, lost_s, repeated, restarts = list[float](), list[float](), list[int](), list[float]()
    for killed, following in pairwise(outcome.attempts):
        if following.training_s is None:
            # All was done, and exported, before the failure.
            continue
        lost.append(killed.first_step + killed.work - following.first_step)
        lost_s.append(killed.ended_s - killed.end_of(following.first_step))
        repeated.append(killed.first_step + len(killed.steps_s) - following.first_step)
        restarts.append(following.training_s - killed.ended_s)
    return row | {
        "is_same": outcome.is_same(base),
        "num_failures": len(lost),
        "lost": lost,
        "lost_s": lost_s,
        "repeated": repeated,
        "restart_s": restarts,
        "stretch": outcome.work / base.work,
    }


def by_condition(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each frequency and period: all failures of all seeds together, next to the formulas."""
    found: list[Row] = []
    for mean, period in dict.fromkeys((row["mean"], row["period"]) for row in rows):
        own = [row for row in rows if (row["mean"], row["period"]) == (mean, period)]
        ended = [row for row in own if row["num_failures"] is not None]
        names = ("lost", "lost_s", "repeated", "restart_s")
        lost, lost_s, repeated, restarts = ([value for row in ended for value in row[name]] for name in names)
        step_s, stall_s, wait_s = (fmean(row[name] for row in own) for name in ("step_s", "stall_s", "wait_s"))
        found.append(
            {
                "mean": mean,
                "period": period,
                "num_runs": len(own),
                "num_ended": len(ended),
                "num_same": sum(row["is_same"] for row in ended),
                "num_failures": len(lost),
                "repeated": fmean(repeated) if repeated else None,
                "lost": fmean(lost) if lost else None,
                "predicted_lost": lost_of(period, mean),
                "lost_s": fmean(lost_s) if lost_s else None,
                "restart_s": fmean(restarts) if restarts else None,
                "stretch": fmean(row["stretch"] for row in ended) if ended else None,
                "predicted_stretch": stretch_of(period, mean),
                "step_s": step_s,
                "stall_s": stall_s,
                "wait_s": wait_s,
                "load": fmean(row["load"] for row in own),
            }
        )
    return found


def failures_table(rows: Sequence[Row], options: CkptOptions) -> Table:
    """Return a table with a line for each mean number of steps between failures, and each period."""
    columns = {
        "saved every": figure("period"),
        "failures": figure("num_failures"),
        "same to the bit": lambda row: f"{row['num_same']} of {row['num_runs']}",
        "steps repeated": figure("repeated", ".2f"),
        "work lost, steps": figure("lost", ".2f"),
        "formula": figure("predicted_lost", ".2f"),
        "work lost s": figure("lost_s", ".2f"),
        "restart s": figure("restart_s", ".2f"),
        "all work, times": figure("stretch", ".2f"),
        "of formula": figure("predicted_stretch", ".2f"),
    }
    shown = figures_table(f"a failure, on average; runs of {options.train_steps} steps", *columns)
    for row in rows:
        shown.add_row(f"one in {row['mean']:g} steps", *(cell(row) for cell in columns.values()))
    loads = fmean(row["load"] for row in rows)
    shown.caption = f"{options.seeds} seeds; means over all failures; load of the machine {loads:.1f}"
    return shown


def optima_table(rows: Sequence[Row]) -> Table:
    """Return a table of the periods at which least is lost by the formulas, for the measured stalls."""
    columns = ("asynchronous: stall ms", "Young, steps", "Daly, steps", "synchronous: stall ms", "Young", "Daly")
    shown = figures_table("steps between checkpoints at which least is lost", *columns)
    for mean in dict.fromkeys(row["mean"] for row in rows):
        own = [row for row in rows if row["mean"] == mean]
        step_s, cells = fmean(row["step_s"] for row in own), list[str]()
        for cost in ("stall_s", "wait_s"):
            cost_s = fmean(row[cost] for row in own)
            periods = (optimum(cost_s, mean * step_s) / step_s for optimum in (young_s, daly_s))
            cells += [f"{1000 * cost_s:.1f}", *(f"{period:.2f}" for period in periods)]
        shown.add_row(f"one failure in {mean:g} steps", *cells)
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether runs that failed are those that did not."""
    ended = [row for row in rows if row["num_failures"] is not None]
    same, failures = sum(row["is_same"] for row in ended), sum(row["num_failures"] for row in ended)
    lines = [
        "aim: runs that were killed end with every metric and every bit of the policy of those that were not: "
        f"{same} of {len(ended)}, with {failures} failures ({verdict(same == len(ended))})"
    ]
    if len(ended) < len(rows):
        lines.append(f"{len(rows) - len(ended)} runs were given up, because they had not ended after so many failures")
    return lines


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Draw the work that a failure undoes over the period, as measured and by the formula."""
    from plotly.graph_objects import Figure, Scatter

    drawn = Figure()
    longest = max(row["period"] for row in rows)
    for color, mean in zip(_COLORS, dict.fromkeys(row["mean"] for row in rows), strict=False):
        own: list[Mapping[str, float]] = [row for row in rows if row["mean"] == mean and row["lost"] is not None]
        periods = np.linspace(0.05, longest * 1.25, 80).tolist()
        look = {"line": {"color": color}, "marker": {"color": color, "size": 10}}
        label = f"one failure in {mean:g} steps"
        formula = [lost_of(period, mean) for period in periods]
        drawn.add_trace(Scatter(x=periods, y=formula, name=f"{label}, formula", mode="lines", **look))
        points = {"x": [row["period"] for row in own], "y": [row["lost"] for row in own]}
        drawn.add_trace(Scatter(**points, name=f"{label}, measured", mode="markers", **look))
    drawn.update_xaxes(title_text="steps between checkpoints")
    drawn.update_yaxes(title_text="work lost a failure, in steps", rangemode="tozero")
    drawn.update_layout(title_text="Recovery after failures", template="plotly_white")
    drawn.write_html(path, include_plotlyjs=True)
