"""The HTML page of comparisons: one file without scripts, which opens from disk; see ``page.html.j2``."""

from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from gcore_placement.errors import make_extra_error
from gcore_placement.simulation.role_run import RoleRun
from gcore_placement.simulation.simulator import IDLE, WORK, Comparison

try:
    from jinja2 import Environment, StrictUndefined
except ModuleNotFoundError as error:
    raise make_extra_error("jinja2", "cli") from error

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
_LINES = {
    "colocated": "#888888",
    "split": "#2f6fb0",
    "dynamic": "#d9664a",
    "clairvoyant": "#3fa06b",
}
_NUM_MOMENTS = 400


def page(comparison: Comparison, timelines: Sequence[tuple[str, tuple[RoleRun, RoleRun]]]) -> str:
    """Return the page: a table, bars of device-seconds, lines over the steps, and timelines.

    A timeline, of the runs of one wave, shows the devices that are busy over time.
    """
    source = files("gcore_placement").joinpath("cli/page.html.j2").read_text(encoding="utf-8")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    step_lines: list[tuple[str, list[float]]] = []
    share_lines: list[tuple[str, list[float]]] = []
    for run in comparison.runs:
        step_lines.append((run.strategy, [step.seconds for step in run.steps]))
        if run.strategy != "colocated":
            shares = [step.partitions[0].devices[0] / run.num_devices for step in run.steps]
            share_lines.append((run.strategy, shares))
    waves: list[dict[str, object]] = []
    for title, (generation, reward) in timelines:
        end_s = max(reward.finish_s)
        busy = [
            ("generation", _count_busy(generation, end_s)),
            ("reward", _count_busy(reward, end_s)),
        ]
        waves.append({"title": title, "seconds": end_s, "busy": busy})
    return template.from_string(source).render(
        comparison=comparison,
        runs=comparison.runs,
        columns=WORK + IDLE,
        colours=COLOURS,
        line_colours=_LINES,
        step_lines=step_lines,
        longest_step_s=max(max(seconds) for _, seconds in step_lines),
        share_lines=share_lines,
        waves=waves,
    )


def _count_busy(run: RoleRun, end_s: float) -> list[int]:
    """Return the number of busy replicas at moments from 0 to the end of a wave."""
    moments = np.linspace(0, end_s, _NUM_MOMENTS)
    _, busy_from, busy_to = np.array(run.busy).T
    started = np.searchsorted(np.sort(busy_from), moments, side="right")
    ended = np.searchsorted(np.sort(busy_to), moments, side="right")
    return (started - ended).tolist()
