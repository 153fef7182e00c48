"""The page that shows a run: `report.html`, one file that opens from disk, without a network; see `page.html.j2`."""

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_runs.loop.best import exported_evaluation
from gcore_runs.report.gallery import read_gallery
from gcore_runs.report.held_out import set_panels, set_rows
from gcore_runs.report.panels import (
    MAX_POINTS,
    age_panel,
    amount,
    duration,
    ledger_panel,
    load_panel,
    mean_window,
    reward_panel,
    signal_panel,
    stage_panel,
    timeline,
)
from gcore_runs.report.run import Kind, ReportedRun, Row, Signal, metric_names, number, series
from gcore_runs.report.samples import are_verified, clip, training_samples, verdict

if TYPE_CHECKING:
    from jinja2 import Template

MAX_PARTS = 24
"""Most parts of rewards that have a chart."""
MAX_MEMORIES = 12
"""Most processes whose memory has a chart."""
MAX_SAMPLES = 32
_PART = re.compile(r"reward/(.+)/mean")
_OF_CURRICULUM: tuple[Signal, ...] = (
    ("Mean score of prompts", "curriculum/score", "the latest of each"),
    ("Prompts too easy or too hard", "curriculum/alike", "share of those sampled so far"),
)
"""Charts of a run with a curriculum."""


def render_report(run_dir: Path, kinds: Mapping[str, Kind]) -> Path:
    """Write `report.html` of the run in `run_dir`, whole or not at all, and return its path; raises as `ReportedRun`.

    The run may be finished, in progress or just started: what is not there yet is said on the page. Its kind is found
    by the `command` in its settings; that of a run which names none is ``train``.
    """
    page = _render(ReportedRun(run_dir, kinds))
    path = run_dir / "report.html"
    temporary = run_dir / f".report.html.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@cache
def load_template() -> "Template":
    """Return the compiled template of the page; compiling it takes longer than filling it in."""
    # Wanted only here, while the command line imports this module at every start.
    from jinja2 import Environment, StrictUndefined

    source = files("gcore_runs").joinpath("report/page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)


def _render(run: ReportedRun) -> str:
    """Return the page, with Plotly's code in it."""
    from plotly.offline import get_plotlyjs

    samples = paired_samples(run)
    signals = [
        signal_panel(run.metrics, *signal)
        for signal in (*run.kind.signals, *_OF_CURRICULUM, *_parts_of_rewards(run))
    ]
    signals += [load_panel(run), age_panel(run)]
    # The first name is the step.
    names = metric_names(run.memory)[1 : MAX_MEMORIES + 1]
    signals += [signal_panel(run.memory, f"Memory: {name}", name, "GB") for name in names]
    gallery = read_gallery(run.samples, run.notes) if run.kind.has_pictures else None
    return load_template().render(
        run=run,
        tiles=tiles(run),
        reward=reward_panel(run),
        reward_seen=reward_seen(run),
        sets=set_panels(run),
        set_rows=set_rows(run),
        warmup=signal_panel(
            run.warmup, "Warm-up loss", "sft/loss", "cross-entropy, nats per token"
        ),
        warmup_seen=warmup_seen(run),
        stages=stage_panel(run),
        timeline=timeline(run.spans),
        ledger=ledger_panel(run.spans),
        signals=[panel for panel in signals if panel],
        unrecorded=[title for title, key, _ in run.kind.signals if not series(run.metrics, key)[0]],
        window=mean_window(len(series(run.metrics, run.kind.key)[0])),
        is_thinned=len(run.metrics) > MAX_POINTS,
        samples=samples[:MAX_SAMPLES],
        samples_left_out=max(0, len(samples) - MAX_SAMPLES),
        samples_seen=samples_seen(samples),
        gallery=gallery,
        viewer=training_samples(run),
        drawn=datetime.now(UTC),
        plotly_js=get_plotlyjs(),
    )


def _parts_of_rewards(run: ReportedRun) -> list[Signal]:
    """Return a signal for each part of the reward, such as a term of a weighted sum."""
    signals: list[Signal] = []
    for name in metric_names(run.metrics):
        match = _PART.fullmatch(name)
        if match:
            signals.append((f"Reward: {match[1]}", name, "mean of this part, before its weight"))
    return signals[:MAX_PARTS]


def _tile(label: str, value: str = "", note: str = "no step recorded yet") -> Row:
    """Return one number of the page's first row."""
    return {"label": label, "value": value, "note": note}


def tiles(run: ReportedRun) -> list[Row]:
    steps, rewards = series(run.metrics, run.kind.key)
    _, throughput = series(run.metrics, "perf/throughput")
    _, step_times = series(run.metrics, "timing_s/step")
    reward = _tile(f"{run.kind.name.capitalize()}, last step")
    speed = _tile("Throughput")
    step = _tile("Step time")
    wall = _tile("Wall time")
    if rewards:
        recent = rewards[-mean_window(len(rewards)) :]
        note = f"step {steps[-1]:.0f}"
        if len(recent) > 1:
            note = f"mean of last {len(recent)}: {amount(statistics.fmean(recent))}"
        reward |= {"value": amount(rewards[-1]), "note": note}
    if throughput:
        median = amount(statistics.median(throughput))
        speed |= {"value": median, "note": f"{run.kind.throughput_unit}, median"}
    if step_times:
        slowest = f"median; slowest {duration(max(step_times))}"
        step |= {"value": duration(statistics.median(step_times)), "note": slowest}
        number_of_steps = f"in {len(step_times):,} training steps"
        wall |= {"value": duration(sum(step_times)), "note": number_of_steps}
    evaluations = [_evaluation_tile(run)]
    for key, label in run.kind.tiles.items():
        if series(run.metrics, key)[0]:
            evaluations.append(_change_tile(run, label, key, amount))
    return [*evaluations, reward, speed, step, wall]


def _evaluation_tile(run: ReportedRun) -> Row:
    measure = run.kind.measure
    for way, key in run.kind.evaluations.items():
        _, scores = series(run.metrics, key)
        if not scores:
            continue
        show: Callable[[float], str] = amount
        if measure in ("score", "accuracy") and min(scores) >= 0 and max(scores) <= 1:
            measure = "accuracy"
            show = "{:.0%}".format
        label = f"Held-out {measure}, {way}" if way else f"Held-out {measure}"
        return _change_tile(run, label, key, show)
    if measure == "score":
        measure = "accuracy"
    return _tile(f"Held-out {measure}", note="not evaluated yet")


def _change_tile(run: ReportedRun, label: str, key: str, show: Callable[[float], str]) -> Row:
    """Return how a metric has changed from the first evaluation to that of the policy that is exported."""
    evaluations = [row for row in run.metrics if number(row.get(key)) is not None]
    before = evaluations[0]
    after = exported_evaluation(evaluations, run.best_step)
    first_step = before["step"]
    last_step = after["step"]
    value = show(before[key])
    note = f"step {first_step} → step {last_step}"
    if len(evaluations) == 1:
        note = f"step {first_step}; not evaluated again yet"
    elif first_step == last_step:
        note = f"step {first_step}, which is exported: none was better"
    else:
        value += f" → {show(after[key])}"
    return _tile(label, value, note)


def reward_seen(run: ReportedRun) -> str:
    steps, rewards = series(run.metrics, run.kind.key)
    window = mean_window(len(rewards))
    if not run.metrics:
        return "Nothing yet: metrics.jsonl is missing or empty"
    if not steps:
        return "No training step yet"
    if window == 1:
        return f"Too few steps for a trend yet: {len(steps)}"
    first = amount(statistics.fmean(rewards[:window]))
    last = amount(statistics.fmean(rewards[-window:]))
    return f"From {first} over the first {window} steps to {last} over the last {window}"


def warmup_seen(run: ReportedRun) -> str:
    for way, key in reversed(run.kind.evaluations.items()):
        _, scores = series(run.warmup, key)
        if scores:
            return f"Held-out score, {way}: {amount(scores[0])} → {amount(scores[-1])}"
    return run.kind.after_warmup


def paired_samples(run: ReportedRun) -> list[Row]:
    """Return prompts with their answer and their completions before and after training; None: there is none yet."""
    pairs: list[tuple[Row | None, Row | None]] = list(zip_longest(run.before, run.after))
    if not run.has_paired_samples:
        pairs = [(old, None) for old in run.before]
        pairs.extend((None, new) for new in run.after)
    verified = are_verified([*run.before, *run.after])
    samples: list[Row] = []
    for before, after in pairs:
        row = before or after or {}
        answer = row.get("answer")
        samples.append(
            {
                "prompt": clip(row.get("prompt")),
                "answer": None if answer is None else clip(answer),
                "before": _completion(before, verified=verified),
                "after": _completion(after, verified=verified),
            }
        )
    return samples


def _completion(row: Row | None, *, verified: bool) -> Row | None:
    """Return a completion with its verdict, if ``verified``: scores are in [-1, 1], 1 is right and 0 or less wrong."""
    if not row:
        return None
    score = number(row.get("score"))
    return {
        "text": clip(row.get("completion", "")),
        "score": "not scored" if score is None else amount(score),
        "verdict": verdict(score, verified=verified),
    }


def samples_seen(samples: Sequence[Row]) -> str:
    parts: list[str] = []
    for when in ("before", "after"):
        verdicts = [sample[when]["verdict"] for sample in samples if sample[when]]
        if verdicts and "scored" not in verdicts:
            parts.append(f"{verdicts.count('right')} of {len(verdicts)} right {when} training")
    return ", ".join(parts)
