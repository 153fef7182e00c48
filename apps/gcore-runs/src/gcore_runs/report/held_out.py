"""The page's charts and table of held-out sets: greedy, avg@n, pass@k and maj@k, with their standard errors."""

import re

from gcore_runs.report.panels import Panel, Trace, amount
from gcore_runs.report.run import ReportedRun, Row, metric_names, series

MAX_SETS = 24
"""Most sets, and data sources of sets, that are shown."""
_METRIC = re.compile(r"val/(?:(?P<set>.+)/)?(?P<key>greedy|(?:avg|pass|maj)@\d+)")
_COLORS = {"greedy": "--orange", "avg": "--teal", "pass": "--blue", "maj": "--prepare"}


def set_panels(run: ReportedRun) -> list[Panel]:
    """Return a chart for each set, with the largest k of each metric; none if there is no evaluation of sets."""
    panels: list[Panel] = []
    for name, keys in _sets(run).items():
        panel = Panel(
            title=name,
            unit="mean over prompts, with its standard error",
            y_axis={"rangemode": "tozero"},
        )
        largest = {key.partition("@")[0]: key for key in keys}
        for prefix, color in _COLORS.items():
            if prefix not in largest:
                continue
            key = largest[prefix]
            metric = keys[key]
            steps, means = series(run.metrics, metric)
            errors = [row.get(f"{metric}/stderr", 0.0) for row in run.metrics if metric in row]
            line = {"color": color, "width": 2.25}
            trace: Trace = {
                "name": key,
                "mode": "lines+markers",
                "line": line,
                "x": steps,
                "y": means,
            }
            trace["marker"] = {"color": color, "size": 5}
            trace["error_y"] = {"array": errors, "color": color, "thickness": 1, "width": 2}
            panel.draw("bold", color, key, trace | {"hovertemplate": "%{y:.4~g}"})
            panel.last = panel.last or amount(means[-1])
        panels.append(panel)
    return panels


def set_rows(run: ReportedRun) -> list[Row]:
    """Return all metrics of the sets, first and last; the name is empty but in the first row of a set."""
    rows: list[Row] = []
    for name, keys in _sets(run).items():
        label = name
        for key, metric in keys.items():
            _, means = series(run.metrics, metric)
            _, errors = series(run.metrics, f"{metric}/stderr")
            last = amount(means[-1])
            if errors:
                last += f" ± {amount(errors[-1])}"
            rows.append({"name": label, "key": key, "first": amount(means[0]), "last": last})
            label = ""
    return rows


def _sets(run: ReportedRun) -> dict[str, dict[str, str]]:
    """Return the metrics of each set by their keys, in the order of evaluations, with k ascending."""
    sets: dict[str, dict[str, str]] = {}
    for name in metric_names(run.metrics):
        match = _METRIC.fullmatch(name)
        if match and series(run.metrics, name)[0]:
            sets.setdefault(match["set"] or "all without a name", {})[match["key"]] = name
    return dict(list(sets.items())[:MAX_SETS])
