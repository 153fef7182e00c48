"""Processes of a test as forks of one that has imported torch and transformers, which takes 5 CPU seconds or more.

Ray starts a process for each of its workers, vLLM for each of its ranks, and gcore fork servers for the engines, ranks
and rewards of a run. Such a process, or one that a test starts with `FORK`, asks the server of an app's commands,
`tests/apps/cli_server.py`, for a fork that runs in its place, and ends with it.
"""

import contextlib
import fcntl
import json
import os
import runpy
import signal
import socket
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

SOCKET = "GCORE_TESTS_FORKS"
"""The variable with the path of the server's socket; next to it, `parent_of` finds whose place a fork has."""
MODULES = "GCORE_TESTS_FORK_MODULES"
"""The variable that has `python -m` of our modules run in forks, too."""
FORK = ("-X", "fork")
"""Options of a Python whose program is to run in a fork."""


def run_in_a_fork(command: list[str]) -> None:
    """Have these arguments of Python run in a fork with our files and environment, and end as it ends.

    Returns if no server is there, or none that sees the same files.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ[SOCKET])
        except OSError:
            return
        server, *_ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if Path(f"/proc/{server}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink():
            return
        files = _open_files()
        files.remove(connection.fileno())
        request = {
            "command": command,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "parent": os.getppid(),
            "files": files,
        }
        socket.send_fds(connection, [b"0"], files)
        connection.sendall(json.dumps(request).encode() + b"\n")
        code = int(connection.makefile().readline() or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _open_files() -> list[int]:
    files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    # Without the listing itself, which is closed now.
    return [fd for fd in files if Path(f"/proc/self/fd/{fd}").exists()]


class Forks:
    """In the server: a fork for each connection, at whose other end a process waits for it to end."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._connections: dict[int, socket.socket] = {}
        """By a descriptor of the fork, which can be read when that has ended."""

    def sources(self) -> list[int | socket.socket]:
        """Return what to wait for: one that can be read goes to `handle`."""
        return [self._listener, *self._connections, *self._connections.values()]

    def handle(self, source: int | socket.socket) -> None:
        """Start a fork, end the one whose place in the tree of processes is gone, or report that it has ended."""
        if source is self._listener:
            connection, _ = self._listener.accept()
            self._start(connection)
            return
        if isinstance(source, int):
            self._report(source)
            return
        for pidfd, connection in self._connections.items():
            if connection is source:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close what a fork does not need."""
        self._listener.close()
        for pidfd, connection in self._connections.items():
            os.close(pidfd)
            connection.close()

    def _report(self, pidfd: int) -> None:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _parent_file(self._folder, ended.si_pid).unlink(missing_ok=True)
        with self._connections.pop(pidfd) as connection, contextlib.suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        os.close(pidfd)

    def _start(self, connection: socket.socket) -> None:
        _, files, _, _ = socket.recv_fds(connection, 1, 64)
        request = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid == 0:
            _parent_file(self._folder, os.getpid()).write_text(str(request["parent"]))
            self.close()
            connection.close()
            _run(request, files)
        for fd in files:
            os.close(fd)
        self._connections[os.pidfd_open(pid)] = connection


def parent_of(pid: int) -> int | None:
    """Return the parent of the process whose place a fork has; None: it is no fork."""
    try:
        return int(_parent_file(Path(os.environ[SOCKET]).parent, pid).read_text())
    except (OSError, ValueError):
        return None


def _parent_file(folder: Path, pid: int) -> Path:
    return folder / f"parent-of-{pid}"


def _run(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that asks: with its files under the numbers that they have there."""
    _place(dict(zip(request["files"], files, strict=True)))
    if "--multiprocessing-fork" in request["command"]:
        import setproctitle

        # A rank of vLLM has a title, for which the arguments are looked for next to the environment as it was.
        setproctitle.getproctitle()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["command"][0] != "-c":
        # Ray ends the process group of a worker with it: that must not be the group of the tests.
        os.setpgid(0, 0)
    _have_parent(request["parent"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    flag, *rest = request["command"]
    if (flag, *rest[:1]) == FORK:
        flag, *rest = rest[1:]
    if flag == "-W":
        warnings._processoptions(rest[:1])  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportPrivateUsage]
        flag, *rest = rest[1:]
    code = 1
    try:
        if flag == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path[0] = ""
            exec(rest[0], {"__name__": "__main__"})
        elif flag == "-m":
            sys.argv = rest
            sys.path[0] = request["folder"]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [flag, *rest]
            sys.path[0] = str(Path(flag).parent)
            runpy.run_path(flag, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _have_parent(parent: int) -> None:
    """Answer with the parent of the process that asks; a child of this one has its own."""
    pid = os.getpid()
    getppid = os.getppid

    def get_parent() -> int:
        return parent if os.getpid() == pid else getppid()

    os.getppid = get_parent


def _place(file_of: dict[int, int]) -> None:
    """Give every file its number. First all are copied above those numbers, so that none takes another's place."""
    above = max([*file_of, *file_of.values()]) + 1
    copies: dict[int, int] = {}
    for number, fd in file_of.items():
        copies[number] = fcntl.fcntl(fd, fcntl.F_DUPFD, above)
        os.close(fd)
    for number, fd in copies.items():
        os.dup2(fd, number)
        os.close(fd)
