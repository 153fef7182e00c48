"""The part oracles: published steps of other systems, predicted by laws of which few constants are fitted to some."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import least_squares

from gcore_bench.harness.report import Row, figures_table
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.published import CONFIGS, PUBLISHED, PublishedStep, Stage
from gcore_placement import (
    Cluster,
    Device,
    Efficiency,
    EngineLayout,
    Job,
    Lengths,
    ModelShape,
    StepTime,
    predict_layout,
)

AIM = 0.20
"""Largest error of a held-out step, as a share of the measurement."""
_MAX_NUM_SEQS = 1024
_UPDATES = 4
"""Updates of a stream's step."""
_MOST = {"training": 1.0, "experts": 1.0, "sigma": 1.5}
"""Largest values that are fitted; the others have no limit."""
_LENGTHS = ("response_tokens", "sigma")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The laws of a study."""

    efficiency: Efficiency
    response_tokens: float = 1500.0
    """Mean tokens where the report has none."""
    sigma: float = 0.7
    """Standard deviation of the logarithms of responses, before they are cut at the longest."""


@cache
def lengths_of_mean(mean: float, sigma: float, longest: float) -> Lengths:
    """Return log-normal lengths that are cut at the longest, and have this mean after it."""

    def of(median: float) -> Lengths:
        return Lengths.log_normal(median=median, sigma=sigma, longest=longest)

    low, high = 1.0, longest
    for _ in range(40):
        median = (low * high) ** 0.5
        low, high = (median, high) if of(median).mean < mean else (low, median)
    return of(low)


def predicted(step: PublishedStep, fit: Fit) -> dict[Stage, float]:
    """Predict the seconds of the stages and of the whole step, as its schedule overlaps them."""
    longest = float(step.most_response_tokens)
    mean = step.response_tokens or fit.response_tokens
    responses = lengths_of_mean(min(mean, 0.95 * longest), fit.sigma, longest)

    def times(responses: Lengths, *, engines: bool) -> StepTime:
        devices = step.engine[0] if engines else step.training.num_ranks
        job = Job(
            policy=ModelShape.from_config(CONFIGS[step.model]),
            prompt_lengths=Lengths.recorded([step.prompt_tokens]),
            response_lengths=responses,
            train_batch_size=step.prompts,
            n=step.n,
            reference=step.reference,
            old_log_probs=step.old_log_probs,
        )
        engine = EngineLayout(
            num_engines=max(1, devices // step.engine[1]), devices_per_engine=step.engine[1], max_num_seqs=_MAX_NUM_SEQS
        )
        cluster = Cluster(num_devices=max(devices, step.training.num_ranks), device=Device.named(step.device))
        turns = step.schedule == "turns"
        return predict_layout(cluster, job, step.training, engine, efficiency=fit.efficiency, takes_turns=turns)

    generating, training = times(responses, engines=True), times(responses, engines=False)
    generation_s, prepared_s, trained_s = generating.generation_s, training.preparation_s, training.training_s
    after_s = training.weight_sync_s + training.swap_s
    if step.schedule == "stale stream":
        # Without an end of the step that is waited for, the mean response takes an engine's place as long as it does.
        generation_s = times(Lengths.recorded([responses.mean]), engines=True).generation_s
    if step.schedule == "turns":
        total_s = generation_s + prepared_s + trained_s + after_s
    elif step.schedule == "stream":
        last_s = (prepared_s + trained_s) / _UPDATES
        total_s = max(generation_s, (_UPDATES - 1) * last_s) + last_s + after_s
    else:
        total_s = max(generation_s, prepared_s + trained_s) + after_s
    return {"generation": generation_s, "preparation": prepared_s, "training": trained_s, "step": total_s}


def fit_study(steps: Sequence[PublishedStep], start: Fit) -> Fit:
    """Fit a study's constants to its steps that name them: logarithms of laws and measurements differ least.

    Where stages were measured, they are fitted, and not their sum, which holds what no stage does.
    """
    chosen = [step for step in steps if step.fits]
    names = list(dict.fromkeys(name for step in chosen for name in step.fits))
    first = {**asdict(start.efficiency), "response_tokens": start.response_tokens, "sigma": start.sigma}

    def applied(logs: NDArray[np.float64]) -> Fit:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        lengths = {name: values.pop(name) for name in _LENGTHS if name in values}
        return replace(start, efficiency=replace(start.efficiency, **values), **lengths)

    def misses(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        found: list[float] = []
        for step in chosen:
            law = predicted(step, applied(logs))
            stages: list[Stage] = [stage for stage in step.measured if stage != "step"] or ["step"]
            found += [np.log(law[stage] / step.measured[stage]) for stage in stages]
        return np.array(found)

    most = np.log([_MOST.get(name, np.inf) for name in names])
    return applied(least_squares(misses, np.log([first[name] for name in names]), bounds=(-np.inf, most)).x)


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Predict each published step, by the laws as they are and by those fitted to its study.

    Returns:
        ``rows``, one for each measured number; ``fits``, the constants of each study.
    """
    del options
    rows: list[Row] = []
    fits: dict[str, dict[str, float]] = {}
    start = fit = Fit(efficiency=Efficiency())
    last = ""
    for study, group in groupby(PUBLISHED, key=lambda step: step.study):
        steps = list(group)
        # The same program on the same devices keeps its constants, and has other lengths.
        fit = fit_study(steps, fit if last and study.startswith(last) else start)
        last = study
        names = list(dict.fromkeys(name for step in steps for name in step.fits))
        values = {**asdict(fit.efficiency), "response_tokens": fit.response_tokens, "sigma": fit.sigma}
        fits[study] = {name: values[name] for name in names}
        say(f"{study}: " + ", ".join(f"{name} {values[name]:.3g}" for name in names))
        # Lengths that no report has cannot be left as they are.
        plain = replace(start, response_tokens=fit.response_tokens, sigma=fit.sigma)
        for step in steps:
            by_fit, by_default = predicted(step, fit), predicted(step, plain)
            for stage, seconds in step.measured.items():
                row: Row = {"name": step.name, "study": study, "stage": stage, "is_held_out": not step.fits}
                rows.append(row | {"measured_s": seconds, "as_is_s": by_default[stage], "predicted_s": by_fit[stage]})
    return {"rows": rows, "fits": fits}


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each number."""
    columns = ("", "", "measured s", "laws as they are", "off", "fitted laws", "off")
    shown = figures_table("published steps, and the predictions of the laws", *columns)
    study = ""
    for row in figures["rows"]:
        if row["study"] != study:
            study = row["study"]
            shown.add_section()
        cells = ["held out" if row["is_held_out"] else "fitted to", f"{row['measured_s']:,.0f}"]
        for name in ("as_is_s", "predicted_s"):
            cells += [f"{row[name]:,.0f}", f"{row[name] / row['measured_s'] - 1:+.0%}"]
        shown.add_row(f"{row['name']}: {row['stage']}", *cells)
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether held-out steps are predicted as well as they should be, and what the laws lack."""
    off = {
        row["name"]: row["predicted_s"] / row["measured_s"] - 1
        for row in rows
        if row["is_held_out"] and row["stage"] == "step"
    }
    worse = [f"{name} {value:+.0%}" for name, value in off.items() if abs(value) > AIM]
    verdict = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(off)}"
    return [
        f"aim: predicted steps that were held out within {AIM:.0%}: {len(off) - len(worse)} of {len(off)} ({verdict})"
    ]
