"""A table of figures: its rows, the format of its cells, and the aims that the figures meet or miss."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from gcore_bench.harness.report import Row, figures_table

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class FigureTable:
    """Figures of one part of the bench.

    Example:
        >>> table = FigureTable(title="copies", columns={"": "{name}", "s": "{step_s:.2f}"}, rows=[{"name": "numpy"}])
        >>> format_rows(table)
        [['numpy', '-']]
    """

    title: str
    columns: Mapping[str, str]
    """Formats of the cells by column title, with names of figures in braces."""
    rows: Sequence[Row]
    """Figures by name; a figure that was not measured is left out."""
    aims: Sequence[str] = ()
    """One line per aim, with the word "met" or "not met"."""


def format_rows(table: FigureTable) -> list[list[str]]:
    """Return the cells of each row as text, "-" where the row lacks a figure."""
    lines: list[list[str]] = []
    for row in table.rows:
        cells = [format_cell(template, row) for template in table.columns.values()]
        lines.append(cells)
    return lines


def format_cell(template: str, row: Row) -> str:
    """Return one cell as text, "-" where the row lacks a figure."""
    try:
        return template.format_map(row)
    except KeyError:
        return "-"


def render_table(table: FigureTable) -> Table:
    """Return the table as rich prints it; the first column has no title."""
    titles = list(table.columns)
    rendered = figures_table(table.title, *titles[1:])
    for cells in format_rows(table):
        rendered.add_row(*cells)
    return rendered


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


def read_rows(name: str) -> list[dict[str, Any]]:
    """Read a CSV file of this package; numbers and booleans have their type, and empty cells are left out."""
    rows: list[dict[str, Any]] = []
    with (_DATA / name).open(newline="") as file:
        for line in csv.DictReader(file):
            row = {column: _parse_cell(text) for column, text in line.items() if text}
            rows.append(row)
    return rows


def read_json(name: str) -> dict[str, Any]:
    """Read a JSON file of this package."""
    return json.loads((_DATA / name).read_text())


def _parse_cell(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
