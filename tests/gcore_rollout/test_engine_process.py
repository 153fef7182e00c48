"""An engine behind a socket: the same promises, and what happens when either side dies."""

import asyncio
import gc
import json
import os
import pickle
import re
import signal
import socket
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_oracles import TinyModel, collect, errors, first_then_abandon, make_request
from fake_engine import (
    BlockingEngine,
    FakeEngine,
    be_killed,
    make_logged,
    make_owner,
    make_slow_engine,
    make_when_free,
    report,
    sleep_for_ever,
)

from gcore_rollout import (
    EngineDiedError,
    EngineProcess,
    EngineStartError,
    HFEngine,
    RequestError,
    RolloutError,
    SharedWeights,
    VLLMEngine,
    start_replicas,
)
from gcore_rollout.engines.registry import PRELOAD_VLLM
from gcore_rollout.engines.remote import session
from gcore_rollout.engines.remote.fork_server import Channel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    # Fork servers are killed here, and the end of a fork is noticed a moment later.
    pytest.mark.usefixtures("no_forks"),
]

# All engines here come from one server: what they need is imported once.
start = partial(EngineProcess.start, preload=(*PRELOAD_VLLM, "fake_engine"))
start_bare = partial(EngineProcess.start, preload=())
"""From a server that has not imported torch, and is there in no time."""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """The server takes it over; else vLLM would compile for ten seconds at its first log-probs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def slow() -> AsyncIterator[EngineProcess]:
    """A fresh process whose samples take 20 ms a token."""
    engine = await start(make_slow_engine)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hf(tied: TinyModel) -> AsyncIterator[EngineProcess]:
    engine = await start(partial(HFEngine.from_pretrained, tied.path), num_threads=1)
    yield engine
    await engine.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    return [
        p
        for p in (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        if is_alive(p) and parent_of(p) == pid
    ]


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent may not reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], object], timeout_s: float = 300) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_completions_are_those_of_the_engine(hf: EngineProcess, tied: TinyModel) -> None:
    here = HFEngine.from_pretrained(tied.path)
    requests = [make_request(f"r{i}", 3 + i, n=3, temperature=0.3 * i, seed=i) for i in range(6)]
    expected, found = await collect(here, *requests), await collect(hf, *requests)
    shares = [await idle_cpu_share(hf)]
    while shares[-1] >= 0.2 and len(shares) < 5:
        shares.append(await idle_cpu_share(hf))
    assert min(shares) < 0.2
    assert sorted(found) == sorted(expected)
    for key, c in found.items():
        e = expected[key]
        assert c.token_ids.tolist() == e.token_ids.tolist()
        assert c.weight_versions.tolist() == e.weight_versions.tolist()
        np.testing.assert_allclose(c.log_probs, e.log_probs, atol=1e-5, rtol=0)
        assert c.finish_reason == e.finish_reason
        assert (c.token_ids.dtype, c.log_probs.dtype, c.weight_versions.dtype) == (
            np.int64,
            np.float32,
            np.int32,
        )
    assert hf.stats().prompt_tokens == sum(3 + i for i in range(6))
    assert hf.stats().num_slots == 256


async def test_messages_of_one_turn_arrive_in_one() -> None:
    """However many pieces the socket makes of them: what an engine computes together does not depend on it."""
    came: list[tuple[int, tuple[int, bytes]]] = []
    turn = 0

    async def count_turns() -> None:
        nonlocal turn
        while len(came) < 9:
            turn += 1
            await asyncio.sleep(0)

    ours, theirs = socket.socketpair()
    sender = await Channel.open(ours, print)
    receiver = await Channel.open(theirs, lambda message: came.append((turn, message)))
    messages: list[tuple[int, Any]] = [(i, bytes([i]) * (i * 200_000)) for i in range(9)]
    counting = asyncio.create_task(count_turns())
    for message in messages[:8]:
        sender.send(message)
    await asyncio.sleep(0)
    sender.send(messages[8])
    sender.close()
    await asyncio.wait_for(counting, 60)
    assert [message for _, message in came] == messages
    assert len({turn for turn, (number, _) in came if number < 8}) == 1
    assert came[-1][0] > came[0][0], "sent in the turn after"
    receiver.close()


async def test_new_weights_take_effect_and_bad_ones_do_not(
    hf: EngineProcess, tied: TinyModel
) -> None:
    requests = [make_request("r", 9, n=2)]
    version = hf.weight_version + 1
    await hf.update_weights(tied.new.state_dict().items(), version=version)
    assert hf.weight_version == hf.stats().weight_version == version
    for bad, message in (
        ({"model.norm.weight": torch.ones(128)}, "missing names"),
        (
            {**tied.old.state_dict(), "model.norm.weight": torch.zeros(3)},
            r"'model.norm.weight' is \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            await hf.update_weights(bad.items(), version=version + 1)
    with pytest.raises(ValueError, match=f"expected a version above the current {version}"):
        await hf.update_weights(tied.old.state_dict().items(), version=version)

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tied.old.state_dict().items())[:5]
        raise OSError("a trainer rank is gone")

    with pytest.raises(OSError, match="a trainer rank is gone"):
        await hf.update_weights(torn(), version=version + 1)
    found = await collect(hf, *requests)
    assert max(errors(tied.new, requests, found)) < 1e-5
    assert {int(v) for c in found.values() for v in c.weight_versions} == {version}


async def test_one_memory_serves_two_engines(hf: EngineProcess, tied: TinyModel) -> None:
    """One computes with it in place, the other copies; what is written later is not theirs until they are notified."""
    here = HFEngine.from_pretrained(tied.path)
    shared = SharedWeights()
    requests = [make_request("r", 9, n=2)]
    garbage = [("w", torch.full((1 << 20,), float("nan")))]
    for model in (tied.new, tied.old, tied.new):
        shared.write(model.state_dict().items())
        version = hf.weight_version + 1
        await asyncio.gather(
            *(engine.update_weights(shared, version=version) for engine in (hf, here))
        )
        for _ in range(3):
            shared.write(garbage)
        for engine in (hf, here):
            assert max(errors(model, requests, await collect(engine, *requests))) < 1e-5
    shared.close()
    assert max(errors(tied.new, requests, await collect(hf, *requests))) < 1e-5


async def test_weights_of_another_type_are_copied(tied: TinyModel) -> None:
    """And those after them are computed with in place again."""
    engine = await start(partial(HFEngine.from_pretrained, tied.path), num_threads=1)
    requests = [make_request("r", 9, n=2)]
    weights = tied.new.state_dict().items()
    for version, dtype in enumerate(
        (torch.float32, torch.float64, torch.float32, torch.float64), start=1
    ):
        await engine.update_weights(
            [(name, tensor.to(dtype)) for name, tensor in weights], version=version
        )
        assert max(errors(tied.new, requests, await collect(engine, *requests))) < 1e-5
    await engine.close()


async def test_updates_made_at_once_do_not_mix() -> None:
    """Each is written when the one before it has been read, cancelled or not."""
    engine = await start(FakeEngine)
    weights = [
        {f"w{i}": torch.full((1 << 16,), float(version)) for i in range(8)}
        for version in range(1, 9)
    ]
    updates = [
        asyncio.create_task(engine.update_weights(w.items(), version=v))
        for v, w in enumerate(weights, 1)
    ]
    await asyncio.sleep(0)
    updates[0].cancel()
    for update in updates[1:]:
        await update
        await collect(engine, make_request("check weights", 1, max_tokens=1))
    assert engine.weight_version == 8
    await engine.close()


async def idle_cpu_share(engine: EngineProcess) -> float:
    """Of one core, that a process takes which has nothing to do."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    await asyncio.sleep(1)
    return cpu_s() - before


async def test_completions_come_as_they_finish_in_calls_of_their_own(slow: EngineProcess) -> None:
    async def arrivals(name: str) -> list[tuple[str, int]]:
        requests = [
            make_request(f"{name} long", 2, max_tokens=8),
            make_request(f"{name} short", 2, max_tokens=2),
        ]
        return [(c.request_id, len(c.token_ids)) async for c in slow.generate(requests)]

    for name, found in zip("abc", await asyncio.gather(*map(arrivals, "abc")), strict=True):
        assert found == [(f"{name} short", 2), (f"{name} long", 8)]
    assert [c async for c in slow.generate([])] == []


async def test_abandoned_samples_free_the_engine(slow: EngineProcess) -> None:
    await first_then_abandon(
        slow, [make_request("r", 2, max_tokens=1), make_request("x", 2, n=5, max_tokens=10_000)]
    )
    running = asyncio.create_task(collect(slow, make_request("y", 2, max_tokens=10_000)))
    await until(lambda: slow.stats().num_running == 1)
    running.cancel()
    await until(lambda: slow.stats().num_running == 0)


async def test_control_is_forwarded(slow: EngineProcess) -> None:
    running = asyncio.create_task(
        collect(slow, *(make_request(name, 2, max_tokens=10_000) for name in "ab"))
    )
    await until(lambda: slow.stats().completion_tokens > 0)
    with pytest.raises(RolloutError, match="2 samples are running"):
        await slow.sleep()
    await slow.pause()
    await slow.abort(["a"])
    # What was sent before the pause may still arrive.
    before = -1
    while before != slow.stats().completion_tokens:
        before = slow.stats().completion_tokens
        await asyncio.sleep(0.3)
    assert not running.done()
    await slow.resume()
    await until(lambda: slow.stats().completion_tokens > before)
    await slow.abort()
    found = await running
    assert all(c.finish_reason == "abort" and 0 < len(c.token_ids) < 10_000 for c in found.values())
    a, b = (len(found[name, 0].token_ids) for name in "ab")
    assert a < b
    await slow.sleep()
    await slow.wake()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("refuse", RequestError, "too long"),
        (
            "miss an extra",
            RolloutError,
            "'vllm' is not installed: pip install 'gcore-rollout[vllm]'",
        ),
        ("raise what cannot be pickled", RolloutError, "UnpicklableError: holds a lock"),
    ],
)
async def test_errors_come_back(
    slow: EngineProcess, name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as info:
        await collect(slow, make_request(name, 2))
    assert str(info.value) == message
    (note,) = info.value.__notes__
    assert note.startswith(f"raised in process {slow.pid}:\nTraceback")
    assert "fake_engine.py" in note
    assert len(await collect(slow, make_request("fine", 2, max_tokens=1))) == 1


async def test_what_finished_before_an_error_comes_first(slow: EngineProcess) -> None:
    samples = aiter(slow.generate([make_request("finish one and fail", 2, n=2, max_tokens=1)]))
    assert (await anext(samples)).index == 0
    with pytest.raises(RequestError, match="no more"):
        await anext(samples)
    with pytest.raises(Exception, match="pickle"):
        await collect(slow, make_request("finish what cannot be pickled", 2, max_tokens=1))
    assert len(await collect(slow, make_request("fine", 2, max_tokens=1))) == 1


async def test_kill_is_noticed_at_once(slow: EngineProcess) -> None:
    """By every call: what had arrived is still handed out, and the rest is named."""
    requests = [
        make_request("short", 2, n=2, max_tokens=1),
        make_request("long", 2, n=3, max_tokens=10_000),
    ]

    async def consume() -> tuple[list[tuple[str, int]], EngineDiedError]:
        found: list[tuple[str, int]] = []
        try:
            async for c in slow.generate(requests):
                found.append((c.request_id, c.index))
                await asyncio.sleep(0.5)  # so that the second is still in the queue at the death
        except EngineDiedError as death:
            return found, death
        raise AssertionError("it did not die")

    calls = [asyncio.create_task(consume()) for _ in range(3)]
    await until(lambda: slow.stats().num_running == 9)
    os.kill(slow.pid, signal.SIGKILL)
    for found, death in await asyncio.gather(*calls):
        assert sorted(found) == [("short", 0), ("short", 1)]
        assert (
            str(death) == f"engine process {slow.pid} was killed by SIGKILL; unfinished samples: 3"
        )
        assert sorted(death.unfinished) == [("long", i) for i in range(3)]
    with pytest.raises(EngineDiedError) as info:
        await collect(slow, *requests)
    assert len(info.value.unfinished) == 5
    with pytest.raises(EngineDiedError, match=r"was killed by SIGKILL$"):
        await slow.update_weights([("w", torch.ones(1))], version=1)
    assert slow.stats().prompt_tokens == 12


async def test_exit_differs_from_kill(slow: EngineProcess) -> None:
    with pytest.raises(EngineDiedError, match=f"engine process {slow.pid} ended with exit code 3"):
        await collect(slow, make_request("exit", 2))


async def test_hung_process_is_killed_and_a_busy_owner_is_no_hang(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = await start(partial(make_logged, log), heartbeat_timeout_s=4.0)
    time.sleep(6)
    assert len(await collect(engine, make_request("r", 2))) == 1
    reason = (
        r"was killed by SIGKILL because it had been silent for 4.0 s \(its stacks are in its log\)"
    )
    with pytest.raises(EngineDiedError, match=reason):
        await collect(engine, make_request("hang", 2))
    assert not is_alive(engine.pid)
    assert re.search(r"fake_engine.py., line \d+ in generate", log.read_text())
    await engine.close()


async def test_stopped_process_is_killed_and_said_to_be_stopped() -> None:
    engine = await start(FakeEngine, heartbeat_timeout_s=4.0)
    os.kill(engine.pid, signal.SIGSTOP)
    reason = rf"silent for 4.0 s \(it is stopped, by /proc/{engine.pid}/stat\)"
    with pytest.raises(EngineDiedError, match=reason):
        await collect(engine, make_request("r", 2))
    await engine.close()


async def test_a_replacement_waits_for_the_memory_of_the_dead_engine(tmp_path: Path) -> None:
    holder = tmp_path / "holder"
    lines: list[str] = []
    pool = await start_replicas(
        lambda _: partial(make_when_free, holder),
        2,
        num_threads=1,
        preload=(*PRELOAD_VLLM, "fake_engine"),
        announce=lines.append,
    )
    holder.touch()
    with pytest.raises(EngineDiedError):
        await collect(pool.engines[0], make_request("be killed", 2))
    assert len(await collect(pool, make_request("r", 2, n=2))) == 2
    await until(lambda: len(lines) == 1)
    await asyncio.sleep(1.5)
    holder.unlink()
    await until(lambda: pool.num_serving == 2)
    assert len(lines) == 1
    await pool.close()


async def test_memory_is_waited_for_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MEMORY_WAIT_S", 1.5)
    factory = pickle.dumps(partial(make_when_free, tmp_path))
    with pytest.raises(
        EngineStartError,
        match=r"^memory was short for 1.5 s: .*\(3.5/79.2 GiB",
    ):
        await session.make_engine(factory, None)


async def test_an_update_may_block_a_process_for_longer() -> None:
    engine = await start(BlockingEngine, heartbeat_timeout_s=1.0)
    await engine.update_weights([("w", torch.ones(1))], version=1)
    assert len(await collect(engine, make_request("r", 2))) == 1
    await engine.close()


async def test_closing(slow: EngineProcess) -> None:
    running = asyncio.create_task(collect(slow, make_request("r", 2, max_tokens=10_000)))
    await until(lambda: slow.stats().num_running == 1)
    await asyncio.gather(slow.close(), slow.close())
    with pytest.raises(RolloutError, match="closed"):
        await running
    for call in (
        collect(slow, make_request("r", 2)),
        slow.pause(),
        slow.update_weights([], version=1),
    ):
        with pytest.raises(RolloutError, match="the engine is closed: start a new one"):
            await call
    assert not is_alive(slow.pid)


async def test_what_a_process_has_and_has_not(
    hf: EngineProcess, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its environment, folder and threads are those asked for; of other processes it holds nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "from the owner")
    others = [await start_bare(FakeEngine) for _ in range(2)]
    for starts, env, expected, threads in (
        (start_bare, None, "from the owner", None),
        (partial(start, num_threads=3), {"GREETING": "hello"}, "hello", 3),
    ):
        with pytest.raises(RolloutError) as info:
            await starts(report, env=env)
        found = json.loads(str(info.value))
        assert found["GREETING"] == expected
        assert found["folder"] == str(tmp_path)
        assert found["threads"] == threads
        assert found["ignores_sigint"]
        # Messages, weights, and the pair of its own event loop.
        assert found["sockets"] == 4
    for other in others:
        await other.close()


async def test_starts_that_fail() -> None:
    with pytest.raises(EngineStartError, match=r"the engine process was not ready after 0.5 s"):
        await start_bare(sleep_for_ever, start_timeout_s=0.5)
    with pytest.raises(EngineDiedError, match=r"was killed by SIGKILL$"):
        await start_bare(be_killed)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'") as info:
        await start_bare(partial(cast(Any, FakeEngine), no_such=1))
    assert "raised in process" in info.value.__notes__[0]
    with pytest.raises(ValueError, match="num_threads is 0; expected at least 1"):
        await start_bare(FakeEngine, num_threads=0)
    with pytest.raises(ValueError, match="heartbeat_timeout_s is 0; expected more than 0"):
        await start_bare(FakeEngine, heartbeat_timeout_s=0)


async def cancelled_after(num_turns: int) -> None:
    """So many turns of the event loop."""
    starting = asyncio.create_task(start_bare(sleep_for_ever))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])


async def cancelled_again() -> None:
    """While it ends the process."""
    starting = asyncio.create_task(start_bare(sleep_for_ever))
    for wait_s in (0.1, 0.0):
        await asyncio.sleep(wait_s)
        starting.cancel()
    await asyncio.wait([starting])


async def left_after(num_turns: int) -> None:
    """To the end of the event loop."""
    starting = asyncio.create_task(start_bare(sleep_for_ever))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    assert not starting.done()


async def left_later() -> None:
    starting = asyncio.create_task(start_bare(sleep_for_ever))
    await asyncio.sleep(0.1)
    assert not starting.done()


async def left_open() -> None:
    await start_bare(FakeEngine)


async def test_starts_that_are_cancelled_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those that are in flight, or done, when their event loop ends. Whatever stays open here warns."""
    monkeypatch.setattr("gcore_rollout.engines.remote.process.END_TIMEOUT_S", 300.0)
    other = await start_bare(FakeEngine)
    server = parent_of(other.pid)
    ways: list[Callable[[], Coroutine[Any, Any, None]]] = [cancelled_again, left_later, left_open]
    ways += [partial(way, n) for way in (cancelled_after, left_after) for n in range(12)]

    def run_all() -> None:
        for way in ways:
            asyncio.run(way())
        gc.collect()

    def num_open() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = num_open()
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        await asyncio.to_thread(run_all)
    assert [str(warning.message) for warning in found] == []
    assert time.monotonic() - began < 250, "a process that was not asked to end was waited for"
    assert num_open() == before
    await until(lambda: children_of(server) == [other.pid])
    await other.close()


async def test_engines_go_with_their_fork_server_and_another_takes_its_place() -> None:
    engine = await start_bare(FakeEngine)
    server = parent_of(engine.pid)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="ended with the fork server that it came from"):
        await collect(engine, make_request("wait", 2))
    again = await start_bare(FakeEngine)
    assert parent_of(again.pid) != server
    await again.pause()
    await again.close()
    await engine.close()


async def test_engine_goes_with_its_owner() -> None:
    """However that ends, and even while it hangs; no shared memory stays behind."""
    owner = await start(make_owner)
    engine = owner.stats().prompt_tokens
    server = parent_of(engine)
    assert parent_of(server) == owner.pid
    maps = Path(f"/proc/{owner.pid}/maps").read_text()
    assert "/memfd:gcore-weights (deleted)" in maps, (
        "memory without a name, which ends with its last user"
    )
    assert "/dev/shm" not in maps
    os.kill(engine, signal.SIGSTOP)
    os.kill(owner.pid, signal.SIGKILL)
    await until(lambda: not is_alive(engine) and not is_alive(server))
    await owner.close()


async def test_vllm_in_a_process(tied: TinyModel) -> None:
    make = partial(VLLMEngine.from_pretrained, tied.path, kv_cache_memory_bytes=64 << 20)
    engine = await start(make, num_threads=1)
    requests = [make_request(f"r{i}", 3 + 20 * i, n=2) for i in range(3)]
    assert max(errors(tied.old, requests, await collect(engine, *requests))) < 1e-4
    assert await idle_cpu_share(engine) < 0.2
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    found = await collect(engine, *requests)
    assert max(errors(tied.new, requests, found)) < 1e-4
    assert {int(v) for c in found.values() for v in c.weight_versions} == {1}
    await engine.close()
