"""Options, rounds, medians, tables and the JSON file that all benches share."""

import json
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
Row = dict[str, Any]
"""Figures and names of a line of a table; None where there is no figure."""

_LIBRARIES = "gcore-bench torch transformers vllm ray trl verl diffusers"


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
    quick: bool = False
    """Measure everything once at tiny sizes, to see that it runs. The figures mean nothing."""

    QUICK: ClassVar[Mapping[str, Any]] = {"rounds": 1}
    """Values of the options that ``quick`` replaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(self):
            if getattr(self, option.name) == () and option.default:
                raise BenchError(f"{option.name} is empty; expected at least one entry")

    def resize_if_quick(self) -> Self:
        """Return the options with the sizes of ``quick`` if that was asked for."""
        if self.quick:
            return replace(self, **self.QUICK)
        return self


@dataclass(kw_only=True)
class Turn:
    """One contender's turn in one round."""

    part: str
    contender: str
    round: int
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    """Load average of the machine over the minute before the turn."""
    rows: dict[str, Figures] = field(default_factory=dict[str, Figures])
    """Figures by row of the table; of several ranks the highest."""
    failure: str = ""
    """Why there are no figures."""
    words: str = ""
    """The line of progress."""

    def done(self, figures: Figures, words: str) -> None:
        """Record the contender's figures; ``words`` are printed, with names of figures in braces."""
        self.rows = {self.contender: figures}
        self.words = words.format_map(figures)

    def fail(self, reason: str) -> None:
        """Record that the contender has no figures in this round."""
        self.failure = reason
        self.words = f"failed: {reason}"


class Rounds:
    """The turns of contenders in `count` rounds of a part of the bench; `say` prints a line of progress."""

    def __init__(self, part: str, count: int, *, say: Callable[[str], object]) -> None:
        self.part = part
        self.count = count
        self.say = say
        self.runs: list[Turn] = []

    def turns(self, contenders: Collection[str]) -> Iterator[Turn]:
        """Yield every contender, in the same order in every round; a list may lose entries between rounds.

        A turn is recorded and printed when the next one is asked for.
        """
        for number in range(1, self.count + 1):
            for name in tuple(contenders):
                turn = Turn(part=self.part, contender=name, round=number)
                yield turn
                self.runs.append(turn)
                self.say(
                    f"{self.part}, round {number} of {self.count}: {name} {turn.words}, load {turn.load:.1f}"
                )

    def summarise(self) -> dict[str, Row]:
        """Return medians over all rounds by row and metric; of every ``peak_bytes`` the highest."""
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in self.runs:
            for row, figures in run.rows.items():
                for metric, value in figures.items():
                    values[row][metric].append(value)
        rows: dict[str, Row] = defaultdict(dict)
        for row, metrics in values.items():
            for metric, numbers in metrics.items():
                summarise = max if metric == "peak_bytes" else median
                rows[row][metric] = summarise(numbers)
        return dict(rows)


def paired_ratio(runs: Sequence[Turn], row: str, base: str, metric: str) -> float | None:
    """Return the median over rounds of the row's figure over the base's; None where one was not measured."""
    rounds: dict[int, dict[str, Figures]] = defaultdict(dict)
    for run in runs:
        rounds[run.round] |= run.rows
    ratios: list[float] = []
    for rows in rounds.values():
        of_base = rows.get(base, {}).get(metric)
        if of_base and metric in rows.get(row, {}):
            ratios.append(rows[row][metric] / of_base)
    return median(ratios) if ratios else None


def add_ratios(rows: Mapping[str, Row], runs: Sequence[Turn], base: str, *metrics: str) -> None:
    """Add ``METRIC_ratio`` to every row but the base: the median over rounds of its figure over the base's."""
    for name in rows.keys() - {base}:
        for metric in metrics:
            rows[name][f"{metric}_ratio"] = paired_ratio(runs, name, base, metric)


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
    ratio = row.get(f"{metric}_ratio")
    if form == "s" and ratio is not None:
        return f"{value:.3f} ({ratio:.2f}x)"
    return format(value, ".3f" if form == "s" else form)


def format_range(values: Sequence[float], form: str) -> str:
    """Format the mean of the values, and their range unless all are printed alike.

    Example:
        >>> format_range([1.0, 2.0], ".1f")
        '1.5 (1.0 to 2.0)'
    """
    low = format(min(values), form)
    mean = format(fmean(values), form)
    high = format(max(values), form)
    if low == high:
        return mean
    return f"{mean} ({low} to {high})"


def verdict(is_met: bool) -> str:
    """Return the word for an aim."""
    return "met" if is_met else "not met"


def verdict_on_all(missed: Sequence[str]) -> str:
    """Return the word for an aim of many cases, and those that miss it."""
    if missed:
        return f"not met: {', '.join(missed)}"
    return "met"


class BenchSession:
    """Prints what a bench reports, and writes its figures when it ends without an error.

    Args:
        options: of the bench; a dataclass with ``json``.
        console: where tables and lines go.
    """

    def __init__(self, options: Any, console: Console) -> None:
        self._options = options
        self._console = console
        self._parts: list[Row] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="gcore-bench-")
        self.folder = Path(self._scratch.name)
        """A scratch folder that is removed at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._scratch.cleanup()
        if error_type is None and self._options.json is not None:
            content = {
                "options": plain(self._options),
                "machine": _machine_facts(),
                "parts": self._parts,
            }
            self._options.json.write_text(json.dumps(content, indent=1, default=asdict) + "\n")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, soft_wrap=True)

    def start_rounds(self, part: str) -> Rounds:
        """Return the rounds of a part of the bench, as many as the options say."""
        return Rounds(part, self._options.rounds, say=self.say)

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
        runs: Sequence[Turn],
        *,
        lines: Sequence[str] = (),
        statistic: str = "medians",
    ) -> None:
        """Print a table of a part's rows, and the lines below it; keep the rows and the runs for the file.

        Args:
            title: above the table.
            columns: metrics by title, each with its form behind a space (see `format_figure`).
            rows: figures by the first column of the table.
            runs: what the rows are computed from.
            lines: printed below the table.
            statistic: what the figures of the rows are.
        """
        table = figures_table(title, *columns)
        for name, row in rows.items():
            cells = [format_figure(row, *column.split()) for column in columns.values()]
            table.add_row(name, *cells)
        load = fmean(run.load for run in runs)
        table.caption = f"{statistic} of {runs[-1].round} rounds; load of the machine {load:.1f}"
        self.add(
            runs[0].part,
            tables=[table],
            lines=lines,
            rows=rows,
            lines_below=lines,
            runs=runs,
        )


def plain(options: Any) -> dict[str, Any]:
    """Return options as JSON has them; files and folders among them are left out."""
    values = asdict(options)
    return {name: value for name, value in values.items() if not isinstance(value, Path)}


def _machine_facts() -> dict[str, Any]:
    """Return the machine's cores and memory, and the versions of the libraries that contenders use."""
    versions: dict[str, str] = {}
    for library in _LIBRARIES.split():
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }
