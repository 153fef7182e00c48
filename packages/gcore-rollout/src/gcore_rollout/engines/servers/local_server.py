"""A server that this process starts on its own machine, and that ends with it, however that ends.

A guard stands between them: it starts the server in a session of its own, and ends all of that session when the server
ends, or when its owner does, whose end of a pipe is then closed. The server itself ends with the guard.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gcore_rollout.errors import RolloutError

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_STOP_S = 30.0
_LAST_LINES = 30
_MOST_COLUMNS = 300
"""An error shows so much of a log."""
_TRIES = 3
"""Times that a server is started, where another program takes the port before it does."""
_PORT_TAKEN = (
    "address already in use",
    "Address already in use",
    "port is already",
    "is not available",
)

Command = Callable[[int], Sequence[str]]
"""Returns the server's command line for a port of 127.0.0.1."""


class LocalServer:
    """A running server. Made by `start`.

    Args:
        guard: the process that ends with the server; it reads ``lifeline``.
        lifeline: a descriptor whose other end the guard has: closing it ends the server.
    """

    def __init__(self, guard: "subprocess.Popen[bytes]", lifeline: int, *, url: str) -> None:
        self._guard = guard
        self._lifeline = lifeline
        self.url = url

    @classmethod
    def start(
        cls, command: Command, *, env: Mapping[str, str], log: Path, timeout_s: float
    ) -> "LocalServer":
        """Start a server, and wait until GET /health answers.

        Args:
            env: all of its environment.
            log: file for what it prints.

        Raises:
            RolloutError: it ended, or did not answer in time; with the last lines that it printed.
        """
        num_tries = 0
        while True:
            num_tries += 1
            port = _free_port()
            server = cls._start_guard(command(port), port, env, log)
            if server._is_well(time.monotonic() + timeout_s):
                return server
            code = server._guard.poll()
            server.stop()
            lines = [
                line[:_MOST_COLUMNS]
                for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            ]
            output = "\n".join(lines)
            is_taken = any(words in output for words in _PORT_TAKEN)
            if not is_taken or num_tries == _TRIES:
                how = (
                    f"did not answer within {timeout_s:g} s"
                    if code is None
                    else f"ended with exit code {code}"
                )
                raise RolloutError("\n".join([f"the server {command(port)[0]} {how}:", *lines]))

    @classmethod
    def _start_guard(
        cls, command: Sequence[str], port: int, env: Mapping[str, str], log: Path
    ) -> "LocalServer":
        theirs, lifeline = os.pipe()
        guard = [sys.executable, str(Path(__file__)), str(theirs), *command]
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    guard,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(theirs)
        return cls(process, lifeline, url=f"http://127.0.0.1:{port}")

    def _is_well(self, end: float) -> bool:
        # Proxies are for other machines.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while self._guard.poll() is None and time.monotonic() < end:
            with suppress(OSError), opener.open(f"{self.url}/health", timeout=5):
                return self._guard.poll() is None
            time.sleep(_POLL_S)
        return False

    def stop(self) -> None:
        """End the server and all that it has started; wait for that."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._guard.wait(2 * _STOP_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def guard(lifeline: int, command: Sequence[str]) -> int:
    """Run a server until it ends, or until the other end of ``lifeline`` is closed; return its exit code."""
    libc = ctypes.CDLL(None)
    # The guard has one thread: what runs between fork and exec finds no lock taken.
    server = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    ended = os.pidfd_open(server.pid)
    try:
        ready, _, _ = select.select([ended, lifeline], [], [])
        if ended not in ready:
            os.killpg(server.pid, signal.SIGTERM)
            select.select([ended], [], [], _STOP_S)
    finally:
        # What the server has started is in its session, too, and may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
