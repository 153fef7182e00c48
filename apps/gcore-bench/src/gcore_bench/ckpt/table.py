"""The figures as a person reads them."""

from rich.table import Table

from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.parts import PARTS
from gcore_bench.ckpt.summary import Line, Summary

_NONE = "-"


def table(summary: Summary, options: CkptOptions) -> Table:
    """One part: a row a contender, then the limits that their ratios are taken to."""
    part = PARTS[summary.part]
    ranks = f", {options.ranks} save, {options.ranks // 2} load" if summary.part == "ranks" else ""
    shown = Table(
        title=f"{part.title}{ranks}: {options.size_gb:g} GB in {options.tensors} tensors",
        caption=f"medians of {options.rounds} rounds; load of the machine {summary.load:.1f}",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("", no_wrap=True)
    for column in part.columns:
        shown.add_column(column.title, justify="right")
    with_peak = any(line.peak_extra_bytes is not None for line in summary.lines)
    if with_peak:
        shown.add_column("extra MB", justify="right")
    for lines in (summary.lines, summary.limits):
        shown.add_section()
        for line in lines:
            peak = [_peak(line)] if with_peak else []
            shown.add_row(line.row, *(_cell(line, column.metric) for column in part.columns), *peak)
    return shown


def _cell(line: Line, metric: str) -> str:
    if metric not in line.seconds:
        return _NONE
    ratio = f" ({_short(line.ratios[metric], 2)}x)" if metric in line.ratios else ""
    return _short(line.seconds[metric], 3) + ratio


def _short(value: float, decimals: int) -> str:
    """Two decimals fewer from 10 on: the table is wide."""
    return f"{value:.{decimals if value < 10 else decimals - 2}f}"


def _peak(line: Line) -> str:
    return _NONE if line.peak_extra_bytes is None else f"{line.peak_extra_bytes / 2**20:,.0f}"


def notes(options: CkptOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines = [
        "A process for each run, the same bytes for all, one save before the measured one. stall: until the state may "
        "be changed, the whole call where there is no asynchronous save. durable: until all files are synced; what "
        "a library leaves unsynced (torch.save and safetensors everything, DCP and tensorstore their folder, Orbax "
        "its metadata) the bench syncs and counts.",
        "Cold: the files are out of the page cache; warm: they are in it. Into fresh memory, or in place. What each "
        "contender loads is compared with what it saved, to the bit. (x): over the fastest limit of the column.",
        "memcpy and the reads marked huge use memory in huge pages, the other reads into fresh memory small ones.",
        "extra MB: highest resident memory of all processes while saving, over that with the state made.",
    ]
    if "loop" in options.part_names:
        lines.append(
            "Steps of 0.2 s: matrix products of one thread, and pure Python, whose interpreter lock a save's thread "
            "has to share. (x): over the same steps with no save in flight."
        )
    return lines
