"""The process that engine processes are forked from: it imports what they share once.

Why not `multiprocessing`'s: that runs the owner's main module again in every child, has one list of imports for
everybody, and forbids children to a process that may end with its owner, of which vLLM's tensor parallelism has some.
"""

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from gcore_rollout.engines.processes import engine_server

STATUS = struct.Struct("!i")
"""A number on a status socket: first the pid, with a descriptor of the process, and last the exit code."""

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
        # What is missing is missed by the engine that imports it again, and its error goes to the one who asked.
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
            _report(pidfd, *children.pop(pidfd))
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
                _live(channel, weights, server_pid)
            channel.close()
            weights.close()
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, status)
            with suppress(OSError):  # the owner did not wait for it
                socket.send_fds(status, [STATUS.pack(pid)], [pidfd])


def _report(pidfd: int, pid: int, status: socket.socket) -> None:
    _, wait_status = os.waitpid(pid, 0)
    os.close(pidfd)
    with status, suppress(OSError):  # the owner did not wait for it
        status.send(STATUS.pack(os.waitstatus_to_exitcode(wait_status)))


def _live(channel: socket.socket, weights: socket.socket, server_pid: int) -> None:
    """The whole life of a child."""
    exit_code = 1
    try:
        # At once, even where the child hangs and would not see that its owner's end of the channel is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server_pid:
            engine_server.run(channel, weights)
            exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the server's own ending is to happen in a child of it.
        os._exit(exit_code)
