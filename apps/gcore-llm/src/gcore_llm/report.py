"""The page that shows a run: `report.html`, one file that opens from disk, without a network.

What is read, what is drawn and how it is summed up is decided here; how it looks is in `report.html.j2`.
"""

import json
import math
import os
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

Row: TypeAlias = dict[str, object]
Trace: TypeAlias = dict[str, object]

MAX_POINTS = 800
"""Points of one line: more than the page has pixels for only makes the file large."""
MAX_TEXT_CHARS = 2000
MAX_SAMPLES = 32

EVALUATIONS = {"greedy": "val/greedy/score/mean", "sampled": "val/sampled/score/mean"}
STAGES = ("gen", "reward", "prepare", "train", "sync")
SIGNALS = (
    ("Policy loss", "actor/pg_loss", "clipped objective, no unit"),
    ("Gradient norm", "actor/grad_norm", "L2 norm"),
    ("Entropy of the policy", "actor/entropy", "nats per token"),
    ("KL to the sampling policy", "actor/ppo_kl", "nats per token"),
    ("Engine-trainer mismatch", "training/rollout_probs_diff_mean", "mean difference of probabilities"),
    ("Response length", "response_length/mean", "tokens"),
    ("Acceptance of sampling", "sampling/acceptance", "share of groups kept"),
    ("Waves of sampling", "sampling/waves", "waves per step"),
    ("Throughput", "perf/throughput", "tokens/s"),
)
Y_AXES: dict[str, Row] = {
    "sampling/acceptance": {"range": [0, 1.04]},
    "response_length/mean": {"rangemode": "tozero"},
    "perf/throughput": {"rangemode": "tozero", "tickformat": "~s"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's folder holds by now. A row is one step; `notes` say what could not be read."""

    name: str
    config: str
    total_steps: int | None
    metrics: list[Row]
    warmup: list[Row]
    before: list[Row]
    after: list[Row]
    written: datetime | None
    notes: list[str]

    @property
    def steps_done(self) -> int:
        return _step(self.metrics[-1]) if self.metrics else 0

    @property
    def has_paired_samples(self) -> bool:
        """Whether samples before and after answer the same prompts, so that they may stand side by side."""
        return all(old["prompt"] == new["prompt"] for old, new in zip(self.before, self.after, strict=False))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number of the page's first row."""

    label: str
    value: str = ""
    note: str = "no step recorded yet"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart. `traces` and `y_axis` are Plotly's; a colour in them is a CSS variable, resolved on the page."""

    title: str
    unit: str
    traces: list[Trace]
    y_axis: Row
    legend: list[tuple[str, str, str]]
    """Mark (a class of the page), colour, text."""
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """`verdict` is right, wrong, partly, or scored where the score does not say which."""

    text: str
    score: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with its completions before and after training, None where there is none yet."""

    prompt: str
    answer: str | None
    before: Completion | None
    after: Completion | None


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` of the run in `run_dir`, whole or not at all; an earlier one is replaced.

    The run may be finished, in progress or just started: what is not there yet is said on the page.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: `run_dir` is not a run's folder.
    """
    page = _render(_read_run(run_dir))
    path = run_dir / "report.html"
    temporary = run_dir / f".report.html.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _read_run(run_dir: Path) -> Run:
    signs = ("config.toml", "metrics.jsonl", "warmup.jsonl")
    if not any((run_dir / name).is_file() for name in signs):
        raise FileNotFoundError(f"{run_dir} is not a run's folder: expected one of {', '.join(signs)} in it")
    notes: list[str] = []
    config, total_steps = _read_config(run_dir / "config.toml", notes)
    metrics = run_dir / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return Run(
        name=run_dir.resolve().name,
        config=config,
        total_steps=total_steps,
        metrics=_by_step(_read_rows(metrics, "step", notes)),
        warmup=_by_step(_read_rows(run_dir / "warmup.jsonl", "step", notes)),
        before=_read_rows(run_dir / "samples" / "before.jsonl", "prompt", notes),
        after=_read_rows(run_dir / "samples" / "after.jsonl", "prompt", notes),
        written=datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if has_metrics else None,
        notes=notes,
    )


def _render(run: Run) -> str:
    """The page, with Plotly's code in it."""
    # Wanted only here, while the command line imports this module at every start.
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    source = files("gcore_llm").joinpath("report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    samples = _samples(run)
    return template.from_string(source).render(
        run=run,
        tiles=_tiles(run),
        reward=_reward_panel(run),
        reward_seen=_reward_seen(run),
        warmup=_signal_panel(run.warmup, "Warm-up loss", "sft/loss", "cross-entropy, nats per token"),
        warmup_seen=_warmup_seen(run),
        stages=_stage_panel(run),
        signals=[panel for signal in SIGNALS if (panel := _signal_panel(run.metrics, *signal))],
        unrecorded=[title for title, key, _ in SIGNALS if not _series(run.metrics, key)[0]],
        window=_window(len(_series(run.metrics, "critic/score/mean")[0])),
        is_thinned=len(run.metrics) > MAX_POINTS,
        samples=samples[:MAX_SAMPLES],
        samples_left_out=max(0, len(samples) - MAX_SAMPLES),
        samples_seen=_samples_seen(samples),
        drawn=datetime.now(UTC),
        plotly_js=get_plotlyjs(),
    )


def _read_config(path: Path, notes: list[str]) -> tuple[str, int | None]:
    if not path.is_file():
        notes.append("config.toml is not there: the settings and the number of steps to go are unknown.")
        return "", None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        trainer = tomllib.loads(text).get("trainer")
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml is not valid TOML ({error}): the number of steps to go is unknown.")
        return text, None
    total = cast(Row, trainer).get("total_training_steps") if isinstance(trainer, dict) else None
    return text, total if isinstance(total, int) and total > 0 else None


def _read_rows(path: Path, required: str, notes: list[str]) -> list[Row]:
    """The objects of a jsonl file that have the field `required`; the file may be absent.

    The last line may be half written; any other unreadable one is noted.
    """
    if not path.is_file():
        return []
    rows: list[Row] = []
    unreadable: list[int] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: object = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and required in row:
            rows.append(cast(Row, row))
        elif number < len(lines):
            unreadable.append(number)
    if unreadable:
        shown = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        notes.append(f"{path.name}: {len(unreadable)} unreadable line(s) left out (line {shown}).")
    return rows


def _by_step(rows: list[Row]) -> list[Row]:
    """One row a step, ascending. A run that resumed writes steps again: what it rolled back is dropped."""
    kept: list[Row] = []
    for row in rows:
        while kept and _step(kept[-1]) > _step(row):
            kept.pop()
        if kept and _step(kept[-1]) == _step(row):
            kept[-1] = kept[-1] | row
        else:
            kept.append(row)
    return kept


def _step(row: Row) -> int:
    return cast(int, row["step"])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """The steps at which `key` is a finite number, and its values there."""
    points = [(_step(row), value) for row in rows if (value := _number(row.get(key))) is not None]
    return [float(step) for step, _ in points], [value for _, value in points]


def _window(num_points: int) -> int:
    """Steps in a moving mean: a twelfth of the run, made odd; 1, which smooths nothing, below 24 steps."""
    return num_points // 12 | 1


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Centred. Towards either end the window shrinks to a third: whole it would flatten a trend there, single steps
    would show noise as one."""
    count, half = len(values), _window(len(values)) // 2
    index = np.arange(count)
    reach = np.maximum(np.minimum(half, np.minimum(index, index[::-1])), half // 3)
    start, end = np.maximum(index - reach, 0), np.minimum(index + reach + 1, count)
    total = np.concatenate([[0.0], np.cumsum(values)])
    return ((total[end] - total[start]) / (end - start)).tolist()


def _points(steps: Sequence[float], values: Sequence[float]) -> Trace:
    """x and y of a trace: means over runs of neighbouring steps where there are more than `MAX_POINTS`."""
    x, y = (np.asarray(column, dtype=float) for column in (steps, values))
    if len(x) > MAX_POINTS:
        x, y = (np.array([part.mean() for part in np.array_split(column, MAX_POINTS)]) for column in (x, y))
    return {"x": [float(f"{step:.6g}") for step in x], "y": [float(f"{value:.5g}") for value in y]}


def _line(color: str, steps: Sequence[float], values: Sequence[float]) -> list[Trace]:
    """Every step in a thin line and their moving mean in a bold one; in a short run the steps alone, marked."""
    window = _window(len(steps))
    raw: Trace = {"name": "raw", "hovertemplate": "%{y:.4~g}"} | _points(steps, values)
    bold = {"color": color, "width": 2.25}
    if window == 1:
        return [raw | {"mode": "lines+markers", "line": bold, "marker": {"color": color, "size": 5}}]
    mean = {"name": f"mean of {window} steps", "mode": "lines", "line": bold, "hovertemplate": "%{y:.4~g}"}
    thin: Trace = {"mode": "lines", "line": {"color": color, "width": 1}, "opacity": 0.45}
    return [raw | thin, mean | _points(steps, _moving_mean(values))]


def _reward_panel(run: Run) -> Panel | None:
    steps, rewards = _series(run.metrics, "critic/score/mean")
    traces = _line("--blue", steps, rewards) if steps else []
    window = _window(len(steps))
    legend = [("bold", "--blue", "reward" if window == 1 else f"reward, mean of {window} steps")] if steps else []
    if window > 1:
        legend.append(("thin", "--blue", "reward, each step"))
    seen = list(rewards)
    marks = {"greedy": ("--orange", "circle"), "sampled": ("--teal", "diamond-open")}
    for kind, key in EVALUATIONS.items():
        at, scores = _series(run.metrics, key)
        if not at:
            continue
        color, symbol = marks[kind]
        size, width = (9, 2) if len(at) <= 40 else (5, 1)
        marker = {"color": color, "symbol": symbol, "size": size, "line": {"width": width, "color": color}}
        trace: Trace = {"name": f"held-out, {kind}", "mode": "markers", "marker": marker, "cliponaxis": False}
        traces.append(trace | {"hovertemplate": "%{y:.4~g}"} | _points(at, scores))
        legend.append((symbol, color, f"held-out, {kind}"))
        seen += scores
    if not seen:
        return None
    y_axis: Row = {"range": [0, 1.03]} if min(seen) >= 0 and max(seen) <= 1 else {}
    return Panel(
        title="Reward per step", unit="mean score of the step's samples", traces=traces, y_axis=y_axis, legend=legend
    )


def _signal_panel(rows: Sequence[Row], title: str, key: str, unit: str) -> Panel | None:
    steps, values = _series(rows, key)
    if not steps:
        return None
    traces = _line("--blue", steps, values)
    legend: list[tuple[str, str, str]] = []
    if key == "response_length/mean" and (longest := _series(rows, "response_length/max"))[0]:
        line = {"color": "--orange", "width": 1}
        traces.insert(0, {"name": "longest", "mode": "lines", "line": line, "opacity": 0.6} | _points(*longest))
        legend = [("bold", "--blue", "mean"), ("thin", "--orange", "longest")]
    return Panel(
        title=title,
        unit=unit,
        traces=traces,
        y_axis=Y_AXES.get(key, {}),
        legend=legend,
        last=_amount(values[-1]),
    )


def _stage_times(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Seconds of every stage in every row that has a step time; stages we do not know by name are summed as 'other'."""
    times = {stage: [0.0] * len(rows) for stage in (*STAGES, "other")}
    for index, row in enumerate(rows):
        for key, value in row.items():
            stage = key.removeprefix("timing_s/")
            if key.startswith("timing_s/") and stage != "step" and (seconds := _number(value)) is not None:
                times[stage if stage in STAGES else "other"][index] += seconds
    return {stage: seconds for stage, seconds in times.items() if any(seconds)}


def _stage_panel(run: Run) -> Panel | None:
    rows = [row for row in run.metrics if _number(row.get("timing_s/step")) is not None]
    if not rows:
        return None
    steps, whole = _series(rows, "timing_s/step")
    traces: list[Trace] = []
    legend: list[tuple[str, str, str]] = []
    for stage, seconds in _stage_times(rows).items():
        color = f"--{stage}"
        trace: Trace = {"name": stage, "stackgroup": "stages", "line": {"width": 0, "color": color}}
        traces.append(trace | {"fillcolor": color, "hovertemplate": "%{y:.3~s}s"} | _points(steps, seconds))
        legend.append(("box", color, f"{stage} {sum(seconds) / max(sum(whole), 1e-12):.0%}"))
    line = {"color": "--ink", "width": 1}
    step: Trace = {"name": "whole step", "mode": "lines", "line": line, "hovertemplate": "%{y:.3~s}s"}
    traces.append(step | _points(steps, whole))
    return Panel(
        title="Where the time of a step goes",
        unit="seconds, stages stacked; where stages overlap, the stack is higher than the whole step",
        traces=traces,
        y_axis={"rangemode": "tozero", "ticksuffix": " s"},
        legend=[*legend, ("bold", "--ink", "whole step")],
        last=_duration(whole[-1]),
    )


def _tiles(run: Run) -> list[Tile]:
    steps, rewards = _series(run.metrics, "critic/score/mean")
    _, throughput = _series(run.metrics, "perf/throughput")
    _, step_times = _series(run.metrics, "timing_s/step")
    reward_tile, throughput_tile, step_tile, wall_tile = (
        Tile(label=label) for label in ("Reward, last step", "Throughput", "Step time", "Wall time")
    )
    if rewards:
        recent = rewards[-_window(len(rewards)) :]
        mean = f"mean of last {len(recent)}: {_amount(statistics.fmean(recent))}"
        note = mean if len(recent) > 1 else f"step {steps[-1]:.0f}"
        reward_tile = replace(reward_tile, value=_amount(rewards[-1]), note=note)
    if throughput:
        value = f"{statistics.median(throughput):,.0f}"
        throughput_tile = replace(throughput_tile, value=value, note="tokens/s, median")
    if step_times:
        slowest = f"median; slowest {_duration(max(step_times))}"
        step_tile = replace(step_tile, value=_duration(statistics.median(step_times)), note=slowest)
        wall_tile = replace(wall_tile, value=_duration(sum(step_times)), note=f"in {len(step_times):,} training steps")
    return [_evaluation_tile(run), reward_tile, throughput_tile, step_tile, wall_tile]


def _evaluation_tile(run: Run) -> Tile:
    for kind, key in EVALUATIONS.items():
        steps, scores = _series(run.metrics, key)
        if not steps:
            continue
        is_share = min(scores) >= 0 and max(scores) <= 1
        first, last = (f"{score:.0%}" if is_share else _amount(score) for score in (scores[0], scores[-1]))
        label = f"Held-out {'accuracy' if is_share else 'score'}, {kind}"
        if len(steps) == 1:
            return Tile(label=label, value=first, note=f"step {steps[0]:.0f}; not evaluated again yet")
        return Tile(label=label, value=f"{first} → {last}", note=f"step {steps[0]:.0f} → step {steps[-1]:.0f}")
    return Tile(label="Held-out accuracy", note="not evaluated yet")


def _reward_seen(run: Run) -> str:
    steps, rewards = _series(run.metrics, "critic/score/mean")
    window = _window(len(rewards))
    if window == 1:
        absent = "No training step yet" if run.metrics else "Nothing yet: metrics.jsonl is missing or empty"
        return f"Too few steps for a trend yet: {len(steps)}" if steps else absent
    first, last = (_amount(statistics.fmean(part)) for part in (rewards[:window], rewards[-window:]))
    return f"From {first} over the first {window} steps to {last} over the last {window}"


def _warmup_seen(run: Run) -> str:
    for kind, key in reversed(EVALUATIONS.items()):
        _, scores = _series(run.warmup, key)
        if scores:
            return f"Held-out score, {kind}: {_amount(scores[0])} → {_amount(scores[-1])}"
    return "Before reinforcement learning"


def _samples(run: Run) -> list[Sample]:
    pairs: list[tuple[Row | None, Row | None]] = list(zip_longest(run.before, run.after))
    if not run.has_paired_samples:
        pairs = [*((old, None) for old in run.before), *((None, new) for new in run.after)]
    scores = [_number(row.get("score")) for row in (*run.before, *run.after)]
    verified = all(score is not None and -1 <= score <= 1 for score in scores)
    return [_sample(old, new, verified=verified) for old, new in pairs]


def _sample(before: Row | None, after: Row | None, *, verified: bool) -> Sample:
    either = before or after or {}
    answer = either.get("answer")
    return Sample(
        prompt=_clipped(either.get("prompt")),
        answer=None if answer is None else _clipped(answer),
        before=_completion(before, verified=verified) if before else None,
        after=_completion(after, verified=verified) if after else None,
    )


def _completion(row: Row, *, verified: bool) -> Completion:
    """`verified`: the scores are in [-1, 1], so that 1 means right and 0 or less wrong; others are only numbers."""
    score = _number(row.get("score"))
    verdict = "scored"
    if verified and score is not None:
        verdict = "right" if score >= 1 else "wrong" if score <= 0 else "partly"
    shown = "not scored" if score is None else _amount(score)
    return Completion(text=_clipped(row.get("completion", "")), score=shown, verdict=verdict)


def _samples_seen(samples: Sequence[Sample]) -> str:
    said: list[str] = []
    sides = {"before": [sample.before for sample in samples], "after": [sample.after for sample in samples]}
    for when, side in sides.items():
        verdicts = [completion.verdict for completion in side if completion]
        if verdicts and "scored" not in verdicts:
            said.append(f"{verdicts.count('right')} of {len(verdicts)} right {when} training")
    return ", ".join(said)


def _clipped(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    left_out = len(text) - MAX_TEXT_CHARS
    return text if left_out <= 0 else f"{text[:MAX_TEXT_CHARS]} … {left_out:,} more characters"


def _amount(value: float) -> str:
    """Three digits: 0.614, 12.3; thousands are separated: 20,413; powers are written out: 1.2×10⁻⁷."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 1e-4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    times_ten = "\N{MULTIPLICATION SIGN}10"
    return mantissa + times_ten + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _duration(seconds: float) -> str:
    """In the units that matter: 210 ms, 8.4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"
