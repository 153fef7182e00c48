"""Ray's workers as forks of a process that has imported torch and transformers: importing takes 8 CPU seconds.

Ray starts a process for each worker. With `tests/startup` on its path, that process asks the server of an app's commands
(`tests/apps/cli_server.py`) to fork the worker, and stays as long as the worker does.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

SOCKET = "GCORE_TESTS_RAY_FORKS"
"""The variable with the path of the server's socket, at which `parent_of` finds who asked for a worker."""


def become_a_fork(argv: list[str]) -> None:
    """Run Ray's worker with these arguments as a fork, and end as it ends; return if no server is there."""
    request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ[SOCKET])
        except OSError:
            return
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        code = connection.makefile().readline()
    os._exit(int(code or 1))


class RayForks:
    """In the server: forks a worker per connection, and tells the process behind it how its worker ended."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._connections: dict[int, socket.socket] = {}

    def sources(self) -> list[socket.socket]:
        """Return what to wait for: one that can be read goes to `handle`."""
        return [self._listener, *self._connections.values()]

    def handle(self, source: socket.socket) -> None:
        if source is self._listener:
            connection, _ = self._listener.accept()
            self._start(connection)
            return
        # The process that Ray started is gone: so must its worker be.
        for pid, connection in list(self._connections.items()):
            if connection is source:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Let the processes that Ray started for workers that have ended end, too."""
        for pid, connection in list(self._connections.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self._parent_file(pid).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status) & 0xFF}\n".encode())
            connection.close()
            del self._connections[pid]

    def close(self) -> None:
        """Close what a fork does not need."""
        for source in self.sources():
            source.close()

    def _parent_file(self, pid: int) -> Path:
        return self._folder / f"parent-of-{pid}"

    def _start(self, connection: socket.socket) -> None:
        _, fds, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile().readline())
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        parent = int.from_bytes(credentials[:4], sys.byteorder)
        pid = os.fork()
        if pid == 0:
            self._parent_file(os.getpid()).write_text(str(parent))
            self.close()
            connection.close()
            _run(request, fds)
        for fd in fds:
            os.close(fd)
        self._connections[pid] = connection


def parent_of(pid: int) -> int | None:
    """Return the process that Ray started for this worker; None if it is no fork."""
    if SOCKET not in os.environ:
        return None
    try:
        return int((Path(os.environ[SOCKET]).parent / f"parent-of-{pid}").read_text())
    except (OSError, ValueError):
        return None


def _run(request: dict[str, object], fds: list[int]) -> None:
    for fd, target in zip(fds, range(3), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = list(request["argv"])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
