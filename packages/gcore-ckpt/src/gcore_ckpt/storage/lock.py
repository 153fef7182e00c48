"""One writer per folder of checkpoints, by an advisory lock that dies with its process."""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from gcore_ckpt.errors import CheckpointLockedError

LOCK_FILE = ".lock"


class WriterLock:
    """Holds the lock of `path` until `release` or the end of the process; `kill -9` leaves nothing.

    Raises:
        CheckpointLockedError: Another writer holds it, in this process or any other.
    """

    def __init__(self, path: Path) -> None:
        # The file is never removed: a writer that has opened it would lock a name that no other process can see.
        self._file = (path / LOCK_FILE).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another writer"
            self._file.close()
            raise CheckpointLockedError(f"{path} is being written to by {holder}; one writer per path") from None
        except OSError:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        _held.add(self)

    def release(self) -> None:
        """Let the next writer in."""
        _held.discard(self)
        self._file.close()

    def drop_inherited(self) -> None:
        """Close a forked child's copy: it would keep the lock held after the writer is dead."""
        self._file.close()


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    for lock in _held:
        lock.drop_inherited()


os.register_at_fork(after_in_child=_drop_inherited)
