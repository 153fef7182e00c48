"""Parts in processes that are forked from one, which has imported what they need: on a CPU, where no driver minds."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from acceptance.trial import run_part


class ForkedPart:
    """A part's process, with what the command uses of a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["acceptance.preloaded"])
        _start_server(environment)
        has_started, started = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(list(arguments), log, started))
        self._process.start()
        started.close()
        # Until then the process cannot be ended with those that it starts.
        with suppress(EOFError):
            has_started.recv_bytes()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the signal; `subprocess.TimeoutExpired` if it has not ended in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a part", timeout or 0.0)
        return self._process.exitcode


def _start_server(environment: Mapping[str, str]) -> None:
    """Start the process that all parts are forked from, which has the environment of the first."""
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)


def _run(arguments: list[str], log: Path, started: Connection) -> None:
    os.setsid()
    # `multiprocessing` has replaced the path, which was that of the environment, by that of the command.
    sys.path += [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry not in sys.path
    ]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    started.send_bytes(b"")
    started.close()
    run_part(*arguments)
