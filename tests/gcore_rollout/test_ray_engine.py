"""An engine in a Ray actor: several clients of one, what happens when either side dies, and weights by reference."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import ray
import torch
from engine_oracles import TinyModel, collect, first_then_abandon, make_request
from fake_engine import BlockingEngine, FakeEngine, be_killed, make_slow_engine, sleep_for_ever
from faulty_engines import TENSOR
from ray import cloudpickle
from ray_cluster import ray_cluster

from gcore_rollout import (
    Completion,
    DigestedWeights,
    Engine,
    EngineDiedError,
    EngineHandle,
    EngineReplicas,
    EngineStartError,
    HFEngine,
    InstrumentedEngine,
    RayEngine,
    RequestError,
    RolloutError,
    WeightRecord,
    WeightReferences,
    WrongWeightsError,
)
from gcore_rollout.weight_sync.digests import all_digests, check_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportPrivateImportUsage]
    with ray_cluster("here", "elsewhere"):
        yield


def start(
    factory: Callable[[], Any], *, node: str = "here", num_threads: int | None = None
) -> EngineHandle:
    return EngineHandle.start(factory, num_cpus=0, resources={node: 0.01}, num_threads=num_threads)


@pytest.fixture(scope="module")
def actor() -> Any:
    """Its samples take 20 ms a token; tests may kill it, for it comes back."""
    return start(make_slow_engine)


@pytest_asyncio.fixture(loop_scope="module")
async def slow(actor: Any) -> AsyncIterator[RayEngine]:
    engine = await RayEngine.connect(actor)
    yield engine
    await engine.close()


class Client:
    """An actor with a client of its own."""

    engine: RayEngine | None = None

    async def connect(self, actor: Any) -> None:
        if self.engine is not None:
            await self.engine.close()
        self.engine = await RayEngine.connect(actor)

    async def generate(self, name: str, n: int, max_tokens: int) -> list[Completion]:
        return list(
            (
                await collect(self._engine(), make_request(name, 2, n=n, max_tokens=max_tokens))
            ).values()
        )

    async def update_weights(self, weights: WeightReferences, version: int) -> int:
        """How much more memory this process has afterwards, the object store's included."""
        before = resident_bytes()
        await self._engine().update_weights(weights, version=version)
        return resident_bytes() - before

    async def weight_version(self) -> int:
        return self._engine().weight_version

    def _engine(self) -> RayEngine:
        assert self.engine is not None
        return self.engine


@pytest.fixture(scope="module")
def other_process() -> Any:
    make: Any = ray.remote(Client)
    return make.options(num_cpus=0).remote()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def pid_of(engine: RayEngine) -> int:
    return engine._incarnation.pid  # pyright: ignore[reportPrivateUsage]


async def until(condition: Callable[[], object], timeout_s: float = 300) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_completions_come_as_they_finish_in_calls_of_their_own(slow: RayEngine) -> None:
    async def arrivals(name: str) -> list[tuple[str, int]]:
        requests = [
            make_request(f"{name} long", 2, max_tokens=30),
            make_request(f"{name} short", 2, max_tokens=2),
        ]
        found = [c async for c in slow.generate(requests)]
        assert all(
            a.flags.writeable for c in found for a in (c.token_ids, c.log_probs, c.weight_versions)
        )
        return [(c.request_id, len(c.token_ids)) for c in found]

    for name, found in zip("abc", await asyncio.gather(*map(arrivals, "abc")), strict=True):
        assert found == [(f"{name} short", 2), (f"{name} long", 30)]
    assert [c async for c in slow.generate([])] == []


async def test_abandoned_samples_free_the_engine(slow: RayEngine) -> None:
    """Even if they are given up at once, and whatever the size of the call."""
    await first_then_abandon(
        slow, [make_request("r", 2, max_tokens=1), make_request("x", 2, n=5, max_tokens=10_000)]
    )
    for length in (2, 200_000):
        running = asyncio.create_task(collect(slow, make_request("y", length, max_tokens=10_000)))
        await asyncio.sleep(0)
        running.cancel()
    after = await collect(slow, make_request("z", 2, max_tokens=10))
    assert len(after) == 1
    await until(lambda: slow.stats().num_running == 0)
    await asyncio.sleep(0.3)
    assert slow.stats().num_running == 0


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
    slow: RayEngine, name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as info:
        await collect(slow, make_request(name, 2))
    assert str(info.value) == message
    (note,) = info.value.__notes__
    assert note.startswith(f"raised in process {pid_of(slow)}:\nTraceback")
    assert "_obey" in note
    with pytest.raises(ValueError, match="expected a version above the current"):
        await slow.update_weights([("w", torch.ones(1))], version=0)


async def test_kill_is_noticed_by_every_call(actor: Any, slow: RayEngine) -> None:
    """What had arrived is still handed out, the rest is named, and the actor's next life is not this client's."""
    requests = [
        make_request("short", 2, n=2, max_tokens=1),
        make_request("long", 2, n=3, max_tokens=10_000),
    ]

    async def consume() -> tuple[list[tuple[str, int]], EngineDiedError]:
        found: list[tuple[str, int]] = []
        try:
            async for c in slow.generate(requests):
                found.append((c.request_id, c.index))
                await asyncio.sleep(0.5)  # so that the second is not yet asked for at the death
        except EngineDiedError as death:
            return found, death
        raise AssertionError("it did not die")

    calls = [asyncio.create_task(consume()) for _ in range(3)]
    await until(lambda: slow.stats().num_running == 9)
    pid = pid_of(slow)
    os.kill(pid, signal.SIGKILL)
    for found, death in await asyncio.wait_for(asyncio.gather(*calls), 300):
        assert sorted(found) == [("short", 0), ("short", 1)]
        assert sorted(death.unfinished) == [("long", i) for i in range(3)]
        assert death.reason.startswith(f"engine actor, process {pid} on ")
        assert death.reason.endswith(", died: it was killed, crashed, or cannot be reached")
    again = await RayEngine.connect(actor)
    assert pid_of(again) != pid
    with pytest.raises(EngineDiedError) as info:
        await collect(slow, *requests)
    assert len(info.value.unfinished) == 5
    for call in (slow.pause(), slow.update_weights([("w", torch.ones(1))], version=1)):
        with pytest.raises(EngineDiedError, match=f"process {pid} on .*, died"):
            await call
    assert slow.stats().prompt_tokens >= 12
    assert again.stats().prompt_tokens == 0
    assert again.weight_version == 0
    assert len(await collect(again, make_request("r", 2))) == 1
    await again.close()


async def test_a_call_to_another_life_is_refused(actor: Any, slow: RayEngine) -> None:
    """Also where the client has not yet heard of a death."""
    slow._incarnation = type(slow._incarnation)()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EngineDiedError, match="was restarted: connect again"):
        await slow.pause()
    with pytest.raises(EngineDiedError, match="was restarted: connect again") as info:
        await collect(slow, make_request("r", 2, n=2))
    assert info.value.unfinished == (("r", 0), ("r", 1))


async def test_hung_actor_is_killed_and_a_busy_client_is_no_hang(actor: Any) -> None:
    engine = await RayEngine.connect(actor, heartbeat_timeout_s=6.0)
    time.sleep(8)
    assert len(await collect(engine, make_request("r", 2, max_tokens=1))) == 1
    with pytest.raises(
        EngineDiedError,
        match=r"died: it was silent for 6.0 s \(its stacks are in its log\), and killed",
    ) as info:
        await collect(engine, make_request("hang", 2))
    assert info.value.unfinished == (("hang", 0),)
    await engine.close()
    again = await RayEngine.connect(actor)
    assert pid_of(again) != pid_of(engine)
    await again.close()


async def test_an_update_may_block_an_actor_for_longer() -> None:
    """For each of its clients; but an actor that is stopped meanwhile, which answers in no thread, is killed."""
    handle = start(BlockingEngine)
    engine = await RayEngine.connect(handle, heartbeat_timeout_s=3.0)
    other = await RayEngine.connect(handle, heartbeat_timeout_s=3.0)
    running = asyncio.create_task(collect(other, make_request("r", 2, max_tokens=3)))
    weights = [("w", torch.ones(1))]
    await engine.update_weights(weights, version=1)
    assert len(await running) == 1
    assert len(await collect(other, make_request("r", 2))) == 1
    with pytest.raises(
        EngineDiedError, match=r"died: it was silent for 3.0 s \(it is stopped, .*\), and killed"
    ):
        await engine.update_weights(weights, version=9)
    await engine.close()
    await other.close()
    await handle.end()


async def test_clients_in_two_processes(actor: Any, slow: RayEngine, other_process: Any) -> None:
    """Each has its own samples, by ids of its own; the weights are everybody's."""
    await other_process.connect.remote(actor)
    theirs = [other_process.generate.remote("same", 2, 20 + i) for i in range(4)]
    mine = [collect(slow, make_request("same", 2, n=2, max_tokens=10 + i)) for i in range(4)]
    for i, found in enumerate(await asyncio.gather(*mine)):
        assert sorted(len(c.token_ids) for c in found.values()) == [10 + i] * 2
    for i, found in enumerate(await asyncio.gather(*theirs)):
        assert sorted(len(c.token_ids) for c in found) == [20 + i] * 2
    version = slow.weight_version + 1
    await slow.update_weights([("w", torch.ones(3))], version=version)
    async with asyncio.timeout(300):
        while await other_process.weight_version.remote() < version:
            await asyncio.sleep(0.01)


async def test_what_a_lost_client_generates_is_given_up(actor: Any, slow: RayEngine) -> None:
    """One that is still alive is notified."""
    lost = await RayEngine.connect(actor)
    running = asyncio.create_task(collect(lost, make_request("lost", 2, n=2, max_tokens=10_000)))
    kept = asyncio.create_task(collect(slow, make_request("kept", 2, max_tokens=150)))
    await until(lambda: slow.stats().num_running == 3)
    # As if it did not ask for its messages any more: the actor waits for a second.
    await actor.actor.lease.remote(lost._client, 1.0)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EngineDiedError, match="this client was silent for too long") as info:
        await running
    assert info.value.unfinished == (("lost", 0), ("lost", 1))
    await until(lambda: slow.stats().num_running <= 1)
    assert [len(c.token_ids) for c in (await kept).values()] == [150]
    assert len(await collect(lost, make_request("later", 2, max_tokens=2))) == 1
    await lost.close()


async def test_closing_a_client_leaves_the_others(actor: Any, slow: RayEngine) -> None:
    other = await RayEngine.connect(actor)
    running = asyncio.create_task(collect(other, make_request("r", 2, n=2, max_tokens=10_000)))
    kept = asyncio.create_task(collect(slow, make_request("r", 2, n=2, max_tokens=40)))
    await until(lambda: slow.stats().num_running == 4)
    await asyncio.gather(other.close(), other.close())
    with pytest.raises(RolloutError, match="closed while generating"):
        await running
    for call in (
        collect(other, make_request("r", 2)),
        other.pause(),
        other.update_weights([], version=9),
    ):
        with pytest.raises(RolloutError, match="the engine is closed: connect again"):
            await call
    await until(lambda: slow.stats().num_running == 2)
    assert [len(c.token_ids) for c in (await kept).values()] == [40, 40]


async def test_a_cancelled_caller_leaves_the_actor_in_order(slow: RayEngine) -> None:
    version = slow.weight_version + 1
    for call in (slow.update_weights([("w", torch.ones(3))], version=version), slow.pause()):
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: slow.weight_version == version)
    await slow.resume()
    assert len(await collect(slow, make_request("r", 2, max_tokens=2))) == 1


async def test_an_actor_ends_for_all() -> None:
    actor = start(FakeEngine)
    engine = await RayEngine.connect(actor)
    await actor.end()
    with pytest.raises(EngineDiedError, match=r"died: it was ended$"):
        await engine.pause()
    with pytest.raises(EngineDiedError, match="died before it was ready: it was ended"):
        await RayEngine.connect(actor)
    await actor.end()
    await engine.close()


async def test_an_actor_has_another_engine_from_now_on(slow: RayEngine) -> None:
    """In a process of its own, also after that has died; to the clients of the one before it is dead."""
    before = start(make_slow_engine)
    engine = await RayEngine.connect(before)
    running = asyncio.create_task(collect(engine, make_request("long", 2, n=2, max_tokens=10_000)))
    await until(lambda: engine.stats().num_running == 2)
    after = before.becoming(partial(FakeEngine, version=7))
    first, second = await asyncio.gather(RayEngine.connect(after), RayEngine.connect(after))
    assert pid_of(first) == pid_of(second) != pid_of(engine)
    with pytest.raises(EngineDiedError, match="was restarted: connect again") as info:
        await running
    assert info.value.unfinished == (("long", 0), ("long", 1))
    with pytest.raises(EngineDiedError, match="was restarted: connect again"):
        await engine.pause()
    os.kill(pid_of(first), signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=r"engine process \d+ was killed by SIGKILL"):
        await collect(first, make_request("r", 2), make_request("s", 2))
    third = await RayEngine.connect(after)
    for client in (second, third):
        assert client.weight_version == 7
    assert slow.weight_version != 7
    await third.close()
    await after.end()


async def test_a_lent_actor_sleeps_as_what_it_is() -> None:
    """It is put to sleep without a client; what a client of the other engine would be is not made for that."""
    home = start(partial(FakeEngine, version=1)).lendable(
        "engine", {"judge": partial(FakeEngine, version=2)}
    )
    await home.sleep()
    engine = await RayEngine.connect(home)
    lent = await RayEngine.connect(home.lent("judge"))
    assert (engine.weight_version, lent.weight_version) == (1, 2)
    assert pid_of(lent) != pid_of(engine)
    await home.sleep()
    other = await RayEngine.connect(home.lent("judge"))
    assert other.making_s == lent.making_s > 0, "the same engine"
    back = await RayEngine.connect(home.lent("judge").lent("engine"))
    assert back.weight_version == 1
    for client in (engine, lent, other, back):
        await client.close()
    await home.end()


async def test_starts_that_fail() -> None:
    bad = cast(Any, FakeEngine)
    for factory, kind, message in (
        (partial(bad, no_such=1), TypeError, "unexpected keyword argument 'no_such'"),
        (not_to_be_unpickled, ModuleNotFoundError, "No module named 'no_such_module'"),
        (
            be_killed,
            EngineDiedError,
            "died before it was ready: it was killed, crashed, or cannot be reached",
        ),
    ):
        actor = start(factory)
        with pytest.raises(kind, match=message):
            await RayEngine.connect(actor)
        await actor.end()
    for actor in (start(sleep_for_ever), start(FakeEngine, node="nowhere")):
        with pytest.raises(
            EngineStartError, match=r"the engine actor was not ready after 0.5 s: free are {.*CPU"
        ):
            await RayEngine.connect(actor, start_timeout_s=0.5)
        ray.kill(actor.actor)
    with pytest.raises(ValueError, match="num_threads is 0; expected at least 1"):
        start(FakeEngine, num_threads=0)
    with pytest.raises(ValueError, match="heartbeat_timeout_s is 0; expected more than 0"):
        await RayEngine.connect(EngineHandle(None, b""), heartbeat_timeout_s=0)


class _NotToBeUnpickled:
    def __call__(self) -> FakeEngine:
        return FakeEngine()

    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)


not_to_be_unpickled = _NotToBeUnpickled()


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.int64,
)


async def test_weights_that_end_half_way_change_nothing(slow: RayEngine) -> None:
    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(3)
        raise OSError("a trainer rank is gone")

    version = slow.weight_version
    with pytest.raises(OSError, match="a trainer rank is gone"):
        await slow.update_weights(torn(), version=version + 1)
    await slow.pause()
    assert slow.weight_version == version
    await slow.resume()


@pytest.mark.parametrize("bucket_size_bytes", [1, 3000, 1 << 20])
async def test_weights_are_read_as_they_were_put(bucket_size_bytes: int) -> None:
    weights = {
        f"{dtype} {n}": (10 * torch.randn(n, 7)).to(dtype) for dtype in DTYPES for n in (0, 1, 13)
    }
    weights |= {
        "scalar": torch.tensor(3.0),
        "transposed": torch.randn(5, 3).t(),
        "parameter": torch.nn.Linear(2, 2).weight,
    }
    references = WeightReferences.put(weights.items(), bucket_size_bytes=bucket_size_bytes)
    assert list(references.layout) == list(weights)
    for read in (dict(references), dict(await references.fetch())):
        assert list(read) == list(weights)
        for name, tensor in read.items():
            assert tensor.dtype == weights[name].dtype
            assert tensor.shape == weights[name].shape
            assert torch.equal(tensor.double(), weights[name].double())


async def test_a_bucket_holds_so_much() -> None:
    """An iterable is asked for no more than one bucket ahead of what was put."""
    alive: list[Any] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        import weakref

        for i in range(12):
            tensor = torch.full((250,), float(i))
            alive.append(weakref.ref(tensor))
            assert sum(t() is not None for t in alive) <= 5
            yield str(i), tensor

    references = WeightReferences.put(tensors(), bucket_size_bytes=4000)
    assert len(references._buckets) == 3  # pyright: ignore[reportPrivateUsage]
    assert [float(tensor[0]) for _, tensor in references] == list(range(12))
    with pytest.raises(ValueError, match="bucket_size_bytes is 0; expected at least 1"):
        WeightReferences.put([], bucket_size_bytes=0)


async def test_only_references_pass_through_who_hands_weights_on(
    actor: Any, other_process: Any
) -> None:
    """To engines on two nodes, which read what a third process put."""
    size, version = 40 << 20, 100
    tensors = [(f"w{i}", torch.full((size // 32,), float(version))) for i in range(8)]
    weights = WeightReferences.put(tensors, bucket_size_bytes=size // 4)
    assert len(cloudpickle.dumps(weights)) < 10_000  # pyright: ignore[reportPrivateImportUsage]
    for each in (actor, start(FakeEngine, node="elsewhere")):
        await other_process.connect.remote(each)
        assert await other_process.update_weights.remote(weights, version) < size / 10
        engine = await RayEngine.connect(each)
        assert engine.weight_version == version
        assert len(await collect(engine, make_request("check weights", 1, max_tokens=1))) == 1
        await engine.close()


async def test_replicas_lose_no_sample_to_a_kill() -> None:
    """The dead one's actor comes back, is connected to again, and is given the present weights by reference."""
    actors = [start(make_slow_engine) for _ in range(2)]

    async def restart() -> Engine:
        alive = {cast(RayEngine, engine).handle.actor for engine in replicas.engines}
        (dead,) = (actor for actor in actors if actor.actor not in alive)
        return await RayEngine.connect(dead)

    replicas = EngineReplicas([await RayEngine.connect(actor) for actor in actors], restart=restart)
    await replicas.update_weights(WeightReferences.put([("w", torch.full((5,), 1.0))]), version=1)
    victim, other = (cast(RayEngine, engine) for engine in replicas.engines)
    requests = [make_request(f"r{i}", 2, n=2, seed=i, max_tokens=5 + i) for i in range(20)]
    found: dict[tuple[str, int], Completion] = {}
    async for c in replicas.generate(requests):
        assert (c.request_id, c.index) not in found
        found[c.request_id, c.index] = c
        if len(found) == 5:
            os.kill(pid_of(victim), signal.SIGKILL)
    expected = await collect(FakeEngine(version=1), *requests)
    assert found.keys() == expected.keys()
    for key, c in found.items():
        assert c.token_ids.tolist() == expected[key].token_ids.tolist()
        assert set(c.weight_versions.tolist()) == {1}
    await until(lambda: len(replicas.engines) == 2)
    (newcomer,) = (cast(RayEngine, engine) for engine in replicas.engines if engine is not other)
    assert newcomer.handle == victim.handle
    assert newcomer.weight_version == 1
    await collect(newcomer, make_request("check weights", 1, max_tokens=1))
    await replicas.close()
    await asyncio.gather(*map(EngineHandle.end, actors))


async def test_weights_are_compared_across_processes(tied: TinyModel) -> None:
    """Digests travel with the references; the engine reports what it computes with where it is."""
    handle = start(partial(HFEngine.from_pretrained, tied.path), num_threads=1)
    engine = InstrumentedEngine(
        await RayEngine.connect(handle), name="engine 3", record=WeightRecord()
    )
    old, new = (dict(model.named_parameters()) for model in (tied.old, tied.new))
    await check_weights(engine, all_digests(DigestedWeights(old.items())))
    await engine.update_weights(WeightReferences.put(DigestedWeights(new.items())), version=1)
    other = {**old, TENSOR: old[TENSOR].flip(0)}
    weights = DigestedWeights(other.items(), digests=all_digests(DigestedWeights(old.items())))
    with pytest.raises(
        WrongWeightsError, match=f"engine 3 .* 2: '{TENSOR}' has its values in another order"
    ):
        await engine.update_weights(WeightReferences.put(weights), version=2)
    # One of the user's own that reports nothing passes unchecked.
    mute = InstrumentedEngine(
        await RayEngine.connect(start(FakeEngine)), name="engine 4", record=WeightRecord()
    )
    assert await mute.held_weights() is None
    for each in (engine, mute):
        await each.close()
    await handle.end()
