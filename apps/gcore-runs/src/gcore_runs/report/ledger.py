"""The page's ledger: a bar for each role, of work and of causes of idleness."""

from collections.abc import Sequence

from gcore_placement import Ledger, StepIntervals
from gcore_runs.report.charts import Panel, Trace
from gcore_runs.spans import StepSpans

_COLORS = {
    "generation": "--gen",
    "reward": "--reward",
    "preparation": "--prepare",
    "training": "--train",
    "weight_sync": "--sync",
    "unassigned": "--grid",
}
_CAUSE_COLORS = ("--other", "--muted", "--line")
"""Colours that distinguish neighbouring causes, whose names are shown at the pointer."""


def ledger(steps: Sequence[StepSpans]) -> Ledger:
    """Return where the devices' time went within the steps, without the time between steps."""
    return Ledger.of(
        StepIntervals.of(
            step.step,
            [[(span.stage, span.start_s, span.end_s) for span in spans] for spans in step.controllers],
            {name: [(span.stage, span.start_s, span.end_s) for span in spans] for name, spans in step.devices.items()},
        )
        for step in steps
    )


def ledger_panel(steps: Sequence[StepSpans]) -> Panel | None:
    """Return a bar for each role; None: nothing is recorded."""
    found = ledger(steps)
    roles = [role for role, total_ns in found.total_ns.items() if total_ns]
    if not roles:
        return None
    traces: list[Trace] = []
    legend: list[tuple[str, str, str]] = []
    causes = 0
    for column in found.device_ns[roles[0]]:
        shares = [found.share(column, role) for role in roles]
        if not any(shares):
            continue
        color = _COLORS.get(column) or _CAUSE_COLORS[causes % len(_CAUSE_COLORS)]
        causes += column not in _COLORS
        name = column.replace("_", " ")
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": roles,
                "x": [round(share, 5) for share in shares],
                "marker": {"color": color, "line": {"width": 0}},
                "hovertemplate": f"<b>{name}</b> %{{x:.1%}}<br>%{{y}}<extra></extra>",
            }
        )
        legend.append(("box", color, f"{name} {found.share(column):.0%}"))
    return Panel(
        title="Ledger",
        unit=f"share of each role's device time; steps {steps[0].step:,} to {steps[-1].step:,}",
        traces=traces,
        y_axis={"categoryorder": "array", "categoryarray": roles[::-1], "fixedrange": True, "showgrid": False},
        legend=legend,
        last=f"{found.idle_share():.0%} idle",
        layout={
            "barmode": "stack",
            "hovermode": "closest",
            "xaxis": {"title": {}, "range": [0, 1], "tickformat": ".0%"},
        },
    )
