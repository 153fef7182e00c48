"""Protocols of a storage of steps (a local or mounted folder, an object store), and its record of rollbacks.

`gcore_ckpt.storage.local.open_storage` returns the storage of a path.
"""

import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol, Self

from gcore_ckpt.format import validation

STEP_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
INDEX_FILE = "index.json"
MAX_INDEX_BYTES = 1 << 31
"""Size of the largest `index.json` that is written and read."""
JOURNAL_FILE = "rollback.json"
_JOURNAL_FORMAT = "gcore-ckpt rollback"


def step_name(step: int) -> str:
    """Return the name of a committed step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the number of the step whose folder has this name; None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def check_step(step: int) -> None:
    """Raise `TypeError` or `ValueError` for what is not the number of a step."""
    if type(step) is not int:
        raise TypeError(f"step is {step!r}; expected an int")
    if step < 0:
        raise ValueError(f"step is {step}; expected 0 or more")


class StepFiles(Protocol):
    """The files of one committed step, open for reading."""

    def read_index(self) -> bytes:
        """Return the bytes of `index.json`; `FileNotFoundError` if there is none."""
        ...

    def open(self, name: str) -> int:
        """Open a data file by its plain name and return its size in bytes; `ValueError` if it is no regular file."""
        ...

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fill `buffer` from an open file and return how many bytes there were. Safe to call from many threads."""
        ...


class Storage(Protocol):
    """Reads and writes whole steps. Any process may read; one process of a group, its root, calls what commits."""

    def __str__(self) -> str:
        """Return the path as its user wrote it."""
        ...

    @property
    def max_file_bytes(self) -> int | None:
        """Largest data file to write, where the storage has one."""

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        ...

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Open a committed step; `FileNotFoundError` if it is no longer there."""
        ...

    def acquire(self) -> None:
        """Open for writing (root): create the folder, refuse a second writer, remove leftovers of dead writers."""

    def release(self) -> None:
        """Release the lock, so that another writer can acquire it (root)."""

    def begin(self, step: int) -> str:
        """Start to write a step and return the name of this attempt, for all processes of the group (root)."""
        ...

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        """Write a data file, the parts one after another; on return it survives a power cut (any process)."""

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Make the file of a committed step a file of this attempt, without copying its bytes (root)."""

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Make the attempt the committed step, in one atomic act that survives a power cut (root).

        `index` are the bytes of `index.json`, `sizes` the bytes of each data file that must be there. After an
        `OSError` nothing was committed, unless the very last sync failed.
        """

    def abort(self, attempt: str) -> None:
        """Remove what an attempt has written; raise nothing (root)."""

    def remove(self, step: int) -> None:
        """Delete a committed step; it stops being one before its first byte goes (root)."""

    def set_aside(self, steps: Sequence[int]) -> None:
        """Turn committed steps into steps set aside, all in one atomic act; their data are kept (root).

        A crash or an `OSError` leaves either all of them, or none; `acquire` completes what a dead writer has started.
        """


@contextmanager
def open_for_writing(storage: Storage) -> Generator[None]:
    """Keep a storage open for writing while the block runs."""
    storage.acquire()
    try:
        yield
    finally:
        storage.release()


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The content of `rollback.json`, the record that makes setting several steps aside one atomic act.

        {"format": "gcore-ckpt rollback", "id": "...", "pending": [30, 40], "set_aside": [[30, "<attempt id>"], ...]}

    A step that is pending is no longer a step, whatever else the storage holds; the writer, or the next one, moves it
    out of the way and then writes the record without it. `set_aside` is kept in object stores, where nothing can be
    renamed. No two records have one `id`, so that readers see that it has changed; it is empty where there is none.
    """

    format: str = _JOURNAL_FORMAT
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pending: tuple[int, ...] = ()
    set_aside: tuple[tuple[int, str], ...] = ()

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes | None, where: str) -> Self:
        """Return the content of the file at `where`; `data` is None if it does not exist."""
        if data is None:
            return cls(id="")
        with validation.reading(where):
            content = validation.expect(dict, json.loads(data), "content")
            if content.get("format") != _JOURNAL_FORMAT:
                raise ValueError(
                    f"format is {str(content.get('format'))[:40]!r}; expected {_JOURNAL_FORMAT!r}"
                )
            pending = validation.sizes(content.get("pending"), "pending")
            set_aside: list[tuple[int, str]] = []
            for entry in validation.expect(list, content.get("set_aside"), "set_aside"):
                step, attempt = validation.members(entry, 2, "an entry of set_aside")
                validation.plain_name(validation.expect(str, attempt, "attempt"))
                set_aside.append((validation.size(step, "step"), attempt))
            return cls(id=str(content.get("id")), pending=pending, set_aside=tuple(set_aside))


def settled_steps(
    list_steps: Callable[[], set[int]], read_journal: Callable[[], Journal]
) -> list[int]:
    """Return the listed steps that are not pending, ascending."""
    journal = read_journal()
    while True:
        steps = list_steps()
        journal_after = read_journal()
        if journal_after == journal:  # else steps were set aside meanwhile, and this is a mixture
            return sorted(steps - set(journal.pending))
        journal = journal_after
