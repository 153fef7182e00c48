"""The part oracles: steps that other systems have published, predicted by laws of which few constants are fitted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from gcore_bench.harness.report import BenchSession, Row, verdict_on_all
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.oracles.prediction import (
    Fit,
    fit_study,
    list_constants,
    predict_stages,
    predict_sync_s,
)
from gcore_bench.placement.oracles.steps import read_steps
from gcore_bench.placement.tables import FigureTable, read_json
from gcore_placement import Cluster, Device, Efficiency, ModelShape

AIM = 0.20
"""Largest error of a held-out step, as a share of the measurement."""
SYNCS = (
    ("Qwen2.5 7B", 8, 0.02, 0.12),
    ("Qwen3 30B-A3B", 32, 4.38, 15.76),
    ("Qwen3 235B-A22B", 128, 23.70, 58.57),
)
"""Weight syncs of verl on H20 (docs/advance/fully_async.md, 2026-08): the model, the devices of ranks and engines, and
the seconds with and without its checkpoint engine."""
SAVINGS = {"8 + 24": 0.153, "16 + 16": 0.175}
"""Share of the time that verl saves by lending (docs/advance/dynamic_schedule.md, 2026-07, Qwen3.5-35B-A3B, DAPO, 32
H20): of 32 devices 16 train, and generate while they are idle; compared with fixed ranks + engines."""

STEP_COLUMNS = {
    "": "{release}: {name}: {stage}",
    "fitted": "{fitted}",
    "measured s": "{measured_s:,.0f}",
    "laws as they are": "{as_is_s:,.0f} ({as_is_error:+.0%})",
    "fitted laws": "{predicted_s:,.0f} ({error:+.0%})",
}
SYNC_COLUMNS = {
    "": "{model} over {devices} devices",
    "checkpoint engine s": "{least_s:.2f}",
    "without it s": "{most_s:.2f}",
    "predicted s": "{predicted_s:.2f}",
}
LENDING_COLUMNS = {
    "": "against {devices} devices",
    "stated": "{stated:.0%}",
    "predicted": "{predicted:.0%}",
}


def run(_: PlacementOptions, session: BenchSession) -> list[FigureTable]:
    """Predict each published step twice, by the laws as they are and as fitted, and predict syncs and lending."""
    rows = predict_steps(session.say)
    title = "published steps, predicted"
    syncs = "weight syncs of verl, predicted"
    lending = "time that verl saves by lending, predicted without losses"
    return [
        FigureTable(
            title=title,
            columns=STEP_COLUMNS,
            rows=rows,
            aims=check_aims(rows),
        ),
        FigureTable(title=syncs, columns=SYNC_COLUMNS, rows=predict_syncs()),
        FigureTable(title=lending, columns=LENDING_COLUMNS, rows=predict_savings()),
    ]


def predict_steps(say: Callable[[str], object]) -> list[Row]:
    """Fit the constants of each study, and return a row for each measured stage and step."""
    rows: list[Row] = []
    start = Fit()
    fits: dict[tuple[str, str], Fit] = {}
    for study, group in groupby(read_steps(), key=attrgetter("study")):
        steps = list(group)
        program = (steps[0].program, steps[0].device)
        fit = fit_study(steps, fits.get(program, start))
        fits[program] = fit
        values = [f"{name} {getattr(fit, name):.3g}" for name in list_constants(steps)]
        say(f"{study}: {', '.join(values) or 'nothing is fitted'}")
        # Lengths that no report has cannot be left as they are.
        as_is = replace(start, response_tokens=fit.response_tokens, sigma=fit.sigma)
        for step in steps:
            as_is_s = predict_stages(step, as_is)
            predicted_s = predict_stages(step, fit)
            for stage, seconds in step.measured_s.items():
                row: Row = {
                    "study": study,
                    "release": step.release,
                    "name": step.name,
                    "stage": stage,
                    "fitted": "yes" if step.fits else "",
                    "measured_s": seconds,
                    "as_is_s": as_is_s[stage],
                    "as_is_error": as_is_s[stage] / seconds - 1,
                    "predicted_s": predicted_s[stage],
                    "error": predicted_s[stage] / seconds - 1,
                }
                rows.append(row)
    return rows


def check_aims(rows: Sequence[Row]) -> list[str]:
    """Count the held-out steps that are predicted within the aim, and name the others."""
    steps = [row for row in rows if row["stage"] == "step" and not row["fitted"]]
    worse = [row for row in steps if abs(row["error"]) > AIM]
    names = list(map("{name} ({release}) {error:+.0%}".format_map, worse))
    count = f"{len(steps) - len(worse)} of {len(steps)}"
    return [
        f"aim: predicted steps that were held out within {AIM:.0%}: {count} ({verdict_on_all(names)})"
    ]


def predict_syncs() -> list[Row]:
    """Predict verl's weight syncs: every device receives the whole model, at the rate of the slowest link."""
    rows: list[Row] = []
    shapes = read_json("models.json")
    for sync in SYNCS:
        row: Row = dict(zip(("model", "devices", "least_s", "most_s"), sync, strict=True))
        cluster = Cluster(num_devices=row["devices"], device=Device.named("H20"))
        shape = ModelShape.from_config(shapes[row["model"]])
        row["predicted_s"] = predict_sync_s(shape, cluster, row["devices"], Efficiency())
        rows.append(row)
    return rows


def predict_savings() -> list[Row]:
    """Predict the savings of lending without any loss, from the ratio of the two fixed divisions' times alone.

    With G and T device-seconds of generation and training per step, 16 engines take G / 16 and 8 ranks T / 8, each the
    longer part of its division; devices that are never idle take (G + T) / 32.
    """
    ratio = (1 - SAVINGS["16 + 16"]) / (1 - SAVINGS["8 + 24"])
    generation = 2 / ratio  # with a training of 1
    lent_s = (generation + 1) / 32
    rows: list[Row] = []
    for devices, seconds in (("8 + 24", 1 / 8), ("16 + 16", generation / 16)):
        rows.append(
            {
                "devices": devices,
                "stated": SAVINGS[devices],
                "predicted": 1 - lent_s / seconds,
            }
        )
    return rows
