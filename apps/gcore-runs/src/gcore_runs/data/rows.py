"""The rows of a data file, or of a data set on the Hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one source, with what belongs to them."""

    name: str
    """The file, or the name of the data set, for errors."""
    rows: Sequence[Mapping[str, Any]]
    """A list, or of a large source a sequence that reads a row when it is indexed."""
    folder: Path
    """Paths in the rows are relative to it."""
    identity: str = ""
    """Distinguishes the present content of a large source from any other; empty: the rows are a list."""
