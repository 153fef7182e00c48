"""The page that shows a run: `report.html`, one file that opens from disk, without a network.

How it looks is in `page.html.j2`.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from gcore_runs.report.charts import MAX_POINTS, load_panel, mean_window, reward_panel, signal_panel, stage_panel
from gcore_runs.report.kinds import Kind
from gcore_runs.report.ledger import ledger_panel
from gcore_runs.report.run import Run, read_run, series
from gcore_runs.report.summary import paired_samples, reward_seen, samples_seen, tiles, warmup_seen
from gcore_runs.report.timeline import timeline

MAX_SAMPLES = 32


def render_report(run_dir: Path, kinds: Mapping[str, Kind]) -> Path:
    """Writes `report.html` of the run in `run_dir`, whole or not at all; an earlier one is replaced.

    The run may be finished, in progress or just started: what is not there yet is said on the page.

    Args:
        run_dir: the run's folder.
        kinds: what runs are about, by the `command` in their settings; that of a run which names none is ``train``.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: `run_dir` is not a run's folder.
    """
    page = _render(read_run(run_dir, kinds))
    path = run_dir / "report.html"
    temporary = run_dir / f".report.html.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _render(run: Run) -> str:
    """Return the page, with Plotly's code in it."""
    # Wanted only here, while the command line imports this module at every start.
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    source = files("gcore_runs").joinpath("report/page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    samples = paired_samples(run)
    signals = [*(signal_panel(run.metrics, *signal) for signal in run.kind.signals), load_panel(run)]
    return template.from_string(source).render(
        run=run,
        tiles=tiles(run),
        reward=reward_panel(run),
        reward_seen=reward_seen(run),
        warmup=signal_panel(run.warmup, "Warm-up loss", "sft/loss", "cross-entropy, nats per token"),
        warmup_seen=warmup_seen(run),
        stages=stage_panel(run),
        timeline=timeline(run.spans),
        ledger=ledger_panel(run.spans),
        signals=[panel for panel in signals if panel],
        unrecorded=[title for title, key, _ in run.kind.signals if not series(run.metrics, key)[0]],
        window=mean_window(len(series(run.metrics, run.kind.key)[0])),
        is_thinned=len(run.metrics) > MAX_POINTS,
        samples=samples[:MAX_SAMPLES],
        samples_left_out=max(0, len(samples) - MAX_SAMPLES),
        samples_seen=samples_seen(samples),
        drawn=datetime.now(UTC),
        plotly_js=get_plotlyjs(),
    )
