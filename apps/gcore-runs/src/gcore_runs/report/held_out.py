"""The page's charts and table of held-out sets: greedy, avg@n, pass@k and maj@k, with their standard errors."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from gcore_runs.report.panels import Panel, Trace, amount
from gcore_runs.report.run import Run, series

MAX_SETS = 24
"""Most sets, and data sources of sets, that are shown."""
_METRIC = re.compile(r"val/(?:(?P<set>.+)/)?(?P<key>greedy|(?:avg|pass|maj)@\d+)")
_COLORS = {"greedy": "--orange", "avg": "--teal", "pass": "--blue", "maj": "--prepare"}


class SetRow(NamedTuple):
    """One metric of a set in its first and its last evaluation; the name is empty but in the first row of a set."""

    name: str
    key: str
    first: str
    last: str


def set_panels(run: Run) -> list[Panel]:
    """Return a chart for each set, with the largest k of each metric; none if there is no evaluation of sets."""
    panels: list[Panel] = []
    for name, keys in _sets(run).items():
        panel = Panel(title=name, unit="mean over prompts, with its standard error", y_axis={"rangemode": "tozero"})
        largest = {key.partition("@")[0]: key for key in keys}
        for kind, color in _COLORS.items():
            if kind in largest:
                metric = keys[largest[kind]]
                steps, means = series(run.metrics, metric)
                errors = [row.get(f"{metric}/stderr", 0.0) for row in run.metrics if metric in row]
                line = {"color": color, "width": 2.25}
                trace: Trace = {"name": largest[kind], "mode": "lines+markers", "line": line, "x": steps, "y": means}
                trace["marker"] = {"color": color, "size": 5}
                trace["error_y"] = {"array": errors, "color": color, "thickness": 1, "width": 2}
                panel.draw("bold", color, largest[kind], trace | {"hovertemplate": "%{y:.4~g}"})
                panel.last = panel.last or amount(means[-1])
        panels.append(panel)
    return panels


def set_rows(run: Run) -> list[SetRow]:
    """Return the table of all metrics of the sets."""
    rows: list[SetRow] = []
    for name, keys in _sets(run).items():
        for place, (key, metric) in enumerate(keys.items()):
            _, means = series(run.metrics, metric)
            _, errors = series(run.metrics, f"{metric}/stderr")
            error = f" ± {amount(errors[-1])}" if errors else ""
            rows.append(SetRow("" if place else name, key, amount(means[0]), amount(means[-1]) + error))
    return rows


def _sets(run: Run) -> dict[str, dict[str, str]]:
    """Return the metrics of each set by their keys, in the order of evaluations, with k ascending."""
    found: dict[str, dict[str, str]] = {}
    names: Sequence[str] = list(dict.fromkeys(name for row in run.metrics for name in row))
    for name in names:
        if (match := _METRIC.fullmatch(name)) and series(run.metrics, name)[0]:
            found.setdefault(match["set"] or "all without a name", {})[match["key"]] = name
    return dict(list(found.items())[:MAX_SETS])
