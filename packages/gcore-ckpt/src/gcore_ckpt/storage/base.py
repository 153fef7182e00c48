"""Where the steps of one path live: a local (or mounted) folder, or an object store by its URL."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

STEP_NAME = re.compile(r"step-(\d{8,})", re.ASCII)


class StepFiles(Protocol):
    """The files of one committed step, open for reading."""

    def read_index(self) -> bytes:
        """The bytes of `index.json`.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def open(self, name: str) -> int:
        """Opens a data file by its plain name and returns its size in bytes.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is no regular file.
        """
        ...

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fills `buffer` from an open file and returns how many bytes there were. Safe to call from many threads."""
        ...


class Storage(Protocol):
    """Reads and writes whole steps. Any process may read; one process of a group, its root, calls what commits."""

    def __str__(self) -> str:
        """The path as its user wrote it."""
        ...

    @property
    def max_file_bytes(self) -> int | None:
        """Largest data file to write, where the storage has one."""
        ...

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        ...

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Opens a committed step.

        Raises:
            FileNotFoundError: It is not there any more.
        """
        ...

    def acquire(self) -> None:
        """Makes ready for writing: creates the place, refuses a second writer, removes what dead ones left (root).

        Raises:
            CheckpointLockedError: Another writer has it.
        """
        ...

    def release(self) -> None:
        """Lets the next writer in (root)."""
        ...

    def begin(self, step: int) -> str:
        """Starts to write a step and returns the name of this attempt, for all processes of the group (root)."""
        ...

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        """Writes a data file, the parts one after another; on return it survives a power cut (any process)."""
        ...

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Makes the file of a committed step a file of this attempt, without copying its bytes (root)."""
        ...

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Makes the attempt the committed step, in one atomic act that survives a power cut (root).

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
        """Removes what an attempt has written; raises nothing (root)."""
        ...

    def remove(self, step: int) -> None:
        """Deletes a committed step; it stops being one before its first byte goes (root)."""
        ...

    def set_aside(self, steps: Sequence[int]) -> None:
        """Makes committed steps no steps any more, all in one atomic act, but keeps what they hold (root).

        A crash leaves either all of them or none; `acquire` completes what a dead writer has started.

        Raises:
            OSError: It failed; whether before or after the act, `steps` tells.
        """
        ...

    def steps_set_aside(self) -> list[int]:
        """The steps that were set aside, ascending; one that was set aside twice is there twice."""
        ...

    def remove_set_aside(self) -> None:
        """Deletes what was set aside (root)."""
        ...


def step_name(step: int) -> str:
    """The name of a committed step's folder."""
    return f"step-{step:08d}"
