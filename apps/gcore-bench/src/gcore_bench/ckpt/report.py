"""Ratios to the physical limits, tables and notes of the bench of checkpoints."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from gcore_bench.ckpt.options import LIMITS, PARTS, CkptOptions
from gcore_bench.harness.report import Row, Run, figures_table, mb, summarise


def summarise_part(part: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Take medians over all rounds, and their ratios to the fastest limits.

    Returns:
        ``lines`` of the contenders and ``limits``: each a row with its ``seconds`` and ``ratios`` by metric, without
        those that it does not support, and its ``peak_extra_bytes``, the highest memory during the saves less that
        before; ``best``, the fastest limit of each metric; the first ``failures``; and the mean ``load``.
    """
    rows = {run.contender: {} for run in runs if run.contender != LIMITS} | summarise(part, runs).rows
    limits = {row: rows[row] for run in runs if run.contender == LIMITS for row in run.rows}
    metrics = dict.fromkeys(metric for figures in limits.values() for metric in figures)
    best = {m: min((row for row in limits if m in limits[row]), key=lambda row: limits[row][m]) for m in metrics}
    fastest = {metric: limits[row][metric] for metric, row in best.items()}

    def line(row: str) -> Row:
        seconds = {metric: value for metric, value in rows[row].items() if metric != "peak_bytes"}
        base = fastest | {m: seconds[of] for m, of in PARTS[part].ratio_to.items() if of in seconds}
        ratios = {m: seconds[m] / base[m] for m in PARTS[part].columns if m in seconds and base.get(m)}
        return {"row": row, "seconds": seconds, "ratios": ratios, "peak_extra_bytes": rows[row].get("peak_bytes")}

    return {
        "part": part,
        "lines": [line(row) for row in rows if row not in limits],
        "limits": [line(row) for row in limits],
        "best": best,
        "failures": {run.contender: run.failure for run in reversed(runs) if run.failure},
        "load": fmean(run.load for run in runs),
    }


def part_table(summary: dict[str, Any], options: CkptOptions) -> Table:
    """Return a table with a row for each contender, and then the limits that their ratios are taken to."""
    part = PARTS[summary["part"]]
    ranks = f", {options.ranks} save, {options.ranks // 2} load" if summary["part"] == "ranks" else ""
    with_peak = any(line["peak_extra_bytes"] is not None for line in summary["lines"])
    title = f"{part.title}{ranks}: {options.size_gb:g} GB in {options.tensors} tensors"
    shown = figures_table(title, *part.columns.values(), *["extra MB"] * with_peak)
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {summary['load']:.1f}"
    for lines in (summary["lines"], summary["limits"]):
        shown.add_section()
        for line in lines:
            cells = [_cell(line, metric) for metric in part.columns]
            shown.add_row(line["row"], *cells, *[mb(line["peak_extra_bytes"])] * with_peak)
    return shown


def _cell(line: Row, metric: str) -> str:
    if metric not in line["seconds"]:
        return "-"
    ratio = f" ({_short(line['ratios'][metric], 2)}x)" if metric in line["ratios"] else ""
    return _short(line["seconds"][metric], 3) + ratio


def _short(value: float, decimals: int) -> str:
    """Format with two decimals fewer from 10 on, because the table is wide."""
    return f"{value:.{decimals if value < 10 else decimals - 2}f}"


def notes(options: CkptOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines = [
        "A process for each run, the same bytes for all, one save before the measured one. stall: until the state may "
        "be changed, the whole call if there is no asynchronous save. durable: until all files are synced; what "
        "a library leaves unsynced (torch.save and safetensors everything, DCP and tensorstore their folder, Orbax "
        "its metadata) the bench syncs and counts.",
        "Cold: the files are out of the page cache; warm: they are in it. Into fresh memory, or in place. What each "
        "contender loads is compared bitwise with what it saved. (x): over the fastest limit of the column.",
        "memcpy and the reads marked huge use memory in huge pages, the other reads into fresh memory small ones.",
        "extra MB: highest resident memory of all processes while saving, less that before the first save.",
    ]
    if "loop" in options.part_names:
        lines.append(
            "Steps of 0.2 s: matrix products of one thread, and pure Python, which shares the interpreter lock with "
            "the thread of a save. (x): over the same steps with no save in flight."
        )
    return lines
