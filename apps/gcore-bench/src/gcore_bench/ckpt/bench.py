"""`gcore-bench ckpt`: limits and contenders in turn, in new processes whose memory is watched."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from gcore_bench.ckpt.options import LIMITS, PARTS, CkptOptions
from gcore_bench.ckpt.report import notes, part_table, summarise_part
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Outcome, Spec, merge_ranks, run_children
from gcore_bench.harness.report import Figures, Rounds, Session

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
    has_figures = False
    with scratch_folder(options.dir) as folder, Session(options, console, notes=notes(options)) as session:
        check_machine(folder, options.size_bytes)
        for part in filter(options.contenders_of, options.part_names):
            rounds = Rounds(part, options.rounds, say=session.say)
            # A contender that fails is recorded as such.
            for turn in rounds.turns([*[LIMITS] * (not PARTS[part].ratio_to), *options.contenders_of(part)]):
                try:
                    rows = _rows(part, turn.contender, options, folder)
                    turn.done(rows, _in_words(part, turn.contender, rows))
                except BenchError as error:
                    turn.failed(str(error))
            summary = summarise_part(part, rounds.runs)
            failures = [f"{contender} failed: {failure}" for contender, failure in summary["failures"].items()]
            session.add(part, tables=[part_table(summary, options)], lines=failures, summary=summary, runs=rounds.runs)
            has_figures = has_figures or any(line["seconds"] for line in summary["lines"])
    if not has_figures:
        raise BenchError("no contender has figures; see the failures above")


def _rows(part: str, contender: str, options: CkptOptions, folder: Path) -> dict[str, Figures]:
    (folder / "files").mkdir()
    try:
        saved = _outcome(part, contender, options, folder, "save")
        rows = merge_ranks([value["rows"] for value in saved.values])
        if part == "ranks" and contender in _LOADS_SHARDS:
            loaded = _outcome(part, contender, options, folder, "load")
            rows[contender] |= merge_ranks([value["rows"] for value in loaded.values])[contender]
    finally:
        shutil.rmtree(folder / "files")
    if spans := [value["saving_s"] for value in saved.values if "saving_s" in value]:
        # The highest memory of all ranks together while they saved, less that before.
        start_s, end_s = min(start for start, _ in spans), max(end for _, end in spans)
        during = [footprint.pss_bytes for at_s, footprint in saved.footprints if start_s <= at_s <= end_s]
        if during:
            before = sum(value["before_bytes"] for value in saved.values)
            rows[contender]["peak_bytes"] = float(max(0, max(during) - before))
    return rows


def _outcome(part: str, contender: str, options: CkptOptions, folder: Path, phase: str) -> Outcome:
    world_size = {"save": options.ranks, "load": options.ranks // 2}[phase] if part == "ranks" else 1
    first = Spec(
        work="gcore_bench.ckpt.work",
        part=part,
        contender=contender,
        folder=str(folder),
        options={"size_bytes": options.size_bytes, "tensors": options.tensors, "phase": phase},
        world_size=world_size,
        threads=1 if part == "loop" else max(1, (os.cpu_count() or 1) // world_size),
    )
    specs = [replace(first, rank=rank) for rank in range(world_size)]
    timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * options.size_gb
    return run_children(specs, folder=folder, environment=_ENVIRONMENT, poll_s=_POLL_S, timeout_s=timeout_s)


def _in_words(part: str, contender: str, rows: dict[str, Figures]) -> str:
    titles = {metric: title.removesuffix(" s") for metric, title in PARTS[part].columns.items() if metric in _SHOWN}
    return ", ".join(
        f"{row if row != contender else ''} {title} {seconds[metric]:.3f} s".strip()
        for row, seconds in rows.items()
        for metric, title in titles.items()
        if metric in seconds
    )


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
