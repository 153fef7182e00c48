"""The curves of the part sim on a page that needs no network."""

from collections.abc import Sequence
from pathlib import Path

from plotly.graph_objects import Scatter
from plotly.subplots import make_subplots

from gcore_bench.controller.scaling import ScalingRow

_TITLES = ("busiest controller, share of a core", "simulated step, s")


def write_page(path: Path, rows: Sequence[ScalingRow]) -> None:
    """Draw load and step time over the number of devices, with a line for each number of controllers."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=_TITLES)
    for color, most in zip(_colors(), dict.fromkeys(row.most_controllers for row in rows), strict=False):
        line = [row for row in rows if row.most_controllers == most]
        name = "1 controller" if most == 1 else f"up to {most} controllers"
        for column, values in enumerate(([row.load for row in line], [row.step_s for row in line]), start=1):
            trace = Scatter(
                x=[row.devices for row in line],
                y=values,
                name=name,
                mode="lines+markers",
                line={"color": color},
                showlegend=column == 1,
            )
            figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(type="log", title_text="devices")
    figure.update_yaxes(type="log", tickformat="~%", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_layout(title_text="Controllers of simulated clusters", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def _colors() -> list[str]:
    return ["#d95f02", "#1f5fa8", "#1b9e77", "#7570b3", "#e7298a", "#666666"]
