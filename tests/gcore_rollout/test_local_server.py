"""`LocalServer`: a server of our own protocol is started and watched, and ends with its owner, its guard or itself."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from gcore_rollout import RolloutError
from gcore_rollout.engines.servers import local_server
from gcore_rollout.engines.servers.local_server import LocalServer

SERVER = textwrap.dedent(
    """
    import http.server, os, subprocess, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{os.getpid()} {child.pid}".encode())

        def log_message(self, *_):
            pass

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)
ENV = {"PATH": os.environ["PATH"]}


def command(port: int) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(url: str) -> list[int]:
    """The server, and a process that it has started."""
    with urllib.request.urlopen(f"{url}/pids") as answer:
        return [int(word) for word in answer.read().split()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    server = LocalServer.start(command, env=ENV, log=tmp_path / "log", timeout_s=60)
    yield server
    server.stop()


def test_stop_ends_all_that_the_server_has_started(server: LocalServer) -> None:
    pids = processes_of(server.url)
    assert len(pids) == 2
    assert server.url.startswith("http://127.0.0.1:")
    server.stop()
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_what_a_server_that_dies_has_started_ends_with_it(server: LocalServer) -> None:
    pids = processes_of(server.url)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_server_ends_with_its_guard(server: LocalServer) -> None:
    pid, _ = processes_of(server.url)
    server._guard.kill()  # pyright: ignore[reportPrivateUsage]
    wait_until(lambda: not is_alive(pid))


OWNER = """
import sys, time
from pathlib import Path
from gcore_rollout.engines.servers.local_server import LocalServer

program, log = sys.argv[1:]
server = LocalServer.start(
    lambda port: [sys.executable, "-c", program, str(port)], env={}, log=Path(log), timeout_s=60
)
print(server.url, flush=True)
time.sleep(1000)
"""


def test_a_server_ends_with_its_owner(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", OWNER, SERVER, str(tmp_path / "log")]
    owner = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = processes_of(owner.stdout.readline().strip())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"]
    with pytest.raises(RolloutError, match=r"ended with exit code 3:\nno memory"):
        LocalServer.start(lambda _: failing, env=ENV, log=tmp_path / "log", timeout_s=60)
    silent = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(1000)"]
    with pytest.raises(RolloutError, match=r"did not answer within 2 s:\nloading"):
        LocalServer.start(lambda _: silent, env=ENV, log=tmp_path / "log", timeout_s=2)
    with pytest.raises(RolloutError, match="ended with exit code"):
        LocalServer.start(
            lambda _: [str(tmp_path / "none")], env=ENV, log=tmp_path / "log", timeout_s=60
        )


@pytest.mark.slow
def test_a_port_that_another_program_takes_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = local_server._free_port  # pyright: ignore[reportPrivateUsage]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = [other.getsockname()[1], free()]
        monkeypatch.setattr(local_server, "_free_port", lambda: ports.pop(0))
        server = LocalServer.start(command, env=ENV, log=tmp_path / "log", timeout_s=60)
    assert not ports
    assert len(processes_of(server.url)) == 2
    server.stop()
