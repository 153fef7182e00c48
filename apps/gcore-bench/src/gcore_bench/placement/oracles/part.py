"""The part oracles: published steps of other systems, predicted by laws of which few constants are fitted to some."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rich.table import Table

from gcore_bench.harness.report import Row, figures_table
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.oracles.nemo_rl import NEMO_RL
from gcore_bench.placement.oracles.prediction import Fit, fit_study, predicted
from gcore_bench.placement.oracles.statements import statement_rows
from gcore_bench.placement.oracles.verl import VERL
from gcore_placement import Efficiency

PUBLISHED = (*NEMO_RL, *VERL)
"""All steps; those of a study follow each other."""
AIM = 0.20
"""Largest error of a held-out step, as a share of the measurement."""


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Predict each published step and the statements: by the laws as they are, and as fitted to a program on a device.

    Returns:
        ``rows``, one for each measured number; ``fits``, the constants of each study; ``statements``.
    """
    del options
    rows: list[Row] = []
    fits: dict[str, dict[str, float]] = {}
    start = Fit(efficiency=Efficiency())
    programs: dict[tuple[str, str], Fit] = {}
    for study, group in groupby(PUBLISHED, key=lambda step: step.study):
        steps = list(group)
        program = steps[0].program, steps[0].device
        fit = programs[program] = fit_study(steps, programs.get(program, start))
        names = list(dict.fromkeys(name for step in steps for name in step.fits))
        values = {**asdict(fit.efficiency), "response_tokens": fit.response_tokens, "sigma": fit.sigma}
        fits[study] = {name: values[name] for name in names}
        fitted = ", ".join(f"{name} {values[name]:.3g}" for name in names)
        say(f"{study}: {fitted or 'nothing is fitted'}")
        # Lengths that no report has cannot be left as they are.
        plain = replace(start, response_tokens=fit.response_tokens, sigma=fit.sigma)
        for step in steps:
            by_fit, by_default = predicted(step, fit), predicted(step, plain)
            for stage, seconds in step.measured.items():
                row: Row = {"name": step.name, "study": study, "release": step.release, "stage": stage}
                row["is_held_out"] = not step.fits
                rows.append(row | {"measured_s": seconds, "as_is_s": by_default[stage], "predicted_s": by_fit[stage]})
    statements = statement_rows()
    for source, group in groupby(statements, key=lambda row: row["source"]):
        say(f"{source}: assumed is " + "; ".join(dict.fromkeys(row["assumed"] for row in group)))
    return {"rows": rows, "fits": fits, "statements": statements}


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each number."""
    columns = ("", "measured s", "laws as they are", "off", "fitted laws", "off")
    shown = figures_table("published steps, and the predictions of the laws", *columns)
    study = ""
    for row in figures["rows"]:
        if row["study"] != study:
            study = row["study"]
            shown.add_section()
        cells = ["held out" if row["is_held_out"] else "fitted to", f"{row['measured_s']:,.0f}"]
        for name in ("as_is_s", "predicted_s"):
            cells += [f"{row[name]:,.0f}", f"{row[name] / row['measured_s'] - 1:+.0%}"]
        shown.add_row(f"{row['release']}: {row['name']}: {row['stage']}", *cells)
    return shown


def statements_table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each statement."""
    shown = figures_table("statements, and what is predicted for them", "stated", "predicted")
    for row in figures["statements"]:
        ranges = [_range(row[f"{what}_least"], row[f"{what}_most"], row["unit"]) for what in ("stated", "predicted")]
        shown.add_row(f"{row['source'].split(',')[0]}: {row['name']}", *ranges)
    return shown


def _range(least: float, most: float, unit: str) -> str:
    low, high = (f"{value:.0%}" if unit == "%" else f"{value:.2f} s" for value in (least, most))
    return high if least == most else f"up to {high}" if not least else f"{low} to {high}"


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether held-out steps are predicted as well as they should be, and what the laws lack."""
    off = {
        f"{row['name']} ({row['release']})": row["predicted_s"] / row["measured_s"] - 1
        for row in rows
        if row["is_held_out"] and row["stage"] == "step"
    }
    worse = [f"{name} {value:+.0%}" for name, value in off.items() if abs(value) > AIM]
    verdict = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(off)}"
    return [
        f"aim: predicted steps that were held out within {AIM:.0%}: {len(off) - len(worse)} of {len(off)} ({verdict})"
    ]
