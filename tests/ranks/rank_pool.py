"""Pools of real processes that are ranks of one gloo group, forked from a server that has imported torch once."""

import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def script_server(script: Path, *arguments: str) -> Generator[tuple[IO[str], IO[str]]]:
    """A script that answers requests, a line each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, script, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdin, server.stdout
        server.stdin.close()


@contextmanager
def serving_ranks(*cases: Path, setup: str | None = None) -> "Generator[RankServer]":
    """A server of ranks that run the functions of these files, imported once; its shared pool begins with `setup`."""
    with script_server(Path(__file__).with_name("rank_server.py"), *map(str, cases)) as (
        requests,
        replies,
    ):
        server = RankServer(requests, replies, setup)
        yield server
        server.close()


_MOST_THREADS = 120
"""Of a rank. Each gloo group has three, of which one polls, and most groups of a test live as long as the process."""


class RankPool:
    """Processes that are ranks of one gloo group and run functions of the files of cases.

    No call waits longer than its `timeout_s`; then the pool is dead, and the test that made the call has failed.
    """

    def __init__(self, requests: IO[str], replies: IO[str], size: int) -> None:
        self._folder = Path(
            tempfile.mkdtemp(prefix="ranks-")
        )  # short: the path of a socket has at most 107 bytes
        # Not in the server: what forks must have no threads.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "socket"))
            listener.listen()
            listener.settimeout(300)
            print(
                json.dumps([str(self._folder), self._store.port, size]), file=requests, flush=True
            )
            self.pids: list[int] = json.loads(replies.readline())
            self._pidfds = [os.pidfd_open(pid) for pid in self.pids]
            accepted = [Connection(listener.accept()[0].detach()) for _ in self.pids]
        self._connections = [
            connection for _, connection in sorted((c.recv(), c) for c in accepted)
        ]
        self.alive = True

    def run(
        self, function: str, *arguments: object, size: int, timeout_s: float = 300
    ) -> list[Any]:
        """What the function returns on each of the first `size` ranks, none of which may fail."""
        outcomes = self.outcomes(function, *arguments, size=size, timeout_s=timeout_s)
        for rank, outcome in enumerate(outcomes):
            assert "value" in outcome, f"rank {rank}: {outcome.get('traceback', 'died')}"
        return [outcome["value"] for outcome in outcomes]

    def errors(
        self, function: str, *arguments: object, size: int, timeout_s: float = 300
    ) -> list[str]:
        """What the function raises on each of the first `size` ranks, as `TypeName: message`; all must."""
        outcomes = self.outcomes(function, *arguments, size=size, timeout_s=timeout_s)
        for rank, outcome in enumerate(outcomes):
            assert "error" in outcome, f"rank {rank}: {outcome}"
        return [outcome["error"] for outcome in outcomes]

    def outcomes(
        self, function: str, *arguments: object, size: int, timeout_s: float
    ) -> list[dict[str, Any]]:
        """`value`, or `error` and `traceback`, of each of the first `size` ranks; nothing of one that is dead."""
        self.start(function, *arguments, ranks=range(size))
        outcomes = self.collect(range(size), timeout_s)
        # Gloo's threads poll: idle ranks would take the better part of a core from other tests.
        self._signal(signal.SIGSTOP)
        return outcomes

    def start(self, function: str, *arguments: object, ranks: Sequence[int]) -> None:
        """Lets the function begin."""
        self._signal(signal.SIGCONT)
        message = pickle.dumps((function, arguments))
        for rank in ranks:
            self._connections[rank].send_bytes(message)

    def collect(self, ranks: Sequence[int], timeout_s: float) -> list[dict[str, Any]]:
        """The outcomes of what was started."""
        outcomes: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            if not self._connections[rank].poll(max(0.0, deadline - time.monotonic())):
                self.close()
                pytest.fail(f"rank {rank} has not answered within {timeout_s} s")
            try:
                outcomes.append(pickle.loads(self._connections[rank].recv_bytes()))
            except (EOFError, ConnectionResetError):
                self.alive = False
                outcomes.append({})
        return outcomes

    def _signal(self, number: signal.Signals) -> None:
        for pidfd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def num_threads(self) -> int:
        """Threads of the first rank."""
        return len(list(Path(f"/proc/{self.pids[0]}/task").iterdir()))

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """`kill -9`, or another signal that ends a rank."""
        self.alive = False
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def close(self) -> None:
        """Kills all ranks."""
        if not self._pidfds:
            return
        for rank, pidfd in enumerate(self._pidfds):
            with suppress(ProcessLookupError):  # it is dying of an earlier kill
                self.kill(rank)
            ended = select.select([pidfd], [], [], 300)[0]
            os.close(pidfd)
            self._connections[rank].close()
            assert ended, f"process {self.pids[rank]} did not end"
        self._pidfds = []
        shutil.rmtree(self._folder)


class RankServer:
    """Makes pools of ranks, and keeps one of each size that tests share while nothing has happened to it."""

    def __init__(self, requests: IO[str], replies: IO[str], setup: str | None) -> None:
        self._requests = requests
        self._replies = replies
        self._setup = setup
        self._shared: dict[int, RankPool] = {}

    @contextmanager
    def pool(self, size: int) -> Generator[RankPool]:
        """A pool of its own for a test that kills ranks."""
        pool = RankPool(self._requests, self._replies, size)
        try:
            yield pool
        finally:
            pool.close()

    def shared(self, size: int = 4) -> RankPool:
        """The pool of this many ranks that all tests share, or a new one in its place if it has too many threads."""
        pool = self._shared.get(size)
        if pool is None or not pool.alive or pool.num_threads() > _MOST_THREADS:
            if pool is not None:
                pool.close()
            pool = self._shared[size] = RankPool(self._requests, self._replies, size)
            if self._setup:
                pool.run(self._setup, size=size)
        return pool

    def close(self) -> None:
        """Ends the shared pools."""
        for pool in self._shared.values():
            pool.close()
