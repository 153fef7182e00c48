"""The page's timeline: which stage every controller and device was in, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gcore_controller import Span
from gcore_runs.display import STAGES
from gcore_runs.report.panels import Panel, Trace, duration
from gcore_runs.report.run import Row
from gcore_runs.run_folder import StepSpans

MAX_ROWS = 24
"""Most rows of controllers, and of each kind of device; if there are more, every second or n-th is shown."""

MAX_SPANS = 4000
"""Most spans of the timeline; if there are more, fewer steps are shown."""

FIRST_VIEW_STEPS = 5
"""Steps in view when the page is opened."""

_IDLE = "no stage"


@dataclass(frozen=True, kw_only=True)
class View:
    """A range of time to look at, in the timeline's seconds."""

    label: str
    start_s: float
    end_s: float
    is_first: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The chart, its caption, and the ranges to choose from."""

    panel: Panel
    seen: str
    num_rows: int
    views: list[View]


@dataclass(frozen=True, kw_only=True)
class _Bar:
    row: str
    step: int
    stage: str
    start_s: float
    end_s: float


def timeline(steps: Sequence[StepSpans]) -> Timeline | None:
    """Return the timeline of the last steps, as many as can be drawn; None: nothing is recorded."""
    controllers = [_controller(rank) for rank in range(max((len(step.controllers) for step in steps), default=0))]
    devices = sorted({name for step in steps for name in step.devices}, key=_kind_and_number)
    kinds = [list(names) for _, names in groupby(devices, key=lambda name: _kind_and_number(name)[0])]
    drawn = [name for names in (controllers, *kinds) for name in _thinned(names)]
    if not drawn:
        return None
    shown = _last_steps(steps, drawn)
    zero_s, end_s = shown[0].start_s, max(step.end_s for step in shown)
    rows = [(step, _by_row(step)) for step in shown]
    bars = [bar for name in drawn for bar in _bars(name, rows, zero_s, end_s)]
    stages = {stage: [bar for bar in bars if bar.stage == stage] for stage in (*STAGES, "other", _IDLE)}
    views = [
        View(
            label=f"Last {count} steps" if count > 1 else "Last step",
            start_s=shown[-count].start_s - zero_s,
            end_s=end_s - zero_s,
            is_first=count == min(FIRST_VIEW_STEPS, len(shown)),
        )
        for count in sorted({1, min(FIRST_VIEW_STEPS, len(shown)), len(shown)})
    ]
    total_s = max(sum(bar.end_s - bar.start_s for bar in bars), 1e-9)
    panel = Panel(
        title="Timeline",
        unit="seconds since the first step shown; a dotted line is the start of a step; drag to zoom in",
        traces=[_trace(stage, found) for stage, found in stages.items() if found],
        y_axis={
            "categoryorder": "array",
            "categoryarray": drawn[::-1],
            "dtick": 1,
            "fixedrange": True,
            "showgrid": False,
        },
        legend=[
            ("box", _color(stage), f"{stage} {sum(bar.end_s - bar.start_s for bar in found) / total_s:.0%}")
            for stage, found in stages.items()
            if found
        ],
        last=duration(shown[-1].end_s - shown[-1].start_s),
        layout=_layout([step.start_s - zero_s for step in shown], next(view for view in views if view.is_first)),
    )
    return Timeline(
        panel=panel, seen=_seen(shown, len(controllers + devices), len(drawn)), num_rows=len(drawn), views=views
    )


def _controller(rank: int) -> str:
    return f"controller {rank}"


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdecimal() else (name, 0)


def _thinned(names: list[str]) -> list[str]:
    return names[:: max(1, -(-len(names) // MAX_ROWS))]


def _by_row(step: StepSpans) -> dict[str, list[Span]]:
    """Return the spans of a step, by the name of their row."""
    return {_controller(rank): spans for rank, spans in enumerate(step.controllers)} | step.devices


def _last_steps(steps: Sequence[StepSpans], drawn: Sequence[str]) -> Sequence[StepSpans]:
    """Return as many of the last steps as fit, at least one."""
    num_spans = 0
    for first in reversed(range(len(steps))):
        rows = _by_row(steps[first])
        num_spans += sum(len(rows.get(name, ())) for name in drawn)
        if num_spans > MAX_SPANS:
            return steps[min(first + 1, len(steps) - 1) :]
    return steps


def _bars(
    name: str, rows: Sequence[tuple[StepSpans, dict[str, list[Span]]]], zero_s: float, end_s: float
) -> Iterator[_Bar]:
    """Yield the bars of a row without gaps: time in no stage included."""
    reached_s = zero_s
    for step, spans in rows:
        for span in spans.get(name, ()):
            start_s, stop_s = step.start_s + span.start_s, step.start_s + span.end_s
            stage = span.stage if span.stage in STAGES else "other"
            for what, since_s, until_s in ((_IDLE, reached_s, start_s), (stage, start_s, stop_s)):
                if until_s > since_s:
                    yield _Bar(row=name, step=step.step, stage=what, start_s=since_s - zero_s, end_s=until_s - zero_s)
            reached_s = max(reached_s, stop_s)
    if end_s > reached_s:
        last_step = rows[-1][0].step
        yield _Bar(row=name, step=last_step, stage=_IDLE, start_s=reached_s - zero_s, end_s=end_s - zero_s)


def _trace(stage: str, bars: Sequence[_Bar]) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": stage,
        "y": [bar.row for bar in bars],
        "base": [round(bar.start_s, 4) for bar in bars],
        "x": [round(bar.end_s - bar.start_s, 4) for bar in bars],
        "customdata": [[bar.step, duration(bar.end_s - bar.start_s)] for bar in bars],
        "marker": {"color": _color(stage), "line": {"width": 0}},
        "hovertemplate": f"<b>{stage}</b> %{{customdata[1]}}<br>%{{y}}, step %{{customdata[0]}}<extra></extra>",
    }


def _color(stage: str) -> str:
    return "--grid" if stage == _IDLE else f"--{stage}"


def _layout(starts_s: Sequence[float], view: View) -> Row:
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    return {
        "barmode": "overlay",
        "bargap": 0.3,
        "hovermode": "closest",
        "xaxis": {"title": {}, "range": [view.start_s, view.end_s], "ticksuffix": " s"},
        "shapes": [
            {"type": "line", "x0": at_s, "x1": at_s, "yref": "paper", "y0": 0, "y1": 1, "line": line}
            for at_s in starts_s
        ],
    }


def _seen(shown: Sequence[StepSpans], num_rows: int, num_drawn: int) -> str:
    steps = f"Steps {shown[0].step:,} to {shown[-1].step:,}" if len(shown) > 1 else f"Step {shown[0].step:,}"
    rows = "" if num_drawn == num_rows else f"; {num_drawn} of {num_rows:,} controllers and devices"
    return f"{steps}{rows}. Light stretches are in no stage: a row waits there, or does what has no stage."
