"""Weights through a store: files, memory, and a real S3 server on loopback."""

import asyncio
import http.client
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_oracles import TinyModel
from hypothesis import given, strategies as st
from rank_pool import script_server
from safetensors.torch import load_file
from weight_sync_oracles import check_behind, check_synced, make_trainer, train
from weight_sync_publisher import OPTIONS, weights_of

from gcore_rollout import (
    CorruptWeightsError,
    FullWeights,
    HFEngine,
    MissingExtraError,
    WeightDelta,
    WeightMirror,
    WeightPublisher,
    WeightSubscriber,
    apply_delta,
)
from gcore_rollout.weight_sync.layout import layout_of
from gcore_rollout.weight_sync.store.objects import Objects
from gcore_rollout.weight_sync.store.versions import cut, joined

State = dict[str, torch.Tensor]
FEW_PARTS = OPTIONS | {"part_bytes": 100_000}

SERVER = """
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app))
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    command = [sys.executable, "-c", SERVER]
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        yield port
        server.kill()


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}/")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return f"s3://bucket/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "s3":
            return request.getfixturevalue("s3")
        case "file":
            return f"file://{tmp_path}/weights"
        case _:
            return f"memory://{uuid.uuid4().hex}"


def keys(url: str) -> list[str]:
    return Objects(url).keys()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], tensor) for name, tensor in b.items())


async def loaded(url: str, have: int | None = None, weights: State | None = None) -> tuple[State, list[str]]:
    """What the newest version is, and the updates that led there."""
    state, version, kinds = dict(weights or {}), have, list[str]()
    for update in await WeightSubscriber(url).load(have=have):
        if isinstance(update, WeightDelta):
            assert version is not None
            apply_delta(state, update, version=version)
        else:
            state = dict(update.tensors)
        version = update.version
        kinds.append(f"{'delta' if isinstance(update, WeightDelta) else 'full'} {version}")
    return state, kinds


async def test_the_newest_version_from_any_subset(url: str) -> None:
    publisher = WeightPublisher(url, **FEW_PARTS)
    sizes = [publisher.publish(weights_of(v).items(), version=v).size_bytes for v in (1, 2, 5, 6)]
    assert await WeightSubscriber(url).versions() == [1, 2, 5, 6]
    assert max(sizes[1:3]) < min(sizes[0], sizes[3]) / 3
    for have, expected in (
        (None, ["full 6"]),
        (5, ["full 6"]),
        (6, []),
        (7, []),
    ):
        state, kinds = await loaded(url, have)
        assert kinds == expected
        assert same(state, weights_of(6)) or not kinds
    publisher.publish(weights_of(8).items(), version=8)
    publisher.publish(weights_of(9).items(), version=9)
    for have, expected in (
        (None, ["full 6", "delta 8", "delta 9"]),
        (5, ["full 6", "delta 8", "delta 9"]),
        (6, ["delta 8", "delta 9"]),
        (8, ["delta 9"]),
        (9, []),
    ):
        state, kinds = await loaded(url, have, None if have is None else weights_of(have))
        assert kinds == expected
        assert same(state, weights_of(9))


@given(
    st.lists(
        st.tuples(st.sampled_from([torch.float64, torch.bfloat16, torch.bool, torch.int8]), st.integers(0, 70)),
        max_size=5,
    ),
    st.integers(16, 200),
)
def test_parts_are_of_bounded_size_and_make_the_tensors_again(
    kinds: list[tuple[torch.dtype, int]], part_bytes: int
) -> None:
    tensors = {f"w{i}": torch.arange(n).to(dtype).view(-1, 1) for i, (dtype, n) in enumerate(kinds)}
    parts = list(cut(tensors, part_bytes))
    sizes = [sum(t.nbytes for t in part.values()) for part in parts]
    assert all(part_bytes - 8 < size <= part_bytes for size in sizes[:-1])
    assert all(0 < size <= part_bytes for size in sizes)
    assert same(joined(layout_of(tensors), parts), tensors)
    if len(parts) > 1:
        with pytest.raises(CorruptWeightsError, match="elements"):
            joined(layout_of(tensors), parts[1:])


async def test_parts_are_safetensors_files(tmp_path: Path) -> None:
    weights = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "w": torch.randn(30, 40).bfloat16()}
    manifest = WeightPublisher(f"file://{tmp_path}", part_bytes=1000).publish(weights.items(), version=1)
    assert len(manifest.parts) == 3
    pieces = [load_file(tmp_path / part.key) for part in manifest.parts]
    assert torch.equal(torch.cat([piece["dense/w"] for piece in pieces]), weights["w"].view(-1))
    state, _ = await loaded(f"file://{tmp_path}")
    assert same(state, weights)


async def test_old_versions_go_and_what_is_kept_can_be_loaded(url: str) -> None:
    publisher = WeightPublisher(url, **FEW_PARTS)  # versions 1, 4, 7, ... are full
    for version in range(1, 12):
        publisher.publish(weights_of(version).items(), version=version)
        state, _ = await loaded(url)
        assert same(state, weights_of(version))
    # At version 11 the full ones were 1, 4, 7 and 10; what went with 4 keeps its parts until version 12.
    assert await WeightSubscriber(url).versions() == [7, 8, 9, 10, 11]
    assert versions_with_parts(url) == [4, 5, 6, 7, 8, 9, 10, 11]
    publisher.publish(weights_of(12).items(), version=12)
    assert versions_with_parts(url) == [7, 8, 9, 10, 11, 12]


def versions_with_parts(url: str) -> list[int]:
    return sorted({int(key.split("/")[1].split("-")[0]) for key in keys(url) if key.startswith("parts/")})


def test_parts_outlive_their_manifest_by_a_version(tmp_path: Path) -> None:
    """A reader that has read a manifest finds its parts, though the version is being removed."""
    url = f"file://{tmp_path}"
    publisher = WeightPublisher(url, full_every=1, keep=1)

    for version, manifests, parts in (
        (1, [1], [1]),
        (2, [1, 2], [1, 2]),
        (3, [2, 3], [1, 2, 3]),
        (4, [3, 4], [2, 3, 4]),
    ):
        publisher.publish([("w", torch.full((3,), version))], version=version)
        assert asyncio.run(WeightSubscriber(url).versions()) == manifests
        assert versions_with_parts(url) == parts


async def test_a_reader_whose_versions_are_removed_takes_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}"
    publisher = WeightPublisher(url, full_every=1, keep=1)
    publisher.publish([("w", torch.ones(3))], version=1)
    subscriber = WeightSubscriber(url)
    plain_parts = WeightSubscriber._parts  # pyright: ignore[reportPrivateUsage]

    def slow(self: WeightSubscriber, manifest: object) -> object:
        monkeypatch.undo()
        for version in (2, 3, 4):
            publisher.publish([("w", torch.full((3,), version))], version=version)
        return plain_parts(self, manifest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(WeightSubscriber, "_parts", slow)
    [update] = await subscriber.load()
    assert isinstance(update, FullWeights)
    assert update.version == 4
    assert dict(update.tensors)["w"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("what", ["part", "manifest", "missing"])
async def test_damage_is_found(tmp_path: Path, what: str) -> None:
    url = f"file://{tmp_path}"
    publisher = WeightPublisher(url, full_every=3)
    first = publisher.publish(weights_of(1).items(), version=1)
    second = publisher.publish(weights_of(2).items(), version=2)
    path = tmp_path / (second.key if what == "manifest" else first.parts[0].key)
    if what == "missing":
        path.unlink()
        message = "is missing"
    else:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        message = "is damaged: its SHA-256 is not"
    with pytest.raises(CorruptWeightsError, match=message):
        await WeightSubscriber(url).load()


async def test_waiting_for_a_version(url: str) -> None:
    publisher, subscriber = WeightPublisher(url), WeightSubscriber(url)
    with pytest.raises(TimeoutError, match="no version above None within 0 s"):
        await subscriber.wait(newer_than=None, timeout_s=0)
    waiting = asyncio.create_task(subscriber.wait(newer_than=1, timeout_s=300, poll_s=0.01))
    await asyncio.to_thread(publisher.publish, [("w", torch.ones(3))], version=1)
    assert await subscriber.wait(newer_than=None, timeout_s=0) == 1
    assert not waiting.done()
    await asyncio.to_thread(publisher.publish, [("w", torch.ones(3))], version=2)
    assert await waiting == 2


async def test_versions_go_up_and_have_one_publisher(url: str) -> None:
    first, second = WeightPublisher(url), WeightPublisher(url)
    first.publish(weights_of(3).items(), version=3)
    for publisher in (first, second):
        with pytest.raises(ValueError, match=r"version is 3: .* has versions up to 3, so it must be above"):
            publisher.publish(weights_of(3).items(), version=3)
    # A publisher that starts again, or finds a version that is not its own, sends everything.
    assert second.publish(weights_of(4).items(), version=4).base_version is None
    assert first.publish(weights_of(5).items(), version=5).base_version is None
    assert first.publish(weights_of(6).items(), version=6).base_version == 5
    state, _ = await loaded(url)
    assert same(state, weights_of(6))


def test_a_version_is_created_once(url: str) -> None:
    objects = Objects(url)
    assert objects.create("versions/1", b"a")
    assert objects.create("versions/1", b"a")  # as after an answer that was lost
    assert not objects.create("versions/1", b"b")
    assert objects.start_read("versions/1").result().value == b"a"


async def test_what_changed_in_every_element_is_a_full_version(tmp_path: Path) -> None:
    publisher = WeightPublisher(f"file://{tmp_path}")
    for version in (1, 2):
        manifest = publisher.publish(
            [("w", torch.full((30,), version)), ("v", torch.full((2,), version))], version=version
        )
        assert manifest.base_version is None
    assert publisher.publish([("w", torch.full((30,), 2)), ("v", torch.full((2,), 3))], version=3).base_version == 2
    state, _ = await loaded(f"file://{tmp_path}")
    assert (state["w"].sum(), state["v"].sum()) == (60, 6)


async def test_weights_that_fail_half_way_leave_no_version(tmp_path: Path) -> None:
    publisher = WeightPublisher(f"file://{tmp_path}")
    publisher.publish(weights_of(1).items(), version=1)

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w0", torch.zeros(2000)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        publisher.publish(torn(), version=2)
    with pytest.raises(ValueError, match="unknown names"):
        publisher.publish([("x", torch.zeros(1))], version=2)
    assert publisher.publish(weights_of(2).items(), version=2).base_version == 1
    state, _ = await loaded(f"file://{tmp_path}")
    assert same(state, weights_of(2))


@pytest.mark.slow
def test_a_kill_at_any_moment_is_harmless(tmp_path: Path) -> None:
    """The publisher is killed in the middle of one version after the other, and the next one continues."""
    url, parts = f"file://{tmp_path}", tmp_path / "parts"
    parts.mkdir()
    num_torn = 0
    with script_server(Path(__file__).with_name("weight_sync_publisher.py")) as (requests, replies):
        for num_attempts, num_parts in ((1, 2), (2, 1), (1, 40), (4, 3), (3, 1)):
            before = set(parts.iterdir())
            print(tmp_path, file=requests, flush=True)
            process = os.pidfd_open(int(replies.readline()))
            until_parts(parts, before, num_attempts, num_parts)
            signal.pidfd_send_signal(process, signal.SIGKILL)
            assert select.select([process], [], [], 20)[0]
            os.close(process)
            newest = max(asyncio.run(WeightSubscriber(url).versions()), default=0)
            num_torn += max(versions_with_parts(url)) > newest
            state, _ = asyncio.run(loaded(url))
            assert same(state, weights_of(newest) if newest else {})
    assert num_torn
    assert newest >= 3
    publisher = WeightPublisher(url, **OPTIONS)
    for version in range(newest + 1, newest + 9):
        publisher.publish(weights_of(version).items(), version=version)
        state, _ = asyncio.run(loaded(url))
        assert same(state, weights_of(version))
    assert versions_with_parts(url)[0] > newest  # nothing is left of those that were killed


def until_parts(folder: Path, before: set[Path], num_attempts: int, num_parts: int) -> None:
    """Until this many attempts were made that were not there before, and the last one has so many parts."""
    deadline_s = time.monotonic() + 300
    while True:
        new = sorted(set(folder.iterdir()) - before)
        if len(new) > num_attempts or (
            len(new) == num_attempts and len(list(new[-1].glob("*.safetensors"))) >= num_parts
        ):
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_every": 0}, "full_every is 0; expected at least 1"),
        ({"keep": 0}, "keep is 0; expected at least 1"),
        ({"part_bytes": 8}, "part_bytes is 8; expected at least 16"),
        ({"max_in_flight": 0}, "max_in_flight is 0; expected at least 1"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightPublisher(f"file://{tmp_path}", **options)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="url is 'nowhere://x', which names no store"):
        WeightPublisher("nowhere://x")
    with pytest.raises(ValueError, match="max_in_flight is 0; expected at least 1"):
        WeightSubscriber(f"file://{tmp_path}", max_in_flight=0)
    (tmp_path / "versions").write_text("no folder")
    with pytest.raises(OSError, match=f"file://{tmp_path}"):
        WeightPublisher(f"file://{tmp_path}").publish([("w", torch.ones(1))], version=1)


def test_without_tensorstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    monkeypatch.delitem(sys.modules, "gcore_rollout.weight_sync.store.objects")
    with pytest.raises(MissingExtraError, match=r"pip install 'gcore-rollout\[store\]'"):
        importlib.import_module("gcore_rollout.weight_sync.store.objects")


async def test_an_engine_follows_a_trainer_through_a_store(tied: TinyModel, url: str) -> None:
    """The engine's side sleeps through one version."""
    engine, trainer = HFEngine.from_pretrained(tied.path), make_trainer(tied.path)
    publisher, subscriber = WeightPublisher(url, part_bytes=1 << 17), WeightSubscriber(url)
    mirror = WeightMirror(engine)
    publisher.publish(trainer.export_weights(), version=1)
    for version in (2, 3, 5):
        train(trainer, seed=version)
        await asyncio.to_thread(publisher.publish, trainer.export_weights(), version=version)
        if version == 2:
            continue
        await check_behind(engine, trainer)
        assert await subscriber.wait(newer_than=mirror.version, timeout_s=300) == version
        await mirror.apply(*await subscriber.load(have=mirror.version))
        await check_synced(engine, trainer, version=version)
