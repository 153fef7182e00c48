"""Rows of the user's data files: read, described in errors, and divided into training and held-out rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gcore_runs.errors import UserError

RowT = TypeVar("RowT")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read the rows of a JSONL or Parquet file.

    Raises:
        UserError: the file is missing, unreadable, malformed or empty, or has another ending.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"data file {path} is a folder; expected a .jsonl or .parquet file")
    if not file.is_file():
        raise UserError(f"data file {path} does not exist")
    try:
        rows = _rows_of(file)
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror or error}") from None
    if not rows:
        raise UserError(f"data file {path} has no rows")
    return rows


def _rows_of(path: Path) -> list[dict[str, Any]]:
    match path.suffix:
        case ".jsonl":
            try:
                # JSON strings may contain other characters that splitlines takes for line ends.
                lines = path.read_text("utf-8").split("\n")
            except UnicodeDecodeError as error:
                raise UserError(f"data file {path} is not UTF-8: {error}") from None
            return [_parsed(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
        case ".parquet":
            import pyarrow.parquet

            try:
                return pyarrow.parquet.read_table(path).to_pylist()
            except pyarrow.ArrowException as error:
                raise UserError(f"data file {path} is not Parquet: {error}") from None
        case _:
            raise UserError(f"data file {path} ends in {path.suffix!r}; expected .jsonl or .parquet")


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}; expected a JSON object")
    return row


def columns(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, for errors."""
    return ", ".join(map(repr, row)) or "none"


def hold_out(rows: Sequence[RowT], *, size: int, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Return the rows to train on, and ``size`` held-out ones drawn by ``seed`` (at most a tenth), in their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = set(order[: min(size, len(rows) // 10)].tolist())
    return [r for i, r in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]
