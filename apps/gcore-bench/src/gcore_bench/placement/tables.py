"""A table of figures: its rows, the format of its cells, and the aims that the figures meet or miss."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import csv
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
    return [[format_cell(form, row) for form in table.columns.values()] for row in table.rows]


def format_cell(template: str, row: Row) -> str:
    """Return one cell as text, "-" where the row lacks a figure."""
    try:
        return template.format_map(row)
    except KeyError:
        return "-"


def render_table(table: FigureTable) -> Table:
    """Return the table as rich prints it; the first column has no title."""
    rendered = figures_table(table.title, *list(table.columns)[1:])
    for cells in format_rows(table):
        rendered.add_row(*cells)
    return rendered


def read_rows(name: str) -> list[dict[str, Any]]:
    """Read a CSV file of this package; numbers and booleans have their type, and empty cells are left out."""
    options = csv.ConvertOptions(strings_can_be_null=True)
    rows: list[dict[str, Any]] = []
    for row in csv.read_csv(_DATA / name, convert_options=options).to_pylist():
        cells = {column: value for column, value in row.items() if value is not None}
        rows.append(cells)
    return rows


def read_json(name: str) -> dict[str, Any]:
    """Read a JSON file of this package."""
    return json.loads((_DATA / name).read_text())
