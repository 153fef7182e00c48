"""The owner's side of a fork server and the processes forked from it."""

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from gcore_rollout.engines.processes.fork_server import STATUS
from gcore_rollout.errors import EngineDiedError


class _ForkServer:
    """The owner's end of a fork server, which runs until this process ends."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._owner_pid = os.getpid()
        self._control, theirs = socket.socketpair()
        with theirs:
            # Not `-m`: this process may have found gcore_rollout where a fresh one would not look.
            arguments = f"{theirs.fileno()}, {os.getpid()}, {preload!r}"
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from gcore_rollout.engines.processes.fork_server import serve; serve({arguments})"
            )
            command = [sys.executable, "-c", program]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def serves(self) -> bool:
        """Return whether it runs and belongs to this process; a fork of the owner has to start another."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def fork(self, *fds: int) -> None:
        socket.send_fds(self._control, [b"\0"], fds)

    def close(self) -> None:
        if self.serves():
            # Not close alone: a fork of this process may have its end of the socket, too.
            self._control.shutdown(socket.SHUT_RDWR)
            self._process.wait()
        self._control.close()


_servers: dict[tuple[str, ...], _ForkServer] = {}


def _server(preload: tuple[str, ...]) -> _ForkServer:
    """Return the server with these imports, starting it if needed."""
    server = _servers.get(preload)
    if server is None or not server.serves():
        server = _servers[preload] = _ForkServer(preload)
    return server


@dataclass(eq=False)
class ChildProcess:
    """A process that ends with this one at the latest.

    Attributes:
        pid: Its number; for signals there is `kill`, which cannot hit another process that was given the same one.
    """

    pid: int
    _pidfd: int
    _status: socket.socket

    @classmethod
    async def fork(cls, channel: socket.socket, weights: socket.socket, *, preload: tuple[str, ...]) -> Self:
        """Fork an engine process that has these sockets, which are closed here.

        Raises:
            EngineDiedError: the fork server ended.
        """
        status, theirs = socket.socketpair()
        try:
            with channel, weights, theirs:
                _server(preload).fork(channel.fileno(), weights.fileno(), theirs.fileno())
            status.setblocking(False)
            await _readable(status)
            data, fds, _, _ = socket.recv_fds(status, STATUS.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise EngineDiedError("the fork server ended before it made an engine process")
        except BaseException:
            status.close()
            raise
        return cls(STATUS.unpack(data)[0], fds[0], status)

    async def ended(self) -> str:
        """Wait until it has ended, and describe why. To be called once."""
        data = await asyncio.get_running_loop().sock_recv(self._status, STATUS.size)
        if not data:
            # It cannot outlive the server, which alone could have reported more.
            return "ended with the fork server that it came from"
        (code,) = STATUS.unpack(data)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill it with SIGKILL; do nothing if it has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the process, killing it if it runs."""
        self.kill()
        os.close(self._pidfd)
        self._pidfd = -1
        self._status.close()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
