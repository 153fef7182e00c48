"""Rounds of contenders, medians and ratios of their figures, tables, and the session that prints and writes them."""

import json
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import psutil
from rich.console import Console
from rich.table import Table

Figures = dict[str, float]
"""Figures by metric."""
Rows = Mapping[str, Mapping[str, float]]
Row = dict[str, Any]
"""Figures and names of a line of a table; None where there is no figure."""
Cell = Callable[[Mapping[str, Any]], str]
"""Returns the text of a cell from the figures of its row."""

_LIBRARIES = ("gcore-bench", "torch", "transformers", "vllm", "ray", "trl", "verl", "diffusers", "orbax-checkpoint")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round."""

    part: str
    contender: str
    round: int
    load: float
    """Load average of the machine over the minute before the run."""
    rows: dict[str, Figures] = field(default_factory=dict[str, Figures])
    """Figures by row of the table; of several ranks the highest."""
    failure: str = ""
    """Why there are no figures."""


class Rounds:
    """The turns of contenders in `count` rounds of a part of the bench; `say` prints a line of progress."""

    def __init__(self, part: str, count: int, *, say: Callable[[str], object]) -> None:
        self.part, self.count, self.say = part, count, say
        self.runs: list[Run] = []

    def turns(self, contenders: Collection[str]) -> "Iterator[Turn]":
        """Yield every contender, in the same order in every round; a list may lose entries between rounds."""
        for number in range(1, self.count + 1):
            for name in tuple(contenders):
                yield Turn(self, name, number)


class Turn:
    """One contender's turn; its load is the machine's as the turn starts."""

    def __init__(self, rounds: Rounds, contender: str, number: int) -> None:
        self.contender, self.round, self.load = contender, number, os.getloadavg()[0]
        self.where = f"{rounds.part}, round {number} of {rounds.count}: {contender}"
        self._rounds = rounds

    def done(self, rows: Mapping[str, Figures], words: str) -> None:
        """Record the figures; ``words`` are printed with the contender's name."""
        self._add(f"{words}, load {self.load:.1f}", rows=dict(rows))

    def failed(self, reason: str) -> None:
        """Record that the contender has no figures in this round."""
        self._add(f"failed: {reason}", failure=reason)

    def _add(self, words: str, **found: Any) -> None:
        part, rounds = self._rounds.part, self._rounds
        rounds.runs.append(Run(part=part, contender=self.contender, round=self.round, load=self.load, **found))
        rounds.say(f"{self.where} {words}")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One part: medians over all rounds by row and metric; peaks are the highest."""

    part: str
    rows: dict[str, Figures]
    load: float
    """Mean load of the machine before the runs."""


def summarise(part: str, runs: Sequence[Run]) -> Summary:
    """Take medians over all rounds, and the highest of every ``peak_bytes``."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, figures in (item for run in runs for item in run.rows.items()):
        for metric, value in figures.items():
            found[row][metric].append(value)
    rows = {
        row: {metric: (max if metric == "peak_bytes" else median)(values) for metric, values in metrics.items()}
        for row, metrics in found.items()
    }
    return Summary(part=part, rows=rows, load=fmean(run.load for run in runs))


def paired_ratio(
    runs: Sequence[Run], row: str, base: str, metric: str, *, base_metric: str | None = None
) -> float | None:
    """Return the median over rounds of the row's figure over the base's; None where the base was not measured."""
    values = {(run.round, name): figures for run in runs for name, figures in run.rows.items()}
    ratios = [
        figures[metric] / values[number, base][base_metric or metric]
        for (number, name), figures in values.items()
        if name == row and (number, base) in values
    ]
    return median(ratios) if ratios else None


def figures_table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column names contenders and whose others are numbers."""
    shown = Table(title=title, title_justify="left", caption_justify="left")
    shown.add_column("", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right")
    return shown


def rows_table(title: str, rows: Rows, columns: Sequence[tuple[str, Cell]]) -> Table:
    """Return a table with a line for each row; columns are titles and their cells."""
    shown = figures_table(title, *(title for title, _ in columns))
    for name, row in rows.items():
        shown.add_row(name, *(cell(row) for _, cell in columns))
    return shown


def figure(metric: str, form: str = "") -> Cell:
    """Return a cell that formats one metric, and is "-" where a row does not have it."""
    return lambda row: "-" if row.get(metric) is None else format(row[metric], form)


def megabytes(metric: str = "peak_bytes") -> Cell:
    """Return a cell that shows bytes in MiB."""
    return lambda row: mb(row.get(metric))


def over(metric: str, base: Mapping[str, float], base_metric: str = "") -> Cell:
    """Return a cell with the ratio of a metric to the same one (or ``base_metric``) of ``base``."""
    return lambda row: ratio(row[metric], base.get(base_metric or metric))


def mb(nbytes: float | None) -> str:
    """Format bytes in MiB."""
    return "-" if nbytes is None else f"{nbytes / 2**20:,.0f}"


def ratio(value: float | None, base: float | None = 1.0) -> str:
    """Format ``value / base``; "-" where there is none."""
    return f"{value / base:.2f}x" if base and value is not None else "-"


def verdict(is_met: bool) -> str:
    """Return the word for an aim."""
    return "met" if is_met else "not met"


def verdict_on_all(missed: Sequence[str]) -> str:
    """Return the word for an aim of many cases, and those that miss it."""
    return verdict(not missed) + (f": {', '.join(missed)}" if missed else "")


class Session:
    """Prints what a bench reports and, when it ends without an error, its notes; then writes the figures.

    Args:
        options: of the bench; a dataclass with ``json``.
        console: where tables and lines go.
        notes: printed at the end: what a reader must know to judge the figures.
        unit: what one table of figures is called in the file.
    """

    def __init__(self, options: Any, console: Console, *, notes: Iterable[str] = (), unit: str = "part") -> None:
        self._options = options
        self._console = console
        self._notes = notes
        self._unit = unit
        self._found: list[Mapping[str, Any]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="gcore-bench-")
        self.folder = Path(self._scratch.name)
        """A scratch folder that is removed at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._scratch.cleanup()
        if error_type is None:
            for note in self._notes:
                self.say(note)
            if self._options.json is not None:
                facts = {"options": plain(self._options), "machine": _machine_facts()}
                content = {**facts, f"{self._unit}s": self._found}
                self._options.json.write_text(json.dumps(content, indent=1, default=asdict) + "\n")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, soft_wrap=True)

    def add(self, name: str, *, tables: Sequence[Table] = (), lines: Sequence[str] = (), **figures: Any) -> None:
        """Print the tables and lines of a part, and keep its figures (plain values and dataclasses) for the file."""
        for table in tables:
            self._console.print(table)
        for line in lines:
            self.say(line)
        self._found.append({self._unit: name, **figures})


def plain(options: Any) -> dict[str, Any]:
    """Return options as JSON has them; files and folders among them are left out."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    return {name: value for name, value in values.items() if not isinstance(value, Path)}


def _machine_facts() -> dict[str, Any]:
    """Return the machine's cores and memory, and the versions of the libraries that contenders use."""
    versions: dict[str, str] = {}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }
