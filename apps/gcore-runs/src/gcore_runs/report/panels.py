"""The page's charts, as Plotly's traces, and its format of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Span
from gcore_placement import Ledger
from gcore_runs.loop.recorder import STAGES
from gcore_runs.report.run import ReportedRun, Row, number, series
from gcore_runs.run_folder import StepSpans

Trace: TypeAlias = dict[str, object]

MAX_POINTS = 800
"""Points of one line: more than the page has pixels for only makes the file large."""

Y_AXES: dict[str, Row] = {
    "sampling/acceptance": {"range": [0, 1.04]},
    "response_length/mean": {"rangemode": "tozero"},
    "perf/throughput": {"rangemode": "tozero", "tickformat": "~s"},
}
_COLORS = {
    "generation": "--gen",
    "reward": "--reward",
    "preparation": "--prepare",
    "training": "--train",
    "weight_sync": "--sync",
    "unassigned": "--grid",
}
MAX_ROWS = 24
"""Most rows of controllers, and of each kind of device; if there are more, every second or n-th is shown."""
MAX_SPANS = 4000
"""Most spans of the timeline; if there are more, fewer steps are shown."""
FIRST_VIEW_STEPS = 5
"""Steps in view when the page is opened."""
_IDLE = "no stage"
_AGE_COLORS = ("--teal", "--blue", "--prepare", "--orange", "--sync", "--wrong")
_CAUSE_COLORS = ("--other", "--muted", "--line")
"""Colours that distinguish neighbouring causes, whose names are shown at the pointer."""


@dataclass(kw_only=True)
class Panel:
    """One chart. `traces` and `y_axis` are Plotly's; a colour in them is a CSS variable, resolved on the page."""

    title: str
    unit: str
    y_axis: Row = field(default_factory=Row)
    last: str = ""
    traces: list[Trace] = field(default_factory=list[Trace])
    legend: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Mark (a class of the page), colour, text."""
    layout: Row = field(default_factory=Row)
    """Plotly's layout of this chart, over that of all charts."""

    def draw(self, mark: str, color: str, label: str, *traces: Trace) -> None:
        """Add traces, with an entry of the legend."""
        self.traces += traces
        self.legend.append((mark, color, label))


def amount(value: float) -> str:
    """Format a number with three digits: 0.614, 12.3; thousands separated: 20,413; powers written out: 1.2×10⁻⁷."""
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if value == 0 or 1e-4 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    times_ten = "\N{MULTIPLICATION SIGN}10"
    return (
        mantissa
        + times_ten
        + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    )


def duration(seconds: float) -> str:
    """Format seconds in suitable units: 210 ms, 8.4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400:,} d {rounded % 86400 // 3600} h"


def mean_window(num_points: int) -> int:
    """Steps in a moving mean: a twelfth of the run, made odd; 1, which smooths nothing, below 24 steps."""
    return num_points // 12 | 1


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Centred; towards either end the window shrinks to a third, between a flattened trend and noise."""
    count = len(values)
    half = mean_window(len(values)) // 2
    index = np.arange(count)
    reach = np.maximum(np.minimum(half, np.minimum(index, index[::-1])), half // 3)
    start = np.maximum(index - reach, 0)
    end = np.minimum(index + reach + 1, count)
    total = np.concatenate([[0.0], np.cumsum(values)])
    return ((total[end] - total[start]) / (end - start)).tolist()


def _points(steps: Sequence[float], values: Sequence[float]) -> Trace:
    """Return x and y of a trace: means of neighbouring steps if there are more than `MAX_POINTS`."""
    x = _thin_out(steps)
    y = _thin_out(values)
    return {"x": [float(f"{step:.6g}") for step in x], "y": [float(f"{value:.5g}") for value in y]}


def _thin_out(numbers: Sequence[float]) -> NDArray[np.float64]:
    column = np.asarray(numbers, dtype=float)
    if len(column) <= MAX_POINTS:
        return column
    return np.array([part.mean() for part in np.array_split(column, MAX_POINTS)])


def _line(color: str, steps: Sequence[float], values: Sequence[float]) -> list[Trace]:
    """Every step in a thin line and their moving mean in a bold one; in a short run the steps alone, marked."""
    window = mean_window(len(steps))
    raw: Trace = {"name": "raw", "hovertemplate": "%{y:.4~g}"} | _points(steps, values)
    bold = {"color": color, "width": 2.25}
    if window == 1:
        return [
            raw | {"mode": "lines+markers", "line": bold, "marker": {"color": color, "size": 5}}
        ]
    mean = {
        "name": f"mean of {window} steps",
        "mode": "lines",
        "line": bold,
        "hovertemplate": "%{y:.4~g}",
    }
    thin: Trace = {"mode": "lines", "line": {"color": color, "width": 1}, "opacity": 0.45}
    return [raw | thin, mean | _points(steps, _moving_mean(values))]


def _area(
    name: str, color: str, hover: str, steps: Sequence[float], values: Sequence[float]
) -> Trace:
    """Return an area on top of those that were drawn before."""
    area: Trace = {"name": name, "stackgroup": "areas", "line": {"width": 0, "color": color}}
    return area | {"fillcolor": color, "hovertemplate": hover} | _points(steps, values)


def _bars(
    name: str, color: str, rows: Sequence[str], lengths: Sequence[float], hover: str
) -> Trace:
    """Return horizontal bars of one kind, each in its row, with what is shown at the pointer."""
    bars: Trace = {"type": "bar", "orientation": "h", "name": name, "y": rows, "x": lengths}
    marker = {"color": color, "line": {"width": 0}}
    return bars | {"marker": marker, "hovertemplate": f"<b>{name}</b> {hover}<extra></extra>"}


def _axis_of(rows: Sequence[str]) -> Row:
    """Return the y axis of bars, with the first row at the top."""
    return {
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "fixedrange": True,
        "showgrid": False,
    }


def reward_panel(run: ReportedRun) -> Panel | None:
    kind = run.kind
    panel = Panel(title=kind.title, unit=kind.unit)
    steps, rewards = series(run.metrics, kind.key)
    window = mean_window(len(steps))
    if steps:
        label = kind.name if window == 1 else f"{kind.name}, mean of {window} steps"
        panel.draw("bold", "--blue", label, *_line("--blue", steps, rewards))
    if window > 1:
        panel.draw("thin", "--blue", f"{kind.name}, each step")
    drawn = list(rewards)
    marks = (("--orange", "circle"), ("--teal", "diamond-open"))
    for (way, key), (color, symbol) in zip(kind.evaluations.items(), marks, strict=False):
        steps, scores = series(run.metrics, key)
        if not steps:
            continue
        label = f"held-out, {way}" if way else "held-out"
        size, width = (9, 2) if len(steps) <= 40 else (5, 1)
        marker = {
            "color": color,
            "symbol": symbol,
            "size": size,
            "line": {"width": width, "color": color},
        }
        trace: Trace = {"name": label, "mode": "markers", "marker": marker, "cliponaxis": False}
        panel.draw(
            symbol, color, label, trace | {"hovertemplate": "%{y:.4~g}"} | _points(steps, scores)
        )
        drawn += scores
    if not drawn:
        return None
    if kind.measure != "loss" and min(drawn) >= 0 and max(drawn) <= 1:
        panel.y_axis = {"range": [0, 1.03]}
    return panel


def signal_panel(rows: Sequence[Row], title: str, key: str, unit: str) -> Panel | None:
    steps, values = series(rows, key)
    if not steps:
        return None
    panel = Panel(title=title, unit=unit, y_axis=Y_AXES.get(key, {}), last=amount(values[-1]))
    if key == "response_length/mean":
        max_steps, longest = series(rows, "response_length/max")
        if longest:
            line = {"color": "--orange", "width": 1}
            trace: Trace = {"name": "longest", "mode": "lines", "line": line, "opacity": 0.6}
            panel.traces.append(trace | _points(max_steps, longest))
            panel.legend = [("bold", "--blue", "mean"), ("thin", "--orange", "longest")]
    panel.traces += _line("--blue", steps, values)
    return panel


def load_panel(run: ReportedRun) -> Panel | None:
    """Return the chart of the share of time that the controllers' own code is on the processor, if it is recorded."""
    panel = Panel(
        title="Controller load",
        unit="processor time of its own code, share of a step",
        y_axis={"rangemode": "tozero", "tickformat": "~p"},
    )
    for key, name, color in (("max", "busiest", "--orange"), ("mean", "mean", "--teal")):
        steps, loads = series(run.metrics, f"controller/load/{key}")
        if steps:
            line = _line(color, steps, loads)[-1] | {"name": name, "hovertemplate": "%{y:.3~p}"}
            panel.draw("bold", color, name, line)
            panel.last = panel.last or f"{100 * loads[-1]:.3g}%"
    if not panel.last:
        return None
    return panel


def age_panel(run: ReportedRun) -> Panel | None:
    """Return the histogram of the groups' ages at each step, stacked, if it is recorded."""
    rows = [row for row in run.metrics if "sampling/age/mean" in row]
    steps, oldest = series(rows, "sampling/age/max")
    if not steps:
        return None
    panel = Panel(
        title="Age of samples",
        unit="weight versions, share of the groups of a step",
        y_axis={"range": [0, 1], "tickformat": ".0%"},
        last=amount(series(rows, "sampling/age/mean")[1][-1]),
    )
    for age in range(int(max(oldest)) + 1):
        shares = [number(row.get(f"sampling/age/share/{age}")) or 0.0 for row in rows]
        color = _AGE_COLORS[age % len(_AGE_COLORS)]
        panel.draw("box", color, str(age), _area(str(age), color, "%{y:.0%}", steps, shares))
    return panel


def stage_panel(run: ReportedRun) -> Panel | None:
    """Return the chart of the seconds of each stage; those that we do not know by name are summed as 'other'."""
    rows = [row for row in run.metrics if number(row.get("timing_s/step")) is not None]
    steps, step_times = series(rows, "timing_s/step")
    times = {stage: [0.0] * len(rows) for stage in (*STAGES, "other")}
    for index, row in enumerate(rows):
        for key, value in row.items():
            stage = key.removeprefix("timing_s/")
            # An evaluation is after the step.
            if stage not in (key, "step", "val"):
                times[stage if stage in STAGES else "other"][index] += number(value) or 0.0
    stages = {stage: seconds for stage, seconds in times.items() if any(seconds)}
    if not stages:
        return None
    panel = Panel(
        title="Where the time of a step goes",
        unit="seconds, stages stacked; where stages overlap, the stack is higher than the whole step",
        y_axis={"rangemode": "tozero", "ticksuffix": " s"},
        last=duration(step_times[-1]),
    )
    for stage, seconds in stages.items():
        color = f"--{stage}"
        area = _area(stage, color, "%{y:.3~s}s", steps, seconds)
        panel.draw("box", color, f"{stage} {sum(seconds) / max(sum(step_times), 1e-12):.0%}", area)
    line = {"color": "--ink", "width": 1}
    step: Trace = {
        "name": "whole step",
        "mode": "lines",
        "line": line,
        "hovertemplate": "%{y:.3~s}s",
    }
    panel.draw("bold", "--ink", "whole step", step | _points(steps, step_times))
    return panel


def ledger_panel(steps: Sequence[StepSpans]) -> Panel | None:
    """Return a bar for each role; None: nothing is recorded."""
    ledger = Ledger.of(step.intervals() for step in steps)
    roles = [role for role, total_ns in ledger.total_ns.items() if total_ns]
    if not roles:
        return None
    panel = Panel(
        title="Ledger",
        unit=f"share of each role's device time; steps {steps[0].step:,} to {steps[-1].step:,}",
        y_axis=_axis_of(roles),
        last=f"{ledger.idle_share():.0%} idle",
        layout={"barmode": "stack", "hovermode": "closest"}
        | {"xaxis": {"title": {}, "range": [0, 1], "tickformat": ".0%"}},
    )
    causes = 0
    for column in ledger.device_ns[roles[0]]:
        shares = [ledger.share(column, role) for role in roles]
        if not any(shares):
            continue
        color = _COLORS.get(column) or _CAUSE_COLORS[causes % len(_CAUSE_COLORS)]
        causes += column not in _COLORS
        name = column.replace("_", " ")
        bar = _bars(name, color, roles, [round(share, 5) for share in shares], "%{x:.1%}<br>%{y}")
        panel.draw("box", color, f"{name} {ledger.share(column):.0%}", bar)
    return panel


def timeline(steps: Sequence[StepSpans]) -> Row | None:
    """Return the stages of every controller and device in the last steps that can be drawn; None: none is recorded.

    They are a chart (``panel``), its caption (``seen``), and the ranges to choose from (``views``).
    """
    num_controllers = max((len(step.controllers) for step in steps), default=0)
    controllers = [f"controller {rank}" for rank in range(num_controllers)]
    devices = sorted(set(chain.from_iterable(step.devices for step in steps)), key=kind_and_number)
    groups = [controllers]
    groups.extend(
        list(names) for _, names in groupby(devices, key=lambda name: kind_and_number(name)[0])
    )
    drawn: list[str] = []
    for names in groups:
        stride = max(1, -(-len(names) // MAX_ROWS))
        drawn.extend(names[::stride])
    if not drawn:
        return None
    shown = _last_steps(steps, drawn)
    zero_s = shown[0].start_s
    end_s = max(step.end_s for step in shown)
    bars = _bars_of_stages(drawn, shown, zero_s, end_s)
    total_s = sum(length_s for _, length_s, *_ in chain.from_iterable(bars.values()))
    first = min(FIRST_VIEW_STEPS, len(shown))
    views: list[Row] = []
    for count in sorted({1, first, len(shown)}):
        range_s = [shown[-count].start_s - zero_s, end_s - zero_s]
        label = f"Last {count} steps" if count > 1 else "Last step"
        views.append({"label": label, "range_s": range_s, "is_first": count == first})
    line = {
        "type": "line",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
    }
    panel = Panel(
        title="Timeline",
        unit="seconds since the first step shown; a dotted line is the start of a step; drag to zoom in",
        y_axis=_axis_of(drawn) | {"dtick": 1},
        last=duration(shown[-1].end_s - shown[-1].start_s),
        layout={
            "barmode": "overlay",
            "bargap": 0.3,
            "hovermode": "closest",
            "xaxis": {
                "title": {},
                "range": [shown[-first].start_s - zero_s, end_s - zero_s],
                "ticksuffix": " s",
            },
            "shapes": [line | dict.fromkeys(("x0", "x1"), step.start_s - zero_s) for step in shown],
        },
    )
    for stage, stage_bars in bars.items():
        color = "--grid" if stage == _IDLE else f"--{stage}"
        hover = "%{customdata[1]}<br>%{y}, step %{customdata[0]}"
        names, lengths_s, starts_s, hover_data = zip(*stage_bars, strict=True)
        trace = _bars(stage, color, names, [round(length_s, 4) for length_s in lengths_s], hover)
        label = f"{stage} {sum(lengths_s) / max(total_s, 1e-9):.0%}"
        panel.draw("box", color, label, trace | {"base": starts_s, "customdata": hover_data})
    num_rows = len(controllers) + len(devices)
    caption = (
        f"Steps {shown[0].step:,} to {shown[-1].step:,}"
        if len(shown) > 1
        else f"Step {shown[0].step:,}"
    )
    if len(drawn) < num_rows:
        caption += f"; {len(drawn)} of {num_rows:,} controllers and devices"
    caption += ". Light stretches are in no stage: a row waits there, or does what has no stage."
    return {"panel": panel, "seen": caption, "num_rows": len(drawn), "views": views}


def kind_and_number(name: str) -> tuple[str, int]:
    role, _, number = name.rpartition(" ")
    return (role, int(number)) if number.isdecimal() else (name, 0)


def _by_row(step: StepSpans) -> dict[str, list[Span]]:
    return {
        f"controller {rank}": spans for rank, spans in enumerate(step.controllers)
    } | step.devices


def _last_steps(steps: Sequence[StepSpans], drawn: Sequence[str]) -> Sequence[StepSpans]:
    """Return as many of the last steps as fit, at least one."""
    num_spans = 0
    for first in reversed(range(len(steps))):
        rows = _by_row(steps[first])
        num_spans += sum(len(rows.get(name, ())) for name in drawn)
        if num_spans > MAX_SPANS:
            return steps[min(first + 1, len(steps) - 1) :]
    return steps


def _bars_of_stages(
    drawn: Sequence[str], steps: Sequence[StepSpans], zero_s: float, end_s: float
) -> dict[str, list[tuple[str, float, float, list[Any]]]]:
    """Return the bars of each stage that has any: row, length, start, and what is shown at the pointer.

    A row has no gaps: time in no stage is a bar, too.
    """
    bars = {stage: list[Any]() for stage in (*STAGES, "other", _IDLE)}
    rows = [(step, _by_row(step)) for step in steps]

    def add(stage: str, name: str, step: StepSpans, start_s: float, stop_s: float) -> None:
        if stop_s > start_s:
            length_s = stop_s - start_s
            bars[stage].append(
                (name, length_s, round(start_s - zero_s, 4), [step.step, duration(length_s)])
            )

    for name in drawn:
        reached_s = zero_s
        for step, spans in rows:
            for span in spans.get(name, ()):
                start_s = step.start_s + span.start_s
                stop_s = step.start_s + span.end_s
                add(_IDLE, name, step, reached_s, start_s)
                add(span.stage if span.stage in STAGES else "other", name, step, start_s, stop_s)
                reached_s = max(reached_s, stop_s)
        add(_IDLE, name, steps[-1], reached_s, end_s)
    return {stage: stage_bars for stage, stage_bars in bars.items() if stage_bars}
