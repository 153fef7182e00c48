"""The process from which engine processes are forked, which imports their common modules once, and its owner's side.

`multiprocessing` has a fork server, too, but runs the owner's main module again in every child, has one list of imports
for all, and forbids daemonic processes to have children, which vLLM's tensor parallelism needs.
"""

import asyncio
import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from gcore_rollout.engines.processes import engine_server
from gcore_rollout.errors import EngineDiedError

_STATUS = struct.Struct("!i")
"""The message on a status socket: first the pid, with a descriptor of the process, and last the exit code."""

_PR_SET_PDEATHSIG = 1


def serve(control_fd: int, owner_pid: int, preload: Sequence[str]) -> None:
    """Fork a child for each byte that comes with the descriptors (channel, weights, status) until the owner is gone.

    The children go with this process, which goes with its owner, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    if os.getppid() != owner_pid:
        return
    for module in preload:
        # The engine imports a missing module again, and the error then reaches the caller.
        with suppress(ImportError):
            importlib.import_module(module)
    # Collections in the children would otherwise write to, and so copy, the memory that they share.
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready = set(select.select([control.fileno(), owner, *children], [], [])[0])
        if owner in ready:
            return
        for pidfd in children.keys() & ready:
            pid, status = children.pop(pidfd)
            _, wait_status = os.waitpid(pid, 0)
            os.close(pidfd)
            with status, suppress(OSError):  # the owner did not wait for it
                status.send(_STATUS.pack(os.waitstatus_to_exitcode(wait_status)))
        if control.fileno() in ready:
            _, fds, _, _ = socket.recv_fds(control, 1, 3, socket.MSG_CMSG_CLOEXEC)
            if not fds:
                return
            channel, weights, status = (socket.socket(fileno=fd) for fd in fds)
            server_pid, pid = os.getpid(), os.fork()
            if pid == 0:
                for pidfd, (_, other) in children.items():
                    os.close(pidfd)
                    other.close()
                for mine in (control, status):
                    mine.close()
                os.close(owner)
                _run_child(channel, weights, server_pid)
            channel.close()
            weights.close()
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, status)
            with suppress(OSError):  # the owner did not wait for it
                socket.send_fds(status, [_STATUS.pack(pid)], [pidfd])


def _run_child(channel: socket.socket, weights: socket.socket, server_pid: int) -> None:
    """Run a child, and exit."""
    exit_code = 1
    try:
        # Ends the child at once, even if it hangs and does not notice that its owner's end of the channel is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server_pid:
            engine_server.run(channel, weights)
            exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit handlers of the server must not run in a child.
        os._exit(exit_code)


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
                server = _servers.get(preload)
                if server is None or not server.serves():
                    server = _servers[preload] = _ForkServer(preload)
                server.fork(channel.fileno(), weights.fileno(), theirs.fileno())
            status.setblocking(False)
            ready = asyncio.Event()
            asyncio.get_running_loop().add_reader(status, ready.set)
            try:
                await ready.wait()
            finally:
                asyncio.get_running_loop().remove_reader(status)
            data, fds, _, _ = socket.recv_fds(status, _STATUS.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise EngineDiedError("the fork server ended before it made an engine process")
        except BaseException:
            status.close()
            raise
        return cls(_STATUS.unpack(data)[0], fds[0], status)

    async def ended(self) -> str:
        """Wait until it has ended, and describe why. To be called once."""
        data = await asyncio.get_running_loop().sock_recv(self._status, _STATUS.size)
        if not data:
            # It cannot outlive the server, which alone could have reported more.
            return "ended with the fork server that it came from"
        (code,) = _STATUS.unpack(data)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill it with SIGKILL; do nothing if it has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        os.close(self._pidfd)
        self._pidfd = -1
        self._status.close()
