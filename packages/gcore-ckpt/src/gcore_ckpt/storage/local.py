"""Steps in a folder of a local or shared file system, open for one writer at a time.

A committed step is a folder of its canonical name, `step-00000012`, and nothing else is. Folders that are being written
or deleted have temporary names, so that one rename is what commits a step and what takes it back. Steps that were set
aside are folders `set-aside-00000012-<id>`; `Journal` says how several become that at once.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import uuid
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_ckpt.errors import CheckpointLockedError
from gcore_ckpt.format import validation
from gcore_ckpt.storage import (
    INDEX_FILE,
    JOURNAL_FILE,
    MAX_INDEX_BYTES,
    Journal,
    settled_steps,
    step_name,
    step_of,
)
from gcore_ckpt.threads import Workers

if TYPE_CHECKING:
    import numpy as np

    from gcore_ckpt.storage.object_store import ObjectStorage

_logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII)
_TEMP_FOLDER = re.compile(r"\.tmp-step-\d{8,}-[0-9a-f]{12}", re.ASCII)
_TEMP_JOURNAL = re.compile(r"\.tmp-rollback-[0-9a-f]{12}", re.ASCII)
_SET_ASIDE = re.compile(r"set-aside-(\d{8,})-[0-9a-f]{12}", re.ASCII)
_PAGE_BYTES = 4096
_CHUNK_BYTES = 16 << 20
_WRITE_THREADS = 4
_MAX_OPEN_FILES = 256
_NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.ENOTTY)
"""Errors of a file system that does not have a call: networks and FUSE."""
_NO_HARD_LINKS = (*_NOT_SUPPORTED, errno.EPERM, errno.EMLINK, errno.EXDEV)

_locks: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_locks() -> None:
    """Close a forked child's copies: they would keep a lock held after its writer is dead."""
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_locks)


def open_storage(path: str | os.PathLike[str]) -> "LocalStorage | ObjectStorage":
    """Return the storage of a path: a folder, or a URL such as `s3://bucket/folder` or `gs://bucket/folder`."""
    if isinstance(path, str) and _URL.match(path):
        from gcore_ckpt.storage.object_store import ObjectStorage

        return ObjectStorage(path)
    return LocalStorage(path)


class LocalStorage:
    """The steps in one folder, `path`; every process of a group must see it under the same path.

    On a file system without locks (some networks and FUSE) a warning is logged, and the last writer that comes has the
    folder: the one before it fails at its next save. Without a sync of folders a commit may not survive a power cut.
    """

    max_file_bytes = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._written_path = str(path)
        self.path = Path(path).absolute()  # also after a change of the working directory
        self._lock: FileIO | None = None

    def __str__(self) -> str:
        return self._written_path

    @cached_property
    def _workers(self) -> Workers:
        return Workers(_WRITE_THREADS)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; none if there is no such folder."""
        return settled_steps(self._list_steps, self._read_journal) if self.path.is_dir() else []

    def open_step(self, step: int) -> "LocalFiles":
        """Open a committed step; its files stay readable while it is open, also if they are deleted meanwhile."""
        return LocalFiles(self.path / step_name(step), maps_links=False)

    def acquire(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path.parent)
        self._lock, self._lock_text = _lock(self.path)
        try:
            self._remove_leftovers()
            self._finish_setting_aside()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._workers.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, step: int) -> str:
        self._check_lock()
        attempt = _temp_name(step)
        (self.path / attempt).mkdir()
        return attempt

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        """Write past the page cache where memory and file system allow it: faster, and it costs training no CPU."""
        path = self.path / attempt / name
        if not (len(parts) == 1 and _is_aligned(parts[0]) and self._write_direct(path, parts[0])):
            write_synced(path, *parts)

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        source = self.path / step_name(step) / file
        target = self.path / attempt / name
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            shutil.copyfile(source, target)
            _sync_file(target)

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Write and sync the index, sync the folder, rename it, and sync its parent."""
        self._check_lock()
        temp = self.path / attempt
        for name, expected in sizes.items():
            path = temp / name
            actual_bytes = path.stat().st_size if path.exists() else None
            if actual_bytes != expected:
                raise FileNotFoundError(
                    f"{path} has {actual_bytes} bytes here, its writer wrote {expected}: "
                    "all processes of a group must see the path, on one file system"
                )
        write_synced(temp / INDEX_FILE, index)
        sync_directory(temp)
        temp.rename(self.path / step_name(step))
        sync_directory(self.path)

    def abort(self, attempt: str) -> None:
        shutil.rmtree(self.path / attempt, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Rename a step away, then delete it."""
        self._check_lock()
        self._remove_folder(step_name(step), step)

    def set_aside(self, steps: Sequence[int]) -> None:
        """Record the steps, which is the atomic act, then rename them."""
        self._check_lock()
        self._finish_setting_aside()  # of an earlier call that failed halfway
        if steps:
            self._write_journal(Journal(pending=tuple(steps)))
            self._finish_setting_aside()

    def steps_set_aside(self) -> list[int]:
        """Return the steps that were set aside, ascending; one that was set aside twice is there twice."""
        if not self.path.is_dir():
            return []
        pending = self._read_journal().pending
        steps = [step for _, step in self._list_set_aside()]
        steps.extend(step for step in pending if (self.path / step_name(step)).is_dir())
        return sorted(steps)

    def _list_set_aside(self) -> list[tuple[str, int]]:
        """Return the names of the folders that were set aside, and their steps."""
        folders: list[tuple[str, int]] = []
        for entry in self.path.iterdir():
            match = _SET_ASIDE.fullmatch(entry.name)
            if match is not None:
                folders.append((entry.name, int(match[1])))
        return folders

    def remove_set_aside(self) -> None:
        """Delete what was set aside."""
        for folder, step in self._list_set_aside():
            self._remove_folder(folder, step)

    def _check_lock(self) -> None:
        """Raise if the lock file is no longer the one that was locked: another writer may have replaced it."""
        try:
            is_own = (self.path / LOCK_FILE).read_bytes() == self._lock_text
        except FileNotFoundError:
            is_own = False
        if not is_own:
            raise CheckpointLockedError(
                f"{self.path / LOCK_FILE} is not the file that this writer has locked: {self.path} was deleted or "
                "replaced meanwhile, or has another writer on a file system without locks; expected one writer, and a "
                "new Checkpointer for what is there now"
            )

    def _list_steps(self) -> set[int]:
        steps = {step_of(entry.name) for entry in self.path.iterdir() if entry.is_dir()}
        return {step for step in steps if step is not None}

    def _remove_folder(self, name: str, step: int) -> None:
        temp = self.path / _temp_name(step)
        (self.path / name).rename(temp)
        shutil.rmtree(temp)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of dead writers: only what has a temporary name of this class."""
        for entry in self.path.iterdir():
            try:
                if _TEMP_FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif _TEMP_JOURNAL.fullmatch(entry.name) and entry.is_file():
                    entry.unlink()
            except OSError as error:
                _logger.warning(
                    "%s, which a dead writer has left, cannot be removed: %s", entry, error
                )

    def _finish_setting_aside(self) -> None:
        journal = self._read_journal()
        if not journal.pending:
            return
        for step in journal.pending:
            folder = self.path / step_name(step)
            if folder.is_dir():
                folder.rename(self.path / f"set-aside-{step:08d}-{_new_id()}")
        sync_directory(self.path)
        self._write_journal(Journal())

    def _read_journal(self) -> Journal:
        path = self.path / JOURNAL_FILE
        try:
            with validation.reading(path):
                data = _read_regular(path)
        except FileNotFoundError:
            data = None
        return Journal.decode(data, str(path))

    def _write_journal(self, journal: Journal) -> None:
        temp = self.path / f".tmp-rollback-{_new_id()}"
        write_synced(temp, journal.encode())
        temp.replace(self.path / JOURNAL_FILE)
        sync_directory(self.path)

    def _write_direct(self, path: Path, data: memoryview) -> bool:
        """Write and sync whole pages with O_DIRECT and the rest without; False if the file system cannot."""
        pages = len(data) // _PAGE_BYTES * _PAGE_BYTES
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
        except OSError:
            return False
        try:
            probe = min(pages, _CHUNK_BYTES)
            try:
                _pwrite_fully(fd, data[:probe], 0)
            except OSError as error:
                if error.errno == errno.EINVAL:  # opened, but not meant
                    return False
                raise
            starts = range(probe, pages, _CHUNK_BYTES)
            self._workers.run(
                lambda start=start: _pwrite_fully(
                    fd, data[start : min(start + _CHUNK_BYTES, pages)], start
                )
                for start in starts
            )
        finally:
            os.close(fd)
        with path.open("r+b", buffering=0) as file:
            _pwrite_fully(file.fileno(), data[pages:], pages)
            os.fsync(file.fileno())
        return True


class LocalFiles:
    """The open files of one step's folder, or of any folder that holds plain data files.

    At most `_MAX_OPEN_FILES` are kept open, since processes may open few; the others are opened for each read, by the
    folder, which may be renamed meanwhile.
    """

    def __init__(self, folder: Path, *, maps_links: bool = True) -> None:
        self.folder = folder
        self._maps_links = maps_links
        self._open = ExitStack()
        self._files: dict[str, int] = {}

    def __enter__(self) -> "LocalFiles":
        self._folder_fd = self._open_file(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read_index(self) -> bytes:
        return _read_regular(self.folder / INDEX_FILE)

    def open(self, name: str) -> int:
        """Open a data file and return its size."""
        path = self.folder / name
        _check_regular(path.stat())  # opening a pipe would wait for ever
        if len(self._files) >= _MAX_OPEN_FILES and name not in self._files:
            return os.stat(name, dir_fd=self._folder_fd).st_size
        self._files[name] = self._open_file(path)
        return os.fstat(self._files[name]).st_size

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        with self._open_briefly(name) as fd:
            return _read_fully(fd, offset_bytes, buffer)

    def map(self, name: str, offset_bytes: int, size_bytes: int) -> "np.memmap[Any, Any] | None":
        """Return bytes of an open file, copied on write; None for a link, where a step's files are none."""
        import numpy as np

        if not self._maps_links and stat.S_ISLNK(os.lstat(name, dir_fd=self._folder_fd).st_mode):
            return None
        with self._open_briefly(name) as fd, os.fdopen(os.dup(fd), "rb") as file:
            return np.memmap(file, np.uint8, "c", offset_bytes, (size_bytes,))

    @contextmanager
    def _open_briefly(self, name: str) -> Generator[int]:
        if name in self._files:
            yield self._files[name]
            return
        fd = os.open(name, os.O_RDONLY, dir_fd=self._folder_fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_file(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        self._open.callback(os.close, fd)
        return fd


def _read_regular(path: Path) -> bytes:
    """Return the bytes of a file; `ValueError` for anything that may have no end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for ever
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        _check_regular(status)
        if status.st_size > MAX_INDEX_BYTES:
            raise ValueError(f"has {status.st_size} bytes; expected at most {MAX_INDEX_BYTES}")
        return file.read(status.st_size)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is no regular file")


def _read_fully(fd: int, offset_bytes: int, buffer: memoryview) -> int:
    size_bytes = 0
    with suppress(OSError):  # a file system without it
        # Else the kernel reads ahead by so little that a disk with any latency is mostly idle.
        os.posix_fadvise(fd, offset_bytes, len(buffer), os.POSIX_FADV_WILLNEED)
    while size_bytes < len(buffer):
        count = os.preadv(fd, [buffer[size_bytes:]], offset_bytes + size_bytes)
        if not count:
            break
        size_bytes += count
    return size_bytes


def _temp_name(step: int) -> str:
    return f".tmp-{step_name(step)}-{_new_id()}"


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _is_aligned(data: memoryview) -> bool:
    import numpy as np  # here, so that looking into a checkpoint loads none of it

    return len(data) >= _PAGE_BYTES and np.frombuffer(data, np.uint8).ctypes.data % _PAGE_BYTES == 0


def _pwrite_fully(fd: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)


def _lock(path: Path) -> tuple[FileIO, bytes]:
    """Lock a folder until the returned file is closed or the process ends; also return the text written to the file."""
    # The file is never removed: a writer that has opened it would lock a name that no other process can see.
    file = FileIO(path / LOCK_FILE, "a+")
    try:
        _flock(file, path)
        file.truncate(0)
    except BaseException:
        file.close()
        raise
    text = f"process {os.getpid()} on {socket.gethostname()}\n{_new_id()}\n".encode()
    try:
        text = text[: file.write(text)]
    except OSError as error:  # a full disk, on which steps can be deleted all the same
        _logger.warning(
            "%s cannot be written to, and does not name its holder: %s", path / LOCK_FILE, error
        )
        text = b""
    _locks.add(file)
    return file, text


def _flock(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.readline().decode(errors="replace").strip() or "another writer"
        raise CheckpointLockedError(
            f"{path} is being written to by {holder}; one writer per path"
        ) from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        _logger.warning(
            "%s is on a file system without locks (%s): expected no other process that saves",
            path,
            error,
        )


def write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that survives a power cut."""
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        _warn_once(
            f"the file system cannot sync folders ({error}): a commit may not survive a power cut"
        )
    finally:
        os.close(fd)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@cache
def _warn_once(message: str) -> None:
    _logger.warning("%s", message)
