"""Processes of agents' commands are found by a variable in their environment, and ended.

As a program it is the guard of its parent: it ends the parent's commands once that has ended, also if it was killed.
It imports nothing but the standard library, so that it starts in a few milliseconds.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

KILL_S = 5.0
"""Seconds that a command has to end after SIGTERM."""
POLL_S = 0.05
_SETTLE_S = 0.5
"""Seconds after which the guard looks again: a command may just have been started, or have started another."""
_MAX_KILLS = 20
"""Most times that processes of a command are looked for and killed: they may start others meanwhile."""


def row_variable(path: Path) -> str:
    """Return what the environment of a command's processes has, given the path of its row or of a folder above it."""
    return f"GCORE_ROW={path}"


def find_processes(variable: str) -> list[int]:
    """Return the processes whose environment has a variable that starts so; those that have ended have none."""
    pids: list[int] = []
    start = variable.encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # It has just ended, or is another user's.
        with suppress(OSError):
            entries = environment.read_bytes().split(b"\0")
            if any(entry.startswith(start) for entry in entries):
                pids.append(int(environment.parent.name))
    return pids


def signal_processes(variable: str, number: signal.Signals) -> int:
    """Send a signal to the processes that `find_processes` returns; return how many there are."""
    pids = find_processes(variable)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


def kill_processes(variable: str) -> None:
    """Kill the processes that `find_processes` returns, until there are none."""
    for _ in range(_MAX_KILLS):
        if not signal_processes(variable, signal.SIGKILL):
            break


class CommandGuard:
    """A process that ends this process's commands, and removes their folders, when this process has ended."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gcore-agents-"))
        """The folder of all commands."""
        # In a session of its own: neither Ctrl-C nor a signal to this process's group ends it.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        self._pipe = process.stdin
        # It leaves the guard behind.
        process.wait()

    def close(self) -> None:
        """Have the guard end the commands that are left, and itself."""
        self._pipe.close()


def start_guard() -> CommandGuard:
    """Return the guard of this process, which starts with the first call."""
    return _start_guard(os.getpid())


@cache
def _start_guard(pid: int) -> CommandGuard:
    del pid
    guard = CommandGuard()
    atexit.register(guard.close)
    return guard


def _guard(folder: Path) -> None:
    """Wait until the parent has ended, and end its commands."""
    # The guard is no child of the parent: a worker of Ray kills its children as it ends.
    if os.fork():
        os._exit(0)
    # The parent alone has the other end of the pipe, which the kernel closes.
    sys.stdin.buffer.read()
    variable = row_variable(folder) + "/"
    deadline = time.monotonic() + KILL_S
    if not signal_processes(variable, signal.SIGTERM):
        time.sleep(_SETTLE_S if any(folder.iterdir()) else 0.0)
    while find_processes(variable) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    kill_processes(variable)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
