"""Options, rounds, medians, tables and the JSON file that all benches share."""

import json
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, Self, TypeAlias

import psutil
from rich.console import Console
from rich.table import Table

from gcore_runs import Checked, Count
from gcore_runs.settings.checks import EXISTING_FOLDER

Figures = dict[str, float]
"""Figures by metric."""
Rows = Mapping[str, Mapping[str, float]]
"""Figures by row of a table."""
Row = dict[str, Any]
"""Figures and names of a line of a table; None where there is no figure."""

_LIBRARIES = (
    "gcore-bench",
    "torch",
    "transformers",
    "vllm",
    "ray",
    "trl",
    "verl",
    "diffusers",
)


class BenchError(Exception):
    """Wrong options, or a contender that failed: the command line shows it without a traceback."""


OutputFile: TypeAlias = Annotated[Path | None, EXISTING_FOLDER]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Checked):
    """Base of every bench's options; it checks the bounds of all fields.

    A tuple may be empty only where that is its default.

    Raises:
        BenchError: an option is out of its bounds.
    """

    error = BenchError

    rounds: Count = 3
    """Number of rounds, in each of which everything is measured once, in turn."""
    json: OutputFile = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(self):
            if getattr(self, option.name) == () and option.default:
                raise BenchError(f"{option.name} is empty; expected at least one entry")


@dataclass(frozen=True, kw_only=True)
class QuickOptions(BenchOptions):
    """Options of a bench that can run at sizes which take no time."""

    quick: bool = False
    """Measure everything once at tiny sizes, to see that it runs. The figures mean nothing."""

    QUICK: ClassVar[Mapping[str, Any]] = {}
    """Values of the options that ``quick`` replaces."""

    def resize_if_quick(self) -> Self:
        """Return the options with the sizes of ``quick`` if that was asked for."""
        if self.quick:
            return replace(self, **self.QUICK)
        return self


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
        self.part = part
        self.count = count
        self.say = say
        self.runs: list[Run] = []

    def turns(self, contenders: Collection[str]) -> "Iterator[Turn]":
        """Yield every contender, in the same order in every round; a list may lose entries between rounds."""
        for number in range(1, self.count + 1):
            for name in tuple(contenders):
                yield Turn(self, name, number)

    def summarise(self) -> dict[str, Row]:
        """Return medians over all rounds by row and metric; of every ``peak_bytes`` the highest."""
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in self.runs:
            for row, figures in run.rows.items():
                for metric, value in figures.items():
                    values[row][metric].append(value)
        rows: dict[str, Row] = {}
        for row, metrics in values.items():
            rows[row] = {metric: median(numbers) for metric, numbers in metrics.items()}
            if "peak_bytes" in metrics:
                rows[row]["peak_bytes"] = max(metrics["peak_bytes"])
        return rows


class Turn:
    """One contender's turn; its load is the machine's as the turn starts."""

    def __init__(self, rounds: Rounds, contender: str, number: int) -> None:
        self.contender = contender
        self.round = number
        self.load = os.getloadavg()[0]
        self.where = f"{rounds.part}, round {number} of {rounds.count}: {contender}"
        self._rounds = rounds

    def done(self, rows: Mapping[str, Figures], words: str) -> None:
        """Record the figures; ``words`` are printed with the contender's name."""
        self._add(f"{words}, load {self.load:.1f}", rows=dict(rows))

    def fail(self, reason: str) -> None:
        """Record that the contender has no figures in this round."""
        self._add(f"failed: {reason}", failure=reason)

    def _add(self, words: str, **outcome: Any) -> None:
        run = Run(
            part=self._rounds.part,
            contender=self.contender,
            round=self.round,
            load=self.load,
            **outcome,
        )
        self._rounds.runs.append(run)
        self._rounds.say(f"{self.where} {words}")


def paired_ratio(runs: Sequence[Run], row: str, base: str, metric: str) -> float | None:
    """Return the median over rounds of the row's figure over the base's; None where one was not measured."""
    of_row: dict[int, float] = {}
    of_base: dict[int, float] = {}
    for run in runs:
        if metric in run.rows.get(row, {}):
            of_row[run.round] = run.rows[row][metric]
        if run.rows.get(base, {}).get(metric):
            of_base[run.round] = run.rows[base][metric]
    ratios = [value / of_base[number] for number, value in of_row.items() if number in of_base]
    return median(ratios) if ratios else None


def add_ratios(rows: Mapping[str, Row], runs: Sequence[Run], base: str, *metrics: str) -> None:
    """Add ``METRIC_ratio`` to every row but the base: the median over rounds of its figure over the base's."""
    for name, row in rows.items():
        for metric in metrics:
            if name != base:
                row[f"{metric}_ratio"] = paired_ratio(runs, name, base, metric)


def figures_table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column names contenders and whose others are numbers."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def format_figure(row: Mapping[str, Any], metric: str, form: str = "") -> str:
    """Return the text of a figure of a row, "-" if it has none.

    Args:
        row: figures by metric.
        metric: name in the row.
        form: a format specification, or "MB" for bytes in MiB, or "x" for a ratio, or "s" for seconds and the ratio
            to a limit in brackets, if the row has ``METRIC_ratio``.
    """
    value = row.get(metric)
    if value is None:
        return "-"
    if form == "MB":
        return f"{value / 2**20:,.0f}"
    if form == "x":
        return f"{value:.2f}x"
    if form != "s":
        return format(value, form)
    ratio = row.get(f"{metric}_ratio")
    if ratio is None:
        return f"{value:.3f}"
    return f"{value:.3f} ({ratio:.2f}x)"


def verdict(is_met: bool) -> str:
    """Return the word for an aim."""
    return "met" if is_met else "not met"


def verdict_on_all(missed: Sequence[str]) -> str:
    """Return the word for an aim of many cases, and those that miss it."""
    if missed:
        return f"not met: {', '.join(missed)}"
    return "met"


class BenchSession:
    """Prints what a bench reports and, when it ends without an error, its notes; then writes the figures.

    Args:
        options: of the bench; a dataclass with ``json``.
        console: where tables and lines go.
        notes: printed at the end: what a reader must know to judge the figures.
    """

    def __init__(self, options: Any, console: Console, *, notes: Iterable[str] = ()) -> None:
        self._options = options
        self._console = console
        self._notes = notes
        self._parts: list[Row] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="gcore-bench-")
        self.folder = Path(self._scratch.name)
        """A scratch folder that is removed at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._scratch.cleanup()
        if error_type is not None:
            return
        for note in self._notes:
            self.say(note)
        if self._options.json is not None:
            content = {
                "options": plain(self._options),
                "machine": _machine_facts(),
                "parts": self._parts,
            }
            self._options.json.write_text(json.dumps(content, indent=1, default=asdict) + "\n")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, soft_wrap=True)

    def add(
        self, name: str, *, tables: Sequence[Table] = (), lines: Sequence[str] = (), **figures: Any
    ) -> None:
        """Print the tables and lines of a part, and keep its figures (plain values and dataclasses) for the file."""
        for table in tables:
            self._console.print(table)
        for line in lines:
            self.say(line)
        self._parts.append({"part": name, **figures})

    def report(
        self,
        title: str,
        columns: Mapping[str, str],
        rows: Mapping[str, Row],
        runs: Sequence[Run],
        *,
        lines: Sequence[str] = (),
    ) -> None:
        """Print a table of a part's rows, and the lines below it; keep the rows and the runs for the file.

        Args:
            title: above the table.
            columns: metrics by title, each with its form behind a space (see `format_figure`).
            rows: figures by the first column of the table.
            runs: what the rows are medians of.
            lines: printed below the table.
        """
        table = figures_table(title, *columns)
        for name, row in rows.items():
            cells = [format_figure(row, *column.split()) for column in columns.values()]
            table.add_row(name, *cells)
        rounds = max(run.round for run in runs)
        load = fmean(run.load for run in runs)
        table.caption = f"medians of {rounds} rounds; load of the machine {load:.1f}"
        self.add(runs[0].part, tables=[table], lines=lines, rows=rows, lines_below=lines, runs=runs)


def plain(options: Any) -> dict[str, Any]:
    """Return options as JSON has them; files and folders among them are left out."""
    values: dict[str, Any] = {}
    for name, value in asdict(options).items():
        if isinstance(value, tuple):
            values[name] = [*value]
        elif not isinstance(value, Path):
            values[name] = value
    return values


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
