"""The HTML page of comparisons: one file without scripts, which opens from disk."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from gcore_placement.quantities import Floats
from gcore_placement.simulation.continuous_batching import EngineRun
from gcore_placement.simulation.simulator import IDLE, WORK, Comparison, StrategyRun

COLOURS = {
    "generation": "#2f6fb0",
    "reward": "#3fa06b",
    "preparation": "#8a6fb8",
    "training": "#5b4a9c",
    "weight_sync": "#8fa3b8",
    "long_tail": "#e0a03a",
    "waiting_for_reward": "#d9664a",
    "waiting_for_weights": "#c9b28a",
    "swap": "#a33b3b",
    "imbalance": "#e8c96a",
    "unassigned": "#b8b8b8",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
svg { display: block; width: 100%; height: auto; margin: .5rem 0 1rem; }
svg text { font: 12px system-ui, sans-serif; fill: #333; }
.key span { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8em; height: .8em; }
"""
_WIDTH = 1000
_LABEL = 110
_AT_END = ' text-anchor="end"'
_LINES = {
    "colocated": "#888888",
    "split": "#2f6fb0",
    "dynamic": "#d9664a",
    "clairvoyant": "#3fa06b",
}


def page(
    comparison: Comparison, timelines: Sequence[tuple[str, tuple[EngineRun, EngineRun]]]
) -> str:
    """Return the page: a table, bars of device-seconds, lines over the steps, and timelines.

    A timeline, of the runs of one wave, shows the devices that are busy over time.
    """
    parts = [_render_comparison(comparison), "<h2>Busy replicas over one wave</h2>"]
    for name, runs in timelines:
        parts.append(f"<h3>{escape(name)}</h3>{_draw_timeline(runs)}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>gcore-placement simulate</title>'
        f"<style>{_STYLE}</style><h1>Placement strategies, simulated</h1>{''.join(parts)}</html>\n"
    )


def _render_comparison(comparison: Comparison) -> str:
    runs = comparison.runs
    columns = (
        "strategy",
        "seconds a step",
        "against dynamic",
        "idle, of device-seconds",
        "moves",
        "waves with loans",
    )
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = "".join(
        f"<tr><td>{run.strategy}</td><td>{run.step_s:,.1f} s</td>"
        f"<td>{run.seconds / comparison['dynamic'].seconds:.2f} x</td>"
        f"<td>{run.idle_share:.1%}</td><td>{run.num_moves}</td><td>{run.num_loans}</td></tr>"
        for run in runs
    )
    key = "".join(
        f'<span><i style="background:{COLOURS[name]}"></i> {name.replace("_", " ")}</span>'
        for name in WORK + IDLE
    )
    step_lines: list[tuple[str, Floats]] = []
    for run in runs:
        seconds = [step.seconds for step in run.steps]
        step_lines.append((run.strategy, np.array(seconds)))
    share_lines: list[tuple[str, Floats]] = []
    for run in runs[1:]:
        shares = [step.partitions[0].devices[0] / run.num_devices for step in run.steps]
        share_lines.append((run.strategy, np.array(shares)))
    return (
        f"<h2>{escape(comparison.name)}, {comparison.num_devices:,} devices, {len(runs[0].steps)} steps</h2>"
        f"<table><tr>{head}</tr>{rows}</table><h3>Where device-seconds go</h3>{_draw_bars(runs)}"
        f'<p class="key">{key}</p>'
        f"<h3>Seconds of each step</h3>{_draw_lines(step_lines, '{:,.0f} s')}"
        f"<h3>Share of devices that generate, in a step's first wave</h3>{_draw_lines(share_lines, '{:.0%}', top=1.0)}"
    )


def _draw_bars(runs: Sequence[StrategyRun]) -> str:
    """Draw one bar per strategy: device-seconds by column; the length of a bar is that of its steps."""
    longest = max(run.seconds for run in runs)
    shapes: list[str] = []
    for row, run in enumerate(runs):
        y = 4 + 30 * row
        x = float(_LABEL)
        shapes.append(_draw_text(0, y + 16, run.strategy))
        for name in WORK + IDLE:
            width = run.share(name) * run.seconds / longest * (_WIDTH - _LABEL)
            title = f"{name.replace('_', ' ')}: {run.share(name):.1%}"
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="22" fill="{COLOURS[name]}">'
                f"<title>{title}</title></rect>"
            )
            x += width
    y = 30 * len(runs) + 16
    shapes.append(_draw_text(_LABEL, y, "0 s"))
    shapes.append(_draw_text(_WIDTH, y, f"{longest / len(runs[0].steps):,.0f} s, a step", _AT_END))
    return _render_svg(shapes, y + 8)


def _draw_lines(lines: Sequence[tuple[str, Floats]], unit: str, *, top: float | None = None) -> str:
    """Draw values over steps, from 0 up; `unit` formats them."""
    height = 180
    margin = 80
    highest = top or max(float(values.max()) for _, values in lines)
    shapes: list[str] = []
    for share, y in ((0.0, height), (0.5, height / 2 + 5), (1.0, 10)):
        shapes.append(f'<line x1="{margin}" y1="{y}" x2="{_WIDTH}" y2="{y}" stroke="#ddd"/>')
        shapes.append(_draw_text(0, y + 4, unit.format(share * highest)))
    for number, (name, values) in enumerate(lines):
        x = margin + np.arange(len(values)) * (_WIDTH - margin) / max(1, len(values) - 1)
        y = height - values / highest * (height - 10)
        colour = _LINES[name]
        shapes.append(
            f'<polyline points="{_list_points(x, y)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        shapes.append(
            _draw_text(margin + 110 * number, height + 38, name, f' style="fill:{colour}"')
        )
    shapes.append(_draw_text(margin, height + 18, "step 0"))
    shapes.append(_draw_text(_WIDTH, height + 18, f"step {len(lines[0][1]) - 1}", _AT_END))
    return _render_svg(shapes, height + 46)


def _draw_timeline(runs: tuple[EngineRun, EngineRun]) -> str:
    """Draw the number of busy replicas of each role over the wave, scaled to its maximum."""
    end = float(runs[1].finish.max())
    shapes: list[str] = []
    for row, (name, run) in enumerate(zip(("generation", "reward"), runs, strict=True)):
        moments = np.linspace(0, end, 400)
        _, busy_from, busy_to = run.busy
        busy = np.searchsorted(np.sort(busy_from), moments, side="right")
        busy = busy - np.searchsorted(np.sort(busy_to), moments, side="right")
        base = 70 + 75 * row
        highest = max(1, int(busy.max()))
        x = _LABEL + moments / end * (_WIDTH - _LABEL)
        points = _list_points(x, base - 60 * busy / highest)
        shapes.append(_draw_text(0, base - 36, name))
        shapes.append(_draw_text(0, base - 20, f"{highest:,} replicas"))
        shapes.append(
            f'<polygon points="{_LABEL},{base} {points} {_WIDTH},{base}" fill="{COLOURS[name]}"/>'
        )
    shapes.append(_draw_text(_LABEL, 162, "0 s"))
    shapes.append(_draw_text(_WIDTH, 162, f"{end:,.0f} s", _AT_END))
    return _render_svg(shapes, 168)


def _list_points(x: Floats, y: Floats) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _draw_text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}"{attributes}>{text}</text>'


def _render_svg(shapes: Iterable[str], height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(shapes)}</svg>'
