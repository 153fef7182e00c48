"""Steps in an object store: a real S3 server on loopback, and the store in memory, by the same tests."""

import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest
import tensorstore as ts

from gcore_ckpt.errors import CorruptCheckpointError
from gcore_ckpt.storage import Storage
from gcore_ckpt.storage.object_store import ObjectStorage


class RankPool(Protocol):
    def run(
        self, function: str, *arguments: object, size: int, timeout_s: float = 60
    ) -> list[Any]: ...


class RankServer(Protocol):
    def shared(self, size: int = 4) -> RankPool: ...


# One request at a time: moto looks for the object and creates it in two steps, which threads could interleave.
# Below a folder "lossy", the first answer to each creation of `committed` is lost.
SERVER = """
import socket
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

moto = DomainDispatcherApplication(create_backend_app)
lost = set()

def lossy(environ, start_response):
    answer = moto(environ, start_response)
    path = environ["PATH_INFO"]
    if environ["REQUEST_METHOD"] == "PUT" and "/lossy/" in path and path.endswith("/committed") and path not in lost:
        lost.add(path)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return answer

server = make_server("127.0.0.1", 0, lossy)
print(server.server_port, flush=True)
server.serve_forever()
"""

CHILD = """
import os, sys
from gcore_ckpt.storage.object_store import ObjectStorage

storage = ObjectStorage(sys.argv[1])
storage.acquire()
attempt = storage.begin(2)
storage.write_file(attempt, "data", [memoryview(b"half")])
"""


@pytest.fixture(scope="module")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3") / "requests.log"


@pytest.fixture(scope="module")
def server_port(server_log: Path) -> Iterator[int]:
    command = [sys.executable, "-c", SERVER]
    with (
        server_log.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        assert server.stdout is not None
        port = int(server.stdout.readline())
        request(port, "PUT", "/bucket")
        yield port
        server.kill()


@pytest.fixture
def s3(server_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server_port}/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # the one for S3 goes before it
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return f"s3://bucket/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    return (
        request.getfixturevalue("s3") if request.param == "s3" else f"memory://{uuid.uuid4().hex}"
    )


def request(port: int, method: str, path: str, body: bytes = b"") -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(method, path, body)
    with connection.getresponse() as response:
        answer = response.read().decode()
    connection.close()
    assert response.status == 200, answer
    return answer


def keys(port: int, url: str) -> set[str]:
    """The objects below a URL, as the server lists them."""
    prefix = url.removeprefix("s3://bucket/") + "/"
    listing = request(port, "GET", f"/bucket?list-type=2&prefix={prefix}")
    return {key.removeprefix(prefix) for key in re.findall("<Key>(.*?)</Key>", listing)}


def write(storage: Storage, step: int, files: Mapping[str, bytes]) -> str:
    attempt = storage.begin(step)
    for name, data in files.items():
        storage.write_file(attempt, name, [memoryview(data)])
    return attempt


def commit(
    storage: Storage, step: int, files: Mapping[str, bytes], attempt: str | None = None
) -> None:
    attempt = attempt or write(storage, step, files)
    storage.commit(
        attempt, step, b"index %d" % step, {name: len(data) for name, data in files.items()}
    )


def read(storage: Storage, step: int, name: str) -> bytes:
    with storage.open_step(step) as files:
        assert files.read_index() == b"index %d" % step
        buffer = bytearray(files.open(name))
        assert files.read_into(name, 0, memoryview(buffer)) == len(buffer)
        return bytes(buffer)


def test_round_trip_by_ranges(url: str) -> None:
    storage = ObjectStorage(url)
    storage.acquire()
    data = {f"data-{number}": os.urandom(10_000) for number in range(8)} | {
        "empty": b"",
        "one": b"1",
    }
    attempt = storage.begin(12)
    parts = {
        name: [memoryview(content)[:3000], memoryview(content)[3000:]]
        for name, content in data.items()
    }
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: storage.write_file(attempt, name, parts[name]), data))
    commit(storage, 12, data, attempt)
    reader = ObjectStorage(url)
    assert str(reader) == url
    assert reader.steps() == [12]
    assert {name: read(reader, 12, name) for name in data} == data
    with reader.open_step(12) as files:
        files.open("data-3")
        buffer = memoryview(bytearray(100))
        assert files.read_into("data-3", 5000, buffer) == 100
        assert bytes(buffer) == data["data-3"][5000:5100]
        assert files.read_into("data-3", 9990, buffer) == 10
        assert bytes(buffer[:10]) == data["data-3"][9990:]
        assert files.read_into("data-3", 10_000, buffer) == 0
        with pytest.raises(FileNotFoundError, match=r"no step-00000012/.*/data-99"):
            files.open("data-99")


def test_only_the_asked_range_is_fetched(s3: str) -> None:
    def fetched_bytes() -> int:
        [metric] = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/s3/bytes_read")
        return metric["values"][0]["value"]

    storage = ObjectStorage(s3)
    commit(storage, 1, {"data": bytes(1_000_000)})
    with storage.open_step(1) as files:
        before = fetched_bytes()
        assert files.open("data") == 1_000_000
        assert files.read_into("data", 400_000, memoryview(bytearray(1000))) == 1000
        assert fetched_bytes() - before == 1001  # `open` reads the last byte


def test_only_committed_steps_are_there(url: str) -> None:
    storage = ObjectStorage(url)
    write(storage, 1, {"data": b"x"})
    assert storage.steps() == []
    with pytest.raises(FileNotFoundError, match="no committed step-00000001"), storage.open_step(1):
        pass


def test_step_is_committed_once(url: str) -> None:
    first, second = ObjectStorage(url), ObjectStorage(url)
    attempts = [write(first, 1, {"data": b"first"}), write(second, 1, {"data": b"second"})]
    commit(first, 1, {"data": b"first"}, attempts[0])
    with pytest.raises(FileExistsError, match=f"{url} holds step 1 already"):
        commit(second, 1, {"data": b"second"}, attempts[1])
    second.abort(attempts[1])
    assert read(second, 1, "data") == b"first"


def test_of_writers_at_once_one_commits(url: str) -> None:
    writers = 8
    start = threading.Barrier(writers)

    def race(writer: int) -> bool:
        storage = ObjectStorage(url)
        attempt = write(storage, 1, {"data": b"%d" % writer})
        start.wait()
        try:
            commit(storage, 1, {"data": b"%d" % writer}, attempt)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(race, range(writers)))
    assert won.count(True) == 1
    assert read(ObjectStorage(url), 1, "data") == b"%d" % won.index(True)


def test_commit_whose_answer_was_lost(s3: str, server_log: Path) -> None:
    storage = ObjectStorage(f"{s3}/lossy/ckpt")
    commit(storage, 1, {"data": b"1"})
    assert read(storage, 1, "data") == b"1"
    tries = re.findall("(HEAD|PUT) .*/lossy/ckpt/step-00000001/committed", server_log.read_text())
    assert tries == [
        "HEAD",
        "PUT",
        "HEAD",
    ]  # tensorstore asks first, then creates if absent, then tries again


@pytest.mark.parametrize(
    "written", [{}, {"data": b"12"}, {"data": b""}, {"data": b"1234"}, {"data": b"123456"}]
)
def test_commit_wants_every_file_whole(url: str, written: dict[str, bytes]) -> None:
    storage = ObjectStorage(url)
    attempt = write(storage, 1, written)
    found = f"has {len(written['data'])} bytes" if written else "is missing"
    with pytest.raises(OSError, match=f"{url}: {attempt}/data {found}; 5 bytes"):
        commit(storage, 1, {"data": b"12345"}, attempt)
    assert storage.steps() == []


def test_removal(url: str) -> None:
    storage = ObjectStorage(url)
    for step in (1, 2, 100_000_000):
        commit(storage, step, {"data": b"%d" % step})
    with storage.open_step(1) as files:
        files.open("data")
        storage.remove(1)
        with pytest.raises(FileNotFoundError):
            files.read_into("data", 0, memoryview(bytearray(1)))
    assert storage.steps() == [2, 100_000_000]
    assert read(storage, 2, "data") == b"2"
    commit(storage, 1, {"data": b"again"})
    assert read(storage, 1, "data") == b"again"


def test_removal_first_takes_the_commit_back(s3: str, server_log: Path) -> None:
    storage = ObjectStorage(s3)
    commit(storage, 1, {"data": b"1"})
    storage.remove(1)
    deleted = re.findall(
        f"DELETE /bucket/{s3.removeprefix('s3://bucket/')}/(.*) HTTP", server_log.read_text()
    )
    assert len(deleted) == 3
    assert deleted[0] == "step-00000001/committed"


def test_commit_clears_what_dead_writers_left(s3: str, server_port: int) -> None:
    dead, alive = ObjectStorage(s3), ObjectStorage(s3)
    write(dead, 1, {"data": b"never committed"})
    write(dead, 3, {"data": b"another was committed"})
    above = write(dead, 4, {"data": b"may be alive"})
    own = write(alive, 2, {"data": b"in flight"})
    commit(alive, 3, {"data": b"3"})
    folders = {key.rpartition("/")[0] for key in keys(server_port, s3)}
    assert above in folders
    assert own in folders
    assert sorted(folder.partition("/")[0] for folder in folders) == [
        "step-00000002",  # the attempt in flight
        "step-00000003",  # `committed`
        "step-00000003",  # the attempt that is
        "step-00000004",
    ]
    commit(alive, 2, {"data": b"in flight"}, own)
    commit(dead, 4, {"data": b"may be alive"}, above)
    assert [read(alive, step, "data") for step in alive.steps()] == [
        b"in flight",
        b"3",
        b"may be alive",
    ]


def test_foreign_objects_are_left_alone(s3: str, server_port: int) -> None:
    foreign = {
        "step-00000001/notes/x",
        "step-00000001/y",
        "step-1/committed",
        "step-000000001/committed",
        "logs/step-00000001/committed",
    }
    for key in foreign:
        request(server_port, "PUT", f"/bucket/{s3.removeprefix('s3://bucket/')}/{key}", b"z")
    storage = ObjectStorage(s3)
    commit(storage, 5, {"data": b"5"})
    assert storage.steps() == [5]
    assert foreign < keys(server_port, s3)


def test_abort(s3: str, server_port: int) -> None:
    storage = ObjectStorage(s3)
    attempt = write(storage, 1, {"data": b"x"})
    storage.abort(attempt)
    assert keys(server_port, s3) == set()
    attempt = write(storage, 1, {"data": b"x"})
    commit(storage, 1, {"data": b"x"}, attempt)
    storage.abort(attempt)  # as after a commit whose answer was lost
    assert read(storage, 1, "data") == b"x"


def test_prefixes_are_folders(url: str) -> None:
    commit(ObjectStorage(f"{url}/ckpt"), 1, {"data": b"1"})
    commit(ObjectStorage(f"{url}/ckpt-2/"), 2, {"data": b"2"})
    commit(ObjectStorage(f"{url}/ckpt/inner"), 3, {"data": b"3"})
    for slash in ("", "/"):
        assert ObjectStorage(f"{url}/ckpt{slash}").steps() == [1]
        assert ObjectStorage(f"{url}/ckpt-2{slash}").steps() == [2]
    assert ObjectStorage(url).steps() == []


def test_damaged_commit(s3: str, server_port: int) -> None:
    storage = ObjectStorage(s3)
    request(
        server_port,
        "PUT",
        f"/bucket/{s3.removeprefix('s3://bucket/')}/step-00000001/committed",
        b'{"attempt": ',
    )
    with pytest.raises(CorruptCheckpointError, match="committed is damaged"), storage.open_step(1):
        pass


def test_ranks_copy_steps_from_their_machines(
    s3: str, rank_server: RankServer, tmp_path: Path
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("AWS_") or name == "no_proxy"
    }
    options = {
        "machines": [0, 0, 1, 1],
        "every": 2,
        "slow": f"{s3}/slow",
        "environment": environment,
    }
    pool = rank_server.shared()
    assert (
        pool.run("save_in_tiers", str(tmp_path), [1, 2, 3, 4, 5, 6], options, size=4)
        == [[4, 5, 6]] * 4
    )
    assert ObjectStorage(f"{s3}/slow").steps() == [4, 6]
    for machine in (0, 1):
        shutil.rmtree(tmp_path / f"machine-{machine}")
    assert pool.run("load_from_tiers", str(tmp_path), None, options, size=4) == [(6, [4, 6])] * 4


@pytest.mark.parametrize("bad", ["ftp://host/folder", "s3://", "s3://bucket/folder?x=1"])
def test_wrong_urls(bad: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{bad!r} names no place in an object store")):
        ObjectStorage(bad)


def test_missing_bucket(s3: str) -> None:
    storage = ObjectStorage("s3://no-such-bucket/folder")
    for call in (storage.acquire, storage.steps, lambda: commit(storage, 1, {"data": b"1"})):
        with pytest.raises(OSError, match=r"^s3://no-such-bucket/folder: .*bucket does not exist"):
            call()


def test_wrong_credentials(s3: str, server_port: int) -> None:
    request(server_port, "POST", "/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(OSError, match=f"^{s3}: .*InvalidAccessKeyId"):
            ObjectStorage(s3).acquire()
    finally:
        request(server_port, "POST", "/moto-api/reset-auth", b"inf")


@pytest.mark.slow
def test_dead_server(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    start = time.monotonic()
    with pytest.raises(OSError, match=f"^{s3}: .*Could not connect to server"):
        ObjectStorage(s3).acquire()
    assert time.monotonic() - start < 120, "tensorstore's own retries take longer"


def test_silent_server(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore_ckpt.storage.objects._ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(TimeoutError, match=f"^{s3}: no answer within"):
            ObjectStorage(s3).acquire()


def test_killed_writer_leaves_the_previous_step(s3: str) -> None:
    storage = ObjectStorage(s3)
    commit(storage, 1, {"data": b"1"})
    child = [sys.executable, "-c", CHILD + "print(attempt, flush=True); sys.stdin.read()", s3]
    with subprocess.Popen(
        child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        attempt = writer.stdout.readline().strip()
        writer.kill()
    assert attempt.startswith("step-00000002/")
    assert storage.steps() == [1]
    assert read(storage, 1, "data") == b"1"
    commit(storage, 2, {"data": b"whole"})
    assert read(storage, 2, "data") == b"whole"


def test_forked_child_gets_an_error(s3: str) -> None:
    child = """
pid = os.fork()
if pid == 0:
    try:
        storage.steps()
    except Exception as error:
        print(repr(error), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(storage.steps())
"""
    output = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", CHILD + child, s3], text=True
    )
    assert output.startswith('CheckpointError("')
    assert "before a fork" in output
    assert output.endswith("\n[]\n")  # the parent's
