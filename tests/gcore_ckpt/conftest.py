"""Servers that fork real processes, alone or as ranks of a group: torch is imported once, each costs milliseconds."""

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from rank_pool import RankPool, RankServer, script_server, serving_ranks

HERE = Path(__file__).parent

# Importlib mode puts no test folder on the path, and `hostile_index` is shared by several files of this one.
sys.path.insert(0, str(HERE))


class Child:
    """A process forked by the server; `log` holds what it wrote to its log file, line by line."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log
        self._pidfd = os.pidfd_open(pid)

    def log(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        ended, _, _ = select.select([self._pidfd], [], [], 60)
        if not ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        assert ended, f"process {self.pid} did not end"


class ForkServer:
    """Runs functions of `forked.py` in processes of their own."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests = requests
        self._replies = replies

    def fork(self, function: str, path: Path, log: Path) -> Child:
        print(json.dumps([function, str(path), str(log)]), file=self._requests, flush=True)
        return Child(int(self._replies.readline()), log)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with script_server(HERE / "forked.py") as (requests, replies):
        yield ForkServer(requests, replies)


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    cases = ("reshard_cases.py", "fault_cases.py", "dcp_cases.py", "tier_cases.py")
    with serving_ranks(*(HERE / name for name in cases), setup="make_meshes") as server:
        yield server


@pytest.fixture
def ranks(rank_server: RankServer) -> RankPool:
    return rank_server.shared()
