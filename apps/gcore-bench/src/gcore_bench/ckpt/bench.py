"""`gcore-bench ckpt`: limits and contenders in turn, in new processes whose memory is watched; their tables."""

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from gcore_bench.ckpt.options import INDEX_BYTES, LIMITS, PARTS, TRAINED, CkptOptions
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Spec, merge_ranks, run_children
from gcore_bench.harness.report import Figures, Rounds, Row, Run, Session, figures_table, mb, summarise, verdict

_TIMEOUT_S = 300.0
_TIMEOUT_S_PER_GB = 150.0
_POLL_S = 0.2
"""Reading the memory of gigabytes takes some ten milliseconds."""
_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}
_SIZES_ON_DISK = 4
"""The part loop keeps three saves, and a save in flight may need space to commit."""
_SIZES_IN_MEMORY = 4
"""The state, a staged copy, and the copies in the process of a writer."""
_PROCESSES_BYTES = 2 * 10**9
"""Memory of the Python processes with their libraries."""
_LOADS_SHARDS = ("gcore", "dcp")
"""Contenders of the part ranks whose loads are measured; the asynchronous saves of DCP write the same files."""
_SHOWN = ("stall", "durable", "save", "load_cold", "rows_cold", "matmul_saving", "python_saving")
"""Metrics in the lines of progress."""


def run(options: CkptOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for."""
    options = options.sized()
    if options.part in TRAINED:
        run_trained(options, console)
        return
    has_figures = False
    with scratch_folder(options.dir) as folder, Session(options, console, notes=notes(options)) as session:
        check_machine(folder, options.size_bytes)
        for part in filter(options.contenders_of, options.part_names):
            rounds = Rounds(part, options.rounds, say=session.say)
            # A contender that fails is recorded as such.
            for turn in rounds.turns([*[LIMITS] * _has_limits(part), *options.contenders_of(part)]):
                try:
                    rows = _rows(part, turn.contender, options, folder)
                    turn.done(rows, _in_words(part, turn.contender, rows))
                except BenchError as error:
                    turn.failed(str(error))
            summary = summarise_part(part, rounds.runs)
            failures = [f"{contender} failed: {failure}" for contender, failure in summary["failures"].items()]
            lines = [*failures, *aims(summary, options)]
            session.add(part, tables=[part_table(summary, options)], lines=lines, summary=summary, runs=rounds.runs)
            has_figures = has_figures or any(line["seconds"] for line in summary["lines"])
    if not has_figures:
        raise BenchError("no contender has figures; see the failures above")


def run_trained(options: CkptOptions, console: Console) -> None:
    """Make runs of `gcore-llm train`, and report what checkpoints or failures change."""
    from gcore_bench.ckpt import convergence, recovery
    from gcore_bench.ckpt.training_runs import TrainingRuns

    part = {"convergence": convergence, "recovery": recovery}[options.part]
    with scratch_folder(options.dir) as folder, Session(options, console, notes=part.NOTES) as session:
        part.run(options, TrainingRuns(options, folder, session.say), session)


def _has_limits(part: str) -> bool:
    return not (PARTS[part].ratio_to or PARTS[part].ratio_to_row)


def _rows(part: str, contender: str, options: CkptOptions, folder: Path) -> dict[str, Figures]:
    """Return the figures of one turn: of all ranks that save and, in the part ranks, of half as many that load."""
    ranks = {"save": options.ranks, "load": options.ranks // 2} if part == "ranks" else {"save": 1}
    rows: dict[str, Figures] = defaultdict(dict)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for phase, world_size in ranks.items():
            if phase == "load" and contender not in _LOADS_SHARDS:
                continue
            spec = Spec(
                work="gcore_bench.ckpt.work",
                part=part,
                contender=contender,
                folder=own,
                options={
                    "size_bytes": options.size_bytes,
                    "tensors": options.tensors,
                    "small_tensors": options.small_tensors,
                    "phase": phase,
                },
                world_size=world_size,
                threads=1 if part == "loop" else max(1, (os.cpu_count() or 1) // world_size),
            )
            limits = {"poll_s": _POLL_S, "timeout_s": _TIMEOUT_S + _TIMEOUT_S_PER_GB * options.size_gb}
            values, footprints = run_children(spec, environment=_ENVIRONMENT, **limits)
            for row, figures in merge_ranks([value["rows"] for value in values]).items():
                rows[row] |= figures
            if spans := [value["saving_s"] for value in values if "saving_s" in value]:
                # The highest memory of all ranks together while they saved, less that before.
                start_s, end_s = min(start for start, _ in spans), max(end for _, end in spans)
                if during := [footprint.pss_bytes for at_s, footprint in footprints if start_s <= at_s <= end_s]:
                    before_bytes = sum(value["before_bytes"] for value in values)
                    rows[contender]["peak_bytes"] = float(max(0, max(during) - before_bytes))
    return rows


def _in_words(part: str, contender: str, rows: dict[str, Figures]) -> str:
    titles = {metric: title.removesuffix(" s") for metric, title in PARTS[part].columns.items() if metric in _SHOWN}
    return ", ".join(
        f"{row if row != contender else ''} {title} {seconds[metric]:.3f} s".strip()
        for row, seconds in rows.items()
        for metric, title in titles.items()
        if metric in seconds
    )


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
    if (peer := rows.get(PARTS[part].ratio_to_row)) is not None:
        fastest = dict.fromkeys(("load_warm", "in_place_warm"), peer.get("load_warm", 0.0)) | peer

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
    size = f"{options.size_gb:g} GB in {options.tensors} tensors"
    if summary["part"] == "small":
        size = f"{options.small_tensors:,} tensors of 8 floats"
    title = f"{part.title}{ranks}: {size}"
    shown = figures_table(title, *part.columns.values(), *["extra MB"] * with_peak)
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {summary['load']:.1f}"
    for lines in (summary["lines"], summary["limits"]):
        shown.add_section()
        for line in lines:
            cells = [_cell(line, metric) for metric in part.columns]
            shown.add_row(line["row"], *cells, *[mb(line["peak_extra_bytes"])] * with_peak)
    return shown


def aims(summary: dict[str, Any], options: CkptOptions) -> list[str]:
    """Return whether the aims of a part are met, as far as there are figures."""
    rows = {line["row"]: line for line in summary["lines"]}
    gcore: Row = rows.get("gcore") or {"seconds": {}, "ratios": {}}
    lines = list[str]()
    for metric, (what, to, most, row) in PARTS[summary["part"]].aims.items():
        found: float | None = gcore["ratios"].get(metric)
        if row:
            seconds, peers = (rows[name]["seconds"].get(metric) if name in rows else None for name in ("gcore", row))
            found = seconds / peers if seconds and peers else None
        if found is not None:
            lines.append(f"aim: {what} takes at most {most:g} times {to}: {found:.3f} ({verdict(found <= most)})")
    if "index_mb" in gcore["seconds"]:
        size, most = gcore["seconds"]["index_mb"] * 1e6 / options.small_tensors, INDEX_BYTES
        lines.append(f"aim: their index has at most {most} bytes for each: {size:.0f} ({verdict(size <= most)})")
    return lines


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
        "After: right after the save, with what the page cache then holds. Cold: the files are out of it; warm: they "
        "are in it. Into fresh memory, or in place. What each "
        "contender loads is compared bitwise with what it saved. (x): over the fastest limit of the column.",
        "memcpy and the reads marked huge use memory in huge pages, the other reads into fresh memory small ones.",
        "extra MB: highest resident memory of all processes while saving, less that before the first save.",
    ]
    if "small" in options.part_names:
        lines.append(
            "Many small tensors: the stalls of the first two saves of a state, in a process that has saved another "
            "one; torch.save stalls for the whole call. (x): over torch.save, loads over torch.load."
        )
    if "loop" in options.part_names:
        lines.append(
            "Steps of 0.2 s: matrix products of one thread, and pure Python, which shares the interpreter lock with "
            "the thread of a save. (x): over the same steps with no save in flight."
        )
    return lines


def check_machine(folder: Path, size_bytes: int) -> None:
    """Check that there is enough disk space and memory before anything is written."""
    memory = _SIZES_IN_MEMORY * size_bytes + _PROCESSES_BYTES
    for field, needed, free, of in (
        (f"dir is {folder}", _SIZES_ON_DISK * size_bytes, shutil.disk_usage(folder).free, "free disk space there"),
        (f"size_gb is {size_bytes / 1e9:g}", memory, psutil.virtual_memory().available, "available memory for it"),
    ):
        if free < needed:
            raise BenchError(f"{field}; expected {needed / 1e9:.1f} GB of {of}, found {free / 1e9:.1f}")


@contextmanager
def scratch_folder(parent: Path) -> Generator[Path]:
    """Make a folder in ``parent``, which is made too; remove at the end what was made."""
    made = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="ckpt-", dir=parent)).absolute()
    except OSError as error:
        raise BenchError(f"dir is {parent}; expected a folder that can be written to: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made and not any(parent.iterdir()):
            parent.rmdir()
