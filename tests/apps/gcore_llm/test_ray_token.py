"""A cluster that `ray start` has made, with a token: who is accepted, what others get, and what its processes get."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from server_processes import free_port

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef" * 4
BIN = Path(sys.executable).parent

PROGRAM = """
import asyncio, sys
from gcore_controller.errors import ClusterError
from gcore_controller.runtimes.ray import run_ray

async def program(ctx):
    return await ctx.group.all_gather(ctx.rank)

try:
    address = sys.argv[1] or None
    print(asyncio.run(run_ray(program, roles=None, world_size=2, num_cpus=0.5, address=address)))
except ClusterError as error:
    print("refused:", error)
"""

ENVIRONMENT = """
import os, sys
import ray
from gcore_controller.runtimes.ray import connect_quietly

@ray.remote
def variables():
    return [os.environ.get(name) for name in ("REWARD_KEY", "OTHER_KEY")]

connect_quietly(sys.argv[1], variables={"REWARD_KEY": os.environ["REWARD_KEY"]})
print(ray.get(variables.remote()))
"""

OTHER_VERSION = """
import json, sys
import ray
from ray._raylet import GcsClient
from gcore_controller.errors import ClusterError
from gcore_controller.runtimes.ray import connect

connect(sys.argv[1])
ray.shutdown()
client = GcsClient(address=sys.argv[1])
known = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster")
other = json.loads(known) | {"ray_version": "2.1.0"}
client.internal_kv_put(b"CLUSTER_METADATA", json.dumps(other).encode(), True, b"cluster")
try:
    connect(sys.argv[1])
except ClusterError as error:
    print(error)
finally:
    client.internal_kv_put(b"CLUSTER_METADATA", known, True, b"cluster")
"""


@dataclass(frozen=True)
class Head:
    address: str
    home: Path
    """With the token in .ray/auth_token."""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with started() as head:
        yield head


@contextmanager
def started(**changes: str) -> Generator[Head]:
    """The head of a cluster, with changes of its environment; without any it requires the token."""
    # Ray's sockets have long names, of which the system takes 107 characters.
    with tempfile.TemporaryDirectory(prefix="gcore", ignore_cleanup_errors=True) as folder:
        home = Path(folder, "home")
        (home / ".ray").mkdir(parents=True)
        (home / ".ray/auth_token").write_text(TOKEN)
        port = free_port()
        client_port = free_port()
        command = [
            BIN / "ray",
            "start",
            "--head",
            "--block",
            f"--port={port}",
            f"--temp-dir={folder}/ray",
        ]
        options = [
            f"--ray-client-server-port={client_port}",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
            # Processes of Ray's that no test asks for anything.
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--no-monitor",
        ]
        with subprocess.Popen(
            [*command, *options, "--num-cpus=2"],
            env=environment(HOME=str(home), **changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                raise AssertionError("".join(seen))
            yield Head(f"127.0.0.1:{port}", home)
            os.killpg(process.pid, signal.SIGKILL)


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what it says of a cluster."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))
    }
    return kept | changes


def run(address: str, program: str = PROGRAM, **changes: str) -> str:
    """The last line that a program prints; without one, that of two controllers."""
    command = [sys.executable, "-W", "ignore", "-c", program, address]
    done = subprocess.run(
        command,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


EXPECTED = (
    "; expected the token that the cluster was started with (`ray get-auth-token` on its head prints it) in "
    "RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, with RAY_AUTH_MODE unset or "
    "'token'"
)


@pytest.mark.parametrize("source", ["file", "variable", "path", "RAY_ADDRESS"])
def test_a_token_is_found(head: Head, tmp_path: Path, source: str) -> None:
    """With the address given, as with that of RAY_ADDRESS, and without RAY_AUTH_MODE."""
    changes = {
        "file": {"HOME": str(head.home)},
        "variable": {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": TOKEN},
        "path": {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(head.home / ".ray/auth_token")},
        "RAY_ADDRESS": {"HOME": str(head.home), "RAY_ADDRESS": head.address},
    }
    assert (
        run("" if source == "RAY_ADDRESS" else head.address, **changes[source])
        == "[[0, 1], [0, 1]]"
    )


def test_a_token_is_left_aside_where_none_is_required() -> None:
    """The processes of such a cluster do not send one, and a driver that expects it would count as dead."""
    with started(RAY_AUTH_MODE="disabled") as head:
        assert run(head.address, HOME=str(head.home)) == "[[0, 1], [0, 1]]"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "it has no token"),
        ({"RAY_AUTH_MODE": "token"}, "it has no token"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, "the token in RAY_AUTH_TOKEN is not the cluster's"),
        (
            {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN},
            "RAY_AUTH_MODE is 'disabled', so no token was sent",
        ),
        (
            {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"},
            "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nowhere/token",
        ),
    ],
    ids=["none", "none in mode token", "wrong", "disabled", "no file"],
)
def test_a_missing_or_wrong_token_is_one_error(
    head: Head, tmp_path: Path, changes: dict[str, str], found: str
) -> None:
    refused = run(head.address, HOME=str(tmp_path), **changes)
    assert (
        refused
        == f"refused: the Ray cluster at {head.address!r} does not accept this process: {found}{EXPECTED}"
    )


@pytest.mark.usefixtures("forked_commands")
def test_a_run_is_refused_before_anything_is_made(head: Head, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gcore_llm",
            "train",
            "--runtime",
            "ray",
            "--ray.address",
            head.address,
        ],
        cwd=tmp_path,
        env=environment(HOME=str(tmp_path), RAY_AUTH_TOKEN="f" * 64),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert (
        f"the Ray cluster at {head.address!r} does not accept this process: the token"
        in done.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_the_token_of_a_new_cluster_is_for_its_user_alone(tmp_path: Path) -> None:
    """Ray by itself writes it to a file that all users can read."""
    with tempfile.TemporaryDirectory() as folder:
        # In Ray's usual folder it would find the cluster that another test has started on this machine.
        assert run("", HOME=str(tmp_path), RAY_TMPDIR=folder) == "[[0, 1], [0, 1]]"
    token = tmp_path / ".ray/auth_token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600


def test_variables_reach_processes_and_no_log(head: Head) -> None:
    secret = "the key of a reward's service"
    found = run(
        head.address, ENVIRONMENT, HOME=str(head.home), REWARD_KEY=secret, OTHER_KEY="stays here"
    )
    assert found == repr([secret, None])
    logs = [file for file in head.home.parent.glob("ray/session_*/logs/**/*") if file.is_file()]
    assert len(logs) > 5
    assert not [file for file in logs if secret.encode() in file.read_bytes()]


def test_another_version_on_the_cluster_is_one_line(head: Head) -> None:
    version = f"Python {platform.python_version()}"
    expected = f"the cluster runs Ray 2.1.0 with {version}; expected those of this process: Ray {ray.__version__} with"
    assert run(head.address, OTHER_VERSION, HOME=str(head.home)) == f"{expected} {version}"
