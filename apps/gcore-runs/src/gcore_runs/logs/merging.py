"""Merge the logs of a run's processes by time."""

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from gcore_runs.errors import UserError
from gcore_runs.logs.writing import MARK, NUM_OLD_FILES

_POLL_S = 0.3


def merged_lines(
    folder: Path, *, role: str = "", rank: int | None = None, last: int = 0, follow: bool = False
) -> Generator[str]:
    """Yield the lines of the files that `log_to` wrote into ``folder``, by time.

    Output has no time of its own: it gets that of its process's next record, and the level OUT.

    Args:
        role: processes of this role alone; empty: all.
        rank: processes of this rank alone; None: all.
        last: how many of the existing lines; 0: all.
        follow: continue with lines that are written from now on, by new processes too, without an end.

    Raises:
        UserError: there are no such logs, and ``follow`` is not set.
    """
    files: dict[Path, _LogFile] = {}
    with ExitStack() as opened:
        while True:
            paths = sorted(folder.glob("*.log"))
            for path in paths:
                if path not in files and _is_of(path, role, rank):
                    files[path] = opened.enter_context(closing(_LogFile(path, is_followed=follow)))
            if not files and not follow:
                wanted = f"role {role or 'any'}, rank {'any' if rank is None else rank}"
                there = ", ".join(path.stem for path in paths) or "none at all"
                raise UserError(f"{folder} has no logs of {wanted}; there are: {there}")
            lines = (line for _, line in heapq.merge(*(file.read() for file in files.values()), key=itemgetter(0)))
            yield from deque(lines, maxlen=last) if last else lines
            if not follow:
                return
            last = 0
            time.sleep(_POLL_S)


def _is_of(path: Path, role: str, rank: int | None) -> bool:
    its_role, _, its_rank = path.stem.partition("-")
    return role in ("", its_role) and (rank is None or str(rank) == its_rank)


class _LogFile:
    """One process's file, with its rotated ones."""

    def __init__(self, path: Path, *, is_followed: bool) -> None:
        self._path = path
        self._is_followed = is_followed
        self._file: BinaryIO | None = None
        # Output need not end with a line break, so a record may follow it on the same line.
        self._record = re.compile(rf"(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{6}}Z) {re.escape(path.stem)} ([A-Z]+) ")

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield time and line of everything that has not been read yet; the times never decrease."""
        output: list[str] = []
        for raw in self._lines():
            line = raw.decode(errors="replace").rstrip("\n")
            record = self._record.search(line)
            before = line if record is None else line[: record.start()]
            if before or record is None:
                # The last state of a progress bar.
                output.append(before.rstrip("\r").rpartition("\r")[2])
            if record is not None:
                yield from self._dated(output, record[1])
                output.clear()
                if record[2] != MARK:
                    yield record[1], line[record.start() :]
        if output:
            written = datetime.fromtimestamp(self._path.stat().st_mtime, UTC)
            yield from self._dated(output, written.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _dated(self, output: Iterable[str], when: str) -> Iterator[tuple[str, str]]:
        return ((when, f"{when} {self._path.stem} OUT {line}") for line in output)

    def _lines(self) -> Iterator[bytes]:
        if self._file is None:
            for number in range(NUM_OLD_FILES, 0, -1):
                old = self._path.with_name(f"{self._path.name}.{number}")
                if old.is_file():
                    with old.open("rb") as file:
                        yield from file
            self._file = self._path.open("rb")
        yield from self._to_end(self._file)
        if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
            with self._file as old:
                self._file = self._path.open("rb")
                yield from self._to_end(old)
            yield from self._to_end(self._file)

    def _to_end(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline():
            if self._is_followed and not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                return
            yield line
