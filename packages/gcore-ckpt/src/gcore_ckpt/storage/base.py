"""Protocols of a storage of steps: a local (or mounted) folder, or an object store by its URL."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

STEP_NAME = re.compile(r"step-(\d{8,})", re.ASCII)


class StepFiles(Protocol):
    """The files of one committed step, open for reading."""

    def read_index(self) -> bytes:
        """Return the bytes of `index.json`.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def open(self, name: str) -> int:
        """Open a data file by its plain name and return its size in bytes.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is no regular file.
        """
        ...

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fill `buffer` from an open file and return how many bytes there were. Safe to call from many threads."""
        ...


class Storage(Protocol):
    """Reads and write whole steps. Any process may read; one process of a group, its root, calls what commits."""

    def __str__(self) -> str:
        """Return the path as its user wrote it."""
        ...

    @property
    def max_file_bytes(self) -> int | None:
        """Largest data file to write, where the storage has one."""
        ...

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        ...

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Open a committed step.

        Raises:
            FileNotFoundError: It is no longer there.
        """
        ...

    def acquire(self) -> None:
        """Make ready for writing: creates the place, refuse a second writer, remove what dead ones left (root).

        Raises:
            CheckpointLockedError: Another writer has it.
        """
        ...

    def release(self) -> None:
        """Let the next writer in (root)."""
        ...

    def begin(self, step: int) -> str:
        """Start to write a step and return the name of this attempt, for all processes of the group (root)."""
        ...

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        """Write a data file, the parts one after another; on return it survives a power cut (any process)."""
        ...

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Make the file of a committed step a file of this attempt, without copying its bytes (root)."""
        ...

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Make the attempt the committed step, in one atomic act that survives a power cut (root).

        Args:
            attempt: What `begin` returned.
            step: The number of the step.
            index: The bytes of `index.json`.
            sizes: Size in bytes of each data file that must be there.

        Raises:
            OSError: Nothing was committed, unless the very last sync failed.
        """
        ...

    def abort(self, attempt: str) -> None:
        """Remove what an attempt has written; raise nothing (root)."""
        ...

    def remove(self, step: int) -> None:
        """Delete a committed step; it stops being one before its first byte goes (root)."""
        ...

    def set_aside(self, steps: Sequence[int]) -> None:
        """Turn committed steps into steps set aside, all in one atomic act; their data are kept (root).

        A crash leaves either all of them or none; `acquire` completes what a dead writer has started.

        Raises:
            OSError: It failed; whether before or after the act, `steps` tells.
        """
        ...

    def steps_set_aside(self) -> list[int]:
        """Return the steps that were set aside, ascending; one that was set aside twice is there twice."""
        ...

    def remove_set_aside(self) -> None:
        """Delete what was set aside (root)."""
        ...


def step_name(step: int) -> str:
    """Return the name of a committed step's folder."""
    return f"step-{step:08d}"
