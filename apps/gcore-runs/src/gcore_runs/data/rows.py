"""The rows of a data file, or of a data set on the Hub."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, TypeVar, overload

ItemT = TypeVar("ItemT")


class LazySequence(Sequence[ItemT]):
    """A sequence whose items are made when they are indexed; subclasses have their number and `item`."""

    @abstractmethod
    def item(self, index: int) -> ItemT:
        """Return the item at an index from 0 on."""

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}; expected one of {len(self)} items")
        return self.item(index % len(self))


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows of one source, with what belongs to them.

    Example:
        >>> write_jsonl(Path("sums.jsonl"), [{"prompt": "2+2=", "answer": 4}, {"prompt": "3+4=", "answer": 7}])
        >>> [source] = open_rows("sums.jsonl", {"text": "prompt ~ answer"})
        >>> source.name
        'sums.jsonl'
        >>> [row["text"] for row in source.rows]
        ['2+2=4', '3+4=7']
        >>> RowSource(name="made here", rows=[{"text": "5+1=6"}], folder=Path()).rows[0]["text"]
        '5+1=6'
    """

    name: str
    """The file, or the name of the data set, for errors."""
    rows: Sequence[Mapping[str, Any]]
    """A list, or of a large source a sequence that reads a row when it is indexed."""
    folder: Path
    """Paths in the rows are relative to it."""
    identity: str = ""
    """Distinguishes the present content of a large source from any other; empty: the rows are a list."""


def expand_pattern(source: str) -> list[str]:
    """Return the files that a pattern with ``*`` matches, sorted, or the only one that a source names."""
    if "*" not in source or Path(source).exists():
        return [source]
    return sorted(glob(source, recursive=True))  # noqa: PTH207 (it may be absolute)
