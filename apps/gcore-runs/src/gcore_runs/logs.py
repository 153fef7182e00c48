"""Logs of a run's processes, one file for each and all merged by time, and their memory; text of others in messages."""

import asyncio
import ctypes
import faulthandler
import heapq
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from logging.handlers import RotatingFileHandler
from operator import itemgetter
from pathlib import Path
from resource import getpagesize
from typing import Any, BinaryIO, TypeVar

from gcore_runs.errors import UserError

T = TypeVar("T")

MAX_FILE_BYTES = 16 * 2**20
"""Size at which a file is renamed to NAME.log.1, and a new one started."""
NUM_OLD_FILES = 3
"""Number of renamed files that are kept."""
MAIN = "main.log"
"""The file of a run's main process."""
MARK = "MARK"
"""Level of a line that dates the output above it."""
_MARK_EVERY_S = 0.5
_MARKS_A_READING = 10
"""Marks for each reading of the process's memory."""
_MEMORY = ".memory"
"""Suffix of the file next to a log in which its process writes its memory every few seconds."""
_FRESH_S = 60.0
"""Age of that file from which on its process has ended."""
_POLL_S = 0.3
_IOLBF = 1
"""C's constant: a buffer is written at the end of every line."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor or change its state or direction; not line breaks and tabs."""

_logger = logging.getLogger(__name__)
_active = ExitStack()
"""The logging of this process, or of the one that it was forked from; closing it ends the logging."""


def logs_of(checkpoints: Path) -> Path:
    """Return the folder of logs of the run with these checkpoints."""
    return checkpoints.parent / "logs"


def log_to(
    folder: Path, role: str, rank: int | None = None, *, redirect: bool = False
) -> ExitStack:
    """Send what this process logs to ``folder/ROLE-RANK.log``, until the result is closed or this is called again.

    A line starts with the time in UTC, the process and the level. Warnings are logged, too, and the error that leaves
    the result's ``with`` block. What is in the file already stays.

    Args:
        role: lower-case letters, digits and _, such as engine; anything else is a `ValueError`.
        rank: among the processes of this role; None: there is one.
        redirect: what is written to standard output and standard error, by native libraries too, goes into the file. It
            is there at once, however the process ends, but as it was written: a line of level MARK follows within
            half a second. Without it warnings and errors are shown on standard error as well, as Python does by itself.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", role):
        raise ValueError(f"role is {role!r}; expected lower-case letters, digits and _")
    _active.close()
    process = role if rank is None else f"{role}-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    root = logging.getLogger()
    is_first = not root.handlers
    handler = _File(folder / f"{process}.log", redirect=redirect)
    handler.setFormatter(_Printable(process))
    stack.callback(handler.close)
    # A process before this one may have been killed in the middle of its output.
    handler.mark()
    if redirect:
        _redirect(handler, stack)
    _add(handler, stack)
    stack.push(_log_error)
    if is_first and not redirect and logging.lastResort is not None:
        stack.callback(logging.lastResort.setFormatter, logging.lastResort.formatter)
        logging.lastResort.setFormatter(_Printable())
        _add(logging.lastResort, stack)
    stack.callback(root.setLevel, root.level)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    stack.callback(logging.captureWarnings, False)
    _active.callback(stack.close)
    _logger.info("process %d on %s begins", os.getpid(), socket.gethostname())
    return stack


def logged(folder: Path, role: str, rank: int, make: Callable[[], T]) -> T:
    """Call ``make``, in a process whose output goes to ``folder/ROLE-RANK.log`` from now on."""
    log_to(folder, role, rank, redirect=True)
    return make()


@contextmanager
def announce_slow_calls(announce: Callable[[str], None]) -> Generator[None]:
    """Announce the warnings of slow rewards, too, in a process whose output goes into its log.

    ``announce`` is called in this event loop: a reward that blocks it delays the line until the call returns.
    """
    loop = asyncio.get_running_loop()

    def pass_on(record: logging.LogRecord) -> bool:
        # Messages come from any thread.
        loop.call_soon_threadsafe(announce, record.getMessage())
        return True

    logger = logging.getLogger("gcore_rollout.rewards.slow_calls")
    logger.addFilter(pass_on)
    try:
        yield
    finally:
        logger.removeFilter(pass_on)


class _Printable(logging.Formatter):
    """Formats records for the screen or, with the name of a ``process``, for its file.

    There time, process and level are before every line of a record, a traceback's too.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__("%(name)s: %(message)s" if process else None)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        if not self._process:
            return text
        start = f"{_utc(record.created)} {self._process} {record.levelname} "
        return "\n".join(start + line for line in text.rstrip("\n").split("\n"))


class _File(RotatingFileHandler):
    """A log file that keeps standard output and standard error when it is rotated."""

    def __init__(self, path: Path, *, redirect: bool) -> None:
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
        self._redirect = redirect
        self._dated_bytes = 0

    def doRollover(self) -> None:  # noqa: N802 - logging's name
        super().doRollover()
        if self._redirect:
            self.take_output()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._dated_bytes = os.fstat(self._descriptor()).st_size

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop a record if the disk is full: the run ends with an error where it cannot write its own files."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, and drop what a full disk cannot hold; see `handleError`."""
        with suppress(OSError):
            super().close()

    def take_output(self) -> None:
        """Write what goes to standard output and standard error into the file."""
        for descriptor in (1, 2):
            os.dup2(self._descriptor(), descriptor)

    def mark(self) -> None:
        """Date the output after the last dated line."""
        self.acquire()
        try:
            status = os.fstat(self._descriptor())
            if status.st_size > self._dated_bytes:
                values = {
                    "levelname": MARK,
                    "name": "output",
                    "msg": "until here",
                    "created": status.st_mtime,
                }
                self.handle(logging.makeLogRecord(values))
        finally:
            self.release()

    def _descriptor(self) -> int:
        assert self.stream is not None, "the log file is closed"
        return self.stream.fileno()


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _redirect(file: _File, stack: ExitStack) -> None:
    """Send standard output and standard error to the file, line by line."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    libc = ctypes.CDLL(None)

    def flush() -> None:
        for stream in streams:
            stream.flush()
        libc.fflush(None)

    flush()
    for descriptor in (1, 2):
        before = os.dup(descriptor)
        stack.callback(os.close, before)
        stack.callback(os.dup2, before, descriptor)
    stack.callback(flush)
    file.take_output()
    for stream in streams:
        stream.reconfigure(line_buffering=True)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    # A fatal signal leaves a traceback.
    faulthandler.enable(2)
    ended = threading.Event()

    memory = Path(file.baseFilename).with_suffix(_MEMORY)

    def mark() -> None:
        for number in count():
            if number % _MARKS_A_READING == 0:
                # On a full disk there is none.
                with suppress(OSError):
                    memory.write_text(json.dumps(process_memory(memory.stem)))
            if ended.wait(_MARK_EVERY_S):
                return
            file.mark()

    marks = threading.Thread(target=mark, name="log-marks", daemon=True)
    marks.start()
    stack.callback(marks.join)
    stack.callback(ended.set)


def process_memory(name: str) -> dict[str, float]:
    """Return the memory of this process, of this name, in GB: its own that is resident, and what torch has on CUDA.

    The keys are ``resident_gb/NAME``, without shared memory and mapped files, and where CUDA is used
    ``reserved_gb/NAME``.
    """
    _, resident, shared, *_ = Path("/proc/self/statm").read_text("ascii").split()
    sizes = {f"resident_gb/{name}": (int(resident) - int(shared)) * getpagesize() / 1e9}
    cuda: Any = sys.modules.get("torch.cuda")
    # Another thread may be importing it.
    if getattr(cuda, "is_initialized", bool)():
        reserved = map(cuda.memory_reserved, range(cuda.device_count()))
        sizes[f"reserved_gb/{name}"] = sum(reserved) / 1e9
    return sizes


def read_memory(folder: Path) -> dict[str, float]:
    """Return the memory of all processes that log to a folder, and of this one; see `process_memory`."""
    sizes = process_memory("main")
    for file in folder.glob(f"*{_MEMORY}"):
        if time.time() - file.stat().st_mtime < _FRESH_S:
            # Empty while it is written.
            sizes |= json.loads(file.read_text() or "{}")
    return sizes


def _add(handler: logging.Handler, stack: ExitStack) -> None:
    root = logging.getLogger()
    root.addHandler(handler)
    stack.callback(root.removeHandler, handler)


def _log_error(_kind: object, error: BaseException | None, _traceback: object) -> None:
    if error is not None:
        _logger.error("ended by an error", exc_info=error)


def merged_lines(
    folder: Path, *, role: str = "", rank: int | None = None, last: int = 0, follow: bool = False
) -> Generator[str]:
    """Yield the ``last`` lines, or all, that `log_to` wrote into ``folder``, by time, of one role or rank, or of all.

    Output has no time of its own: it gets that of its process's next record, and the level OUT. With ``follow``, lines
    that are written from now on, by new processes too, follow without an end; else a `UserError` says if there is none.
    """
    files: dict[Path, _LogFile] = {}
    with ExitStack() as to_close:
        while True:
            # Nodes that do not share the folder have one of their own in it.
            paths = sorted([*folder.glob("*.log"), *folder.glob("*/*.log")])
            for path in paths:
                its_role, _, its_rank = path.stem.partition("-")
                matches = role in ("", its_role) and (rank is None or str(rank) == its_rank)
                if matches and path not in files:
                    files[path] = to_close.enter_context(
                        closing(_LogFile(path, is_followed=follow))
                    )
            if not files and not follow:
                rank_text = "any" if rank is None else rank
                there = ", ".join(path.stem for path in paths) or "none at all"
                raise UserError(
                    f"{folder} has no logs of role {role or 'any'}, rank {rank_text}; there are: {there}"
                )
            parts = [file.read() for file in files.values()]
            dated_lines: Iterable[tuple[str, str]] = heapq.merge(*parts, key=itemgetter(0))
            if last:
                dated_lines = deque(dated_lines, maxlen=last)
            for _, line in dated_lines:
                yield line
            if not follow:
                return
            last = 0
            time.sleep(_POLL_S)


class _LogFile:
    """One process's file, with its rotated ones."""

    def __init__(self, path: Path, *, is_followed: bool) -> None:
        self._path = path
        self._is_followed = is_followed
        self._file: BinaryIO | None = None
        # Output need not end with a line break, so a record may follow it on the same line.
        self._record = re.compile(
            rf"(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{6}}Z) {re.escape(path.stem)} ([A-Z]+) "
        )

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
                yield from self._date(output, record[1])
                output.clear()
                if record[2] != MARK:
                    yield record[1], line[record.start() :]
        if output:
            yield from self._date(output, _utc(self._path.stat().st_mtime))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _date(self, output: Iterable[str], when: str) -> Iterator[tuple[str, str]]:
        for line in output:
            yield when, f"{when} {self._path.stem} OUT {line}"

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
        for line in iter(file.readline, b""):
            if self._is_followed and not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                return
            yield line


def printable(text: str) -> str:
    """Return a text in which control characters, which may come from a response, a reward or a server, are escaped."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(error: object) -> str:
    """Return an error's message without line breaks, as some libraries put into theirs, and control characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    return printable(" ".join(line for line in lines if line))


def describe_os_error(error: OSError) -> str:
    """Return the operating system's reason, and the file's name if there is one."""
    reason = error.strerror or one_line(error)
    file = error.filename2 or error.filename
    return f"{file}: {reason}" if file is not None else reason
