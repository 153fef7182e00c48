"""The page's timeline: which stage every controller and device was in, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from gcore_controller import Span
from gcore_runs.display import STAGES
from gcore_runs.report.panels import Panel, Trace, bar_trace, duration
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


class _Bar(NamedTuple):
    row: str
    step: int
    start_s: float
    seconds: float


def timeline(steps: Sequence[StepSpans]) -> Timeline | None:
    """Return the timeline of the last steps, as many as can be drawn; None: nothing is recorded."""
    controllers = [_controller(rank) for rank in range(max((len(step.controllers) for step in steps), default=0))]
    devices = sorted({name for step in steps for name in step.devices}, key=_kind_and_number)
    kinds = [list(names) for _, names in groupby(devices, key=lambda name: _kind_and_number(name)[0])]
    drawn = [name for names in (controllers, *kinds) for name in names[:: max(1, -(-len(names) // MAX_ROWS))]]
    if not drawn:
        return None
    shown = _last_steps(steps, drawn)
    zero_s, end_s = shown[0].start_s, max(step.end_s for step in shown)
    stages = _bars(drawn, shown, zero_s, end_s)
    seconds = {stage: sum(bar.seconds for bar in bars) for stage, bars in stages.items() if bars}
    total_s = max(sum(seconds.values()), 1e-9)
    views = [
        View(
            label=f"Last {count} steps" if count > 1 else "Last step",
            start_s=shown[-count].start_s - zero_s,
            end_s=end_s - zero_s,
            is_first=count == min(FIRST_VIEW_STEPS, len(shown)),
        )
        for count in sorted({1, min(FIRST_VIEW_STEPS, len(shown)), len(shown)})
    ]
    [first] = [view for view in views if view.is_first]
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    starts_s = [step.start_s - zero_s for step in shown]
    panel = Panel(
        title="Timeline",
        unit="seconds since the first step shown; a dotted line is the start of a step; drag to zoom in",
        traces=[_trace(stage, stages[stage]) for stage in seconds],
        y_axis={
            "categoryorder": "array",
            "categoryarray": drawn[::-1],
            "dtick": 1,
            "fixedrange": True,
            "showgrid": False,
        },
        legend=[("box", _color(stage), f"{stage} {own_s / total_s:.0%}") for stage, own_s in seconds.items()],
        last=duration(shown[-1].end_s - shown[-1].start_s),
        layout={
            "barmode": "overlay",
            "bargap": 0.3,
            "hovermode": "closest",
            "xaxis": {"title": {}, "range": [first.start_s, first.end_s], "ticksuffix": " s"},
            "shapes": [
                {"type": "line", "x0": at_s, "x1": at_s, "yref": "paper", "y0": 0, "y1": 1, "line": line}
                for at_s in starts_s
            ],
        },
    )
    num_rows = len(controllers + devices)
    caption = f"Steps {shown[0].step:,} to {shown[-1].step:,}" if len(shown) > 1 else f"Step {shown[0].step:,}"
    if len(drawn) < num_rows:
        caption += f"; {len(drawn)} of {num_rows:,} controllers and devices"
    caption += ". Light stretches are in no stage: a row waits there, or does what has no stage."
    return Timeline(panel=panel, seen=caption, num_rows=len(drawn), views=views)


def _controller(rank: int) -> str:
    return f"controller {rank}"


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdecimal() else (name, 0)


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


def _bars(drawn: Sequence[str], steps: Sequence[StepSpans], zero_s: float, end_s: float) -> dict[str, list[_Bar]]:
    """Return the bars of each stage; a row has no gaps: time in no stage is one, too."""
    found: dict[str, list[_Bar]] = {stage: [] for stage in (*STAGES, "other", _IDLE)}
    rows = [(step, _by_row(step)) for step in steps]

    def add(stage: str, name: str, step: StepSpans, start_s: float, stop_s: float) -> None:
        if stop_s > start_s:
            found[stage].append(_Bar(name, step.step, start_s - zero_s, stop_s - start_s))

    for name in drawn:
        reached_s = zero_s
        for step, spans in rows:
            for span in spans.get(name, ()):
                start_s, stop_s = step.start_s + span.start_s, step.start_s + span.end_s
                add(_IDLE, name, step, reached_s, start_s)
                add(span.stage if span.stage in STAGES else "other", name, step, start_s, stop_s)
                reached_s = max(reached_s, stop_s)
        add(_IDLE, name, steps[-1], reached_s, end_s)
    return found


def _trace(stage: str, bars: Sequence[_Bar]) -> Trace:
    hover = "%{customdata[1]}<br>%{y}, step %{customdata[0]}"
    return bar_trace(
        stage, _color(stage), [bar.row for bar in bars], [round(bar.seconds, 4) for bar in bars], hover
    ) | {
        "base": [round(bar.start_s, 4) for bar in bars],
        "customdata": [[bar.step, duration(bar.seconds)] for bar in bars],
    }


def _color(stage: str) -> str:
    return "--grid" if stage == _IDLE else f"--{stage}"
