"""Tables of figures, and the text of their cells."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from gcore_bench.harness.summary import Rows

Cell = Callable[[Mapping[str, float]], str]
"""Returns the text of a cell from the figures of its row."""


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


def figure(metric: str, form: str) -> Cell:
    """Return a cell that formats one metric, and is "-" where a row does not have it."""
    return lambda row: format(row[metric], form) if metric in row else "-"


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
