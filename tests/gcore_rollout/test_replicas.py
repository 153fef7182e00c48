"""Several engines as one: who gets what, and that nothing is lost or made twice when some die, leave or come."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from engine_oracles import TinyModel, collect, first_then_abandon, make_request, until_sampled
from fake_engine import FakeEngine

from gcore_rollout import (
    Completion,
    Engine,
    EngineDiedError,
    EngineProcess,
    EngineReplicas,
    HFEngine,
    Request,
    RequestError,
    RolloutError,
)

STEP_S = 0.001


def fakes(count: int, **options: float) -> list[FakeEngine]:
    return [FakeEngine(step_s=STEP_S, **options) for _ in range(count)]  # pyright: ignore[reportArgumentType]


def requests_of(count: int, *, n: int = 3, max_tokens: int = 12) -> list[Request]:
    """Of different lengths."""
    return [
        make_request(f"r{i}", 2 + i % 3, n=n, seed=i, max_tokens=1 + (i * 7) % max_tokens)
        for i in range(count)
    ]


def tokens(
    found: dict[tuple[str, int], Completion],
) -> dict[tuple[str, int], tuple[list[int], str]]:
    return {key: (c.token_ids.tolist(), c.finish_reason) for key, c in found.items()}


async def undisturbed(requests: Sequence[Request]) -> dict[tuple[str, int], tuple[list[int], str]]:
    return tokens(await collect(FakeEngine(), *requests))


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((4,), value))]


async def test_completions_are_those_of_one_engine() -> None:
    engines = fakes(3)
    replicas = EngineReplicas(engines)
    requests = requests_of(40)
    assert tokens(await collect(replicas, *requests)) == await undisturbed(requests)
    assert await collect(replicas) == {}
    shares = [sum(n for _, n, _ in engine.served) for engine in engines]
    assert sum(shares) == 120
    assert min(shares) > 20
    assert all(n == 3 for engine in engines for _, n, _ in engine.served), (
        "samples of a prompt stay together"
    )
    stats = replicas.stats()
    assert stats.completion_tokens == sum(r.n * r.sampling.max_tokens for r in requests)
    assert (stats.num_running, stats.weight_version) == (0, 0)
    assert stats.num_slots == 3 * 4
    await replicas.close()
    assert all(engine.closed for engine in engines)
    with pytest.raises(RolloutError, match="the replicas are closed"):
        await collect(replicas, *requests)


async def test_work_goes_where_there_is_least() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    long = asyncio.create_task(collect(replicas, make_request("long", 2, max_tokens=300)))
    await asyncio.sleep(0)
    await collect(replicas, *(make_request(f"r{i}", 2, n=2, max_tokens=20) for i in range(5)))
    assert Counter(name for engine in engines for name, _, _ in engine.served) == Counter(
        ["long", *(f"r{i}" for i in range(5))]
    )
    assert sorted(len(engine.served) for engine in engines) == [1, 5]
    await long


def turn(session: str, number: int) -> Request:
    return replace(make_request(f"{session}/{number}", 3, max_tokens=4), session=session)


async def test_a_conversation_stays_with_the_engine_that_has_its_prefix() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    sessions = [f"c{i}" for i in range(8)]
    for number in range(4):
        # In another order each time.
        await collect(replicas, *(turn(session, number) for session in sessions))
        sessions = sessions[3:] + sessions[:3]
    homes = [Counter(name.partition("/")[0] for name, _, _ in engine.served) for engine in engines]
    assert [sorted(home.values()) for home in homes] == [[4] * 4] * 2
    await replicas.update_weights(weights(1.0), version=1)
    await collect(replicas, *(turn(session, 9) for session in sorted(sessions)))
    assert [sum("/9" in name for name, _, _ in engine.served) for engine in engines] == [4, 4]


async def test_a_conversation_leaves_an_engine_that_has_too_much_to_do() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    await collect(replicas, turn("c", 0))
    [home] = [engine for engine in engines if engine.served]
    [other] = [engine for engine in engines if engine is not home]
    busy = asyncio.create_task(collect(replicas, *(turn("c", number) for number in (1, 2, 3))))
    await busy
    names = [{name for name, _, _ in engine.served} for engine in (home, other)]
    # With two turns at home and none elsewhere the third goes elsewhere, which is then where the conversation is.
    assert names == [{"c/0", "c/1", "c/2"}, {"c/3"}]
    await collect(replicas, turn("c", 4))
    assert "c/4" in {name for name, _, _ in other.served}


async def test_more_than_a_fair_share_is_split() -> None:
    engines = fakes(4)
    replicas = EngineReplicas(engines)
    requests = [make_request("many", 2, n=10, max_tokens=5, seed=3)]
    assert tokens(await collect(replicas, *requests)) == await undisturbed(requests)
    assert sorted(n for engine in engines for _, n, _ in engine.served) == [2, 2, 3, 3]


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_what_the_dead_owed_is_made_by_others(num_deaths: int) -> None:
    engines = fakes(3)
    replicas = EngineReplicas(engines)
    requests = requests_of(60)
    found: dict[tuple[str, int], Completion] = {}
    async for c in replicas.generate(requests):
        assert (c.request_id, c.index) not in found
        found[c.request_id, c.index] = c
        if len(found) in (60, 120)[:num_deaths]:
            engines[len(found) // 60 - 1].die()
    assert tokens(found) == await undisturbed(requests)
    assert replicas.engines == engines[num_deaths:]
    assert replicas.stats().completion_tokens >= sum(r.n * r.sampling.max_tokens for r in requests)


async def test_only_what_was_unfinished_is_made_again() -> None:
    engines = [FakeEngine(first_only=True), FakeEngine()]
    replicas = EngineReplicas(engines)
    requests = [make_request(f"r{i}", 2, n=3, seed=i) for i in range(4)]
    found: dict[tuple[str, int], Completion] = {}
    async for c in replicas.generate(requests):
        found[c.request_id, c.index] = c
        if len(found) == 8:
            engines[0].die()
    assert tokens(found) == await undisturbed(requests)
    assert engines[0].served == [("r0", 3, 0), ("r2", 3, 0)]
    assert engines[1].served == [("r1", 3, 0), ("r3", 3, 0), ("r0", 2, 0), ("r2", 2, 0)]


async def test_when_all_are_dead_the_unfinished_are_named() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    requests = requests_of(30)
    found: list[tuple[str, int]] = []

    async def consume() -> None:
        async for c in replicas.generate(requests):
            found.append((c.request_id, c.index))
            if len(found) == 20:
                for engine in engines:
                    engine.die()

    with pytest.raises(
        EngineDiedError, match="no replica is left: the fake engine died; the fake engine died"
    ) as info:
        await consume()
    assert sorted([*found, *info.value.unfinished]) == sorted(
        (r.request_id, i) for r in requests for i in range(3)
    )
    with pytest.raises(EngineDiedError, match="no replica is left"):
        await collect(replicas, make_request("r", 2))
    with pytest.raises(EngineDiedError, match="no replica is left"):
        await replicas.update_weights(weights(1.0), version=1)


async def test_what_kills_engines_is_not_given_to_all_of_them() -> None:
    engines = fakes(4)
    replicas = EngineReplicas(engines, max_deaths=2)
    with pytest.raises(EngineDiedError, match="2 replicas died with the same sample") as info:
        await collect(replicas, make_request("poison", 2, n=1))
    assert info.value.unfinished == (("poison", 0),)
    assert len(replicas.engines) == 2
    assert len(await collect(replicas, make_request("r", 2))) == 1


async def test_errors_that_are_no_deaths_go_to_the_caller() -> None:
    replicas = EngineReplicas(fakes(2))
    other = asyncio.create_task(collect(replicas, *requests_of(10)))
    with pytest.raises(RequestError, match="too long"):
        await collect(
            replicas, make_request("good", 2, max_tokens=10_000), make_request("refuse", 2)
        )
    assert len(await other) == 30
    assert replicas.stats().num_running == 0
    assert len(replicas.engines) == 2


async def test_abandoned_samples_free_the_engines() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    await first_then_abandon(
        replicas, [make_request("a", 2, max_tokens=1), make_request("b", 2, n=4, max_tokens=10_000)]
    )
    await asyncio.sleep(0)
    assert replicas.stats().num_running == 0
    engines[0].die()
    assert len(await collect(replicas, make_request("c", 2, n=4))) == 4


async def test_update_reaches_all() -> None:
    engines = fakes(3)
    replicas = EngineReplicas(engines)
    for version in (1, 2):
        tensors = weights(float(version))
        await replicas.update_weights(tensors, version=version)
        tensors[0][1].fill_(float("nan"))
        assert all(float(engine.weights["w"].sum()) == 4 * version for engine in engines)
    assert replicas.weight_version == 2
    with pytest.raises(ValueError, match="version is 2; expected a version above the current 2"):
        await replicas.update_weights(weights(3.0), version=2)
    engines[1].die()
    await replicas.update_weights(weights(3.0), version=3)
    assert replicas.engines == [engines[0], engines[2]]


async def test_update_that_all_refuse_changes_nothing() -> None:
    engines = [FakeEngine(names=["v"]) for _ in range(2)]
    replicas = EngineReplicas(engines)
    with pytest.raises(ValueError, match=r"weights \['w'\] are not the model's \['v'\]"):
        await replicas.update_weights(weights(1.0), version=1)
    assert replicas.weight_version == 0
    assert replicas.engines == engines
    assert len(await collect(replicas, make_request("r", 2))) == 1


async def test_replica_that_refuses_what_others_take_is_dead() -> None:
    """What it was making is made elsewhere."""
    engines = [FakeEngine(step_s=STEP_S, names=names) for names in (["w"], ["v"])]
    replicas = EngineReplicas(engines)
    requests = [make_request(f"r{i}", 2, max_tokens=50, seed=i) for i in range(6)]
    running = asyncio.create_task(collect(replicas, *requests))
    await until_sampled(replicas, 20)
    await replicas.update_weights(weights(1.0), version=1)
    assert replicas.engines == engines[:1]
    assert tokens(await running) == await undisturbed(requests)
    assert engines[1].closed


async def test_drained_replica_finishes_and_may_come_back() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    requests = requests_of(20, max_tokens=30)
    running = asyncio.create_task(collect(replicas, *requests))
    await until_sampled(replicas, 100)
    await replicas.remove(engines[0])
    assert engines[0].stats().num_running == 0
    served = list(engines[0].served)
    assert tokens(await running) == await undisturbed(requests)
    assert len(await collect(replicas, *requests_of(5))) == 15
    assert engines[0].served == served
    before = replicas.stats().completion_tokens
    assert before == sum(engine.stats().completion_tokens for engine in engines)
    await replicas.add(engines[0])
    assert replicas.stats().completion_tokens == before
    assert len(await collect(replicas, *requests_of(8))) == 24
    assert len(engines[0].served) > len(served)


async def test_samples_of_a_lost_replica_continue_elsewhere() -> None:
    """With the tokens that they have."""
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    requests = [make_request(f"r{i}", 2, n=2, max_tokens=100, seed=i) for i in range(6)]
    running = asyncio.create_task(collect(replicas, *requests))
    await until_sampled(replicas, 200)
    await replicas.remove(engines[1], drain=False)
    assert not running.done()
    assert engines[1].stats().num_running == 0
    assert not engines[1].closed
    assert tokens(await running) == await undisturbed(requests)
    assert sum(engine.stats().completion_tokens for engine in engines) == 1200, (
        "no token was made twice"
    )
    with pytest.raises(ValueError, match="is the last one that serves; add another one first"):
        await replicas.remove(engines[0])
    with pytest.raises(ValueError, match="is not one of the replicas"):
        await replicas.remove(engines[1])


async def test_added_engine_gets_the_present_weights_before_it_serves() -> None:
    replicas = EngineReplicas(fakes(1))
    early, late = fakes(2)
    await replicas.add(early)
    await replicas.update_weights(weights(5.0), version=5)
    await replicas.pause()
    await replicas.add(late)
    assert (early.weight_version, late.weight_version) == (5, 5)
    assert float(late.weights["w"].sum()) == 20
    assert late.calls == ["pause"]
    await replicas.resume()
    await replicas.sleep()
    asleep = FakeEngine()
    await replicas.add(asleep)
    assert asleep.calls == ["sleep"]
    await replicas.wake()
    assert all(engine.calls[-1] == "wake" for engine in (early, late, asleep))
    await replicas.sleep(keep_weights=False)
    await replicas.wake(cache=False)
    half_awake = FakeEngine()
    await replicas.add(half_awake)
    assert half_awake.calls == ["sleep", "wake weights"]
    assert early.calls[-2:] == ["sleep without weights", "wake weights"]
    await replicas.wake(weights=False)
    assert all(engine.calls[-1] == "wake cache" for engine in (early, half_awake))
    with pytest.raises(ValueError, match="weight version of the engine is 9; expected at most 5"):
        await replicas.add(FakeEngine(version=9))


async def test_engine_with_older_weights_waits_for_the_next_update() -> None:
    """Where the present ones are not at hand."""
    first, second = FakeEngine(version=3), FakeEngine(version=1)
    replicas = EngineReplicas([first])
    await replicas.add(second)
    await collect(replicas, *requests_of(6))
    assert second.served == []
    first.die()
    with pytest.raises(
        EngineDiedError, match="no replica serves: those that are left have older weights"
    ):
        await collect(replicas, make_request("r", 2))
    await replicas.update_weights(weights(4.0), version=4)
    assert len(await collect(replicas, make_request("r", 2))) == 1


async def test_the_dead_are_replaced() -> None:
    """By engines with the present weights; calls wait for them when no engine is left."""
    made: list[FakeEngine] = []

    async def restart() -> FakeEngine:
        await asyncio.sleep(0.02)
        made.extend(fakes(1))
        return made[-1]

    (engine,) = fakes(1)
    replicas = EngineReplicas([engine], restart=restart)
    await replicas.update_weights(weights(1.0), version=1)
    requests = requests_of(10)
    running = asyncio.create_task(collect(replicas, *requests))
    await until_sampled(replicas, 60)
    engine.die()
    found = await running
    assert tokens(found) == await undisturbed(requests)
    assert len(made) == 1
    assert float(made[0].weights["w"].sum()) == 4
    assert {int(v) for c in found.values() for v in c.weight_versions} == {1}


async def test_an_update_waits_for_a_replacement_when_all_are_dead() -> None:
    """So do calls: the replacement has the weights before it makes a sample."""
    replacement = fakes(1)[0]
    may_start = asyncio.Event()

    async def restart() -> FakeEngine:
        await may_start.wait()
        return replacement

    (engine,) = fakes(1)
    replicas = EngineReplicas([engine], restart=restart)
    await replicas.update_weights(weights(1.0), version=1)
    engine.die()
    updates = [asyncio.create_task(replicas.update_weights(weights(v), version=v)) for v in (2, 3)]
    requests = requests_of(5)
    running = asyncio.create_task(collect(replicas, *requests))
    await asyncio.sleep(0.02)
    assert not any(update.done() for update in updates)
    may_start.set()
    await asyncio.gather(*updates)
    assert replicas.weight_version == replacement.weight_version == 3
    assert {int(v) for c in (await running).values() for v in c.weight_versions} <= {2, 3}
    await replicas.close()


async def test_no_replacement_starts_while_all_are_asleep() -> None:
    """Something else has the devices: it starts when they wake, or for an update when none is left that takes it."""
    made: list[FakeEngine] = []

    async def restart() -> FakeEngine:
        made.extend(fakes(1))
        return made[-1]

    first, second = fakes(2)
    replicas = EngineReplicas([first, second], restart=restart)
    await replicas.sleep(keep_weights=False)
    first.die()
    await replicas.wake(cache=False)
    assert replicas.engines == [second]
    await replicas.update_weights(weights(1.0), version=1)
    await asyncio.sleep(0.01)
    assert not made
    await replicas.wake()
    while len(replicas.engines) < 2:
        await asyncio.sleep(0)
    assert [engine.weight_version for engine in made] == [1]
    await replicas.sleep()
    for engine in (second, made[0]):
        engine.die()
    await replicas.wake(cache=False)
    await replicas.update_weights(weights(2.0), version=2)
    await replicas.wake()
    assert len(await collect(replicas, *requests_of(6))) == 18
    assert {engine.weight_version for engine in replicas.engines} == {2}
    assert made[1].calls[:3] == ["sleep", "wake weights", "wake"]
    await replicas.close()


async def test_sleep_waits_for_replacements_that_are_being_started() -> None:
    replacement = fakes(1)[0]
    has_started = asyncio.Event()

    async def restart() -> FakeEngine:
        await has_started.wait()
        return replacement

    first, second = fakes(2)
    replicas = EngineReplicas([first, second], restart=restart)
    first.die()
    await collect(replicas, *requests_of(6))
    sleeping = asyncio.create_task(replicas.sleep())
    await asyncio.sleep(0.01)
    assert not sleeping.done()
    has_started.set()
    await sleeping
    assert replacement.calls == second.calls == ["sleep"]
    await replicas.close()


async def test_replacing_has_an_end() -> None:
    made: list[FakeEngine] = []

    async def stillborn() -> FakeEngine:
        made.extend(fakes(1))
        made[-1].die()
        return made[-1]

    async def nothing() -> FakeEngine:
        raise OSError("no device is free")

    for restart, message in ((stillborn, "no replica is left"), (nothing, "no device is free")):
        (engine,) = fakes(1)
        replicas = EngineReplicas([engine], restart=restart)
        engine.die()
        with pytest.raises(EngineDiedError, match=message):
            await collect(replicas, make_request("r", 2))
    assert len(made) == 1


async def test_abort_ends_also_what_a_dead_replica_owed() -> None:
    engines = fakes(2)
    replicas = EngineReplicas(engines)
    requests = [make_request(name, 2, n=2, max_tokens=10_000) for name in "abcd"]
    running = asyncio.create_task(collect(replicas, *requests))
    await until_sampled(replicas, 50)
    await replicas.abort(["a"])
    await until_sampled(replicas, 50)
    for engine in engines:
        await engine.pause()
    # The abort does not reach samples that wait in a paused engine before it dies.
    await replicas.abort()
    engines[0].die()
    await engines[1].resume()
    found = await running
    assert len(found) == 8
    assert {c.finish_reason for c in found.values()} == {"abort"}
    assert {len(c.token_ids) for c in found.values()} > {0}


def test_engines_must_agree() -> None:
    with pytest.raises(
        ValueError, match=r"weight versions of engines are \[0, 2\]; expected one version"
    ):
        EngineReplicas([FakeEngine(), FakeEngine(version=2)])
    with pytest.raises(
        ValueError,
        match=r"weight versions of engines are \[\]; expected one version of one or more",
    ):
        EngineReplicas([])
    with pytest.raises(ValueError, match="max_deaths is 0; expected at least 1"):
        EngineReplicas(fakes(1), max_deaths=0)


@pytest.mark.slow
async def test_a_killed_process_costs_no_sample(tied: TinyModel) -> None:
    """Two hundred requests over two processes, one of which gets `kill -9`: every sample once, as if nothing was."""
    requests = [
        make_request(f"r{i}", 3 + i % 20, n=4, seed=i, max_tokens=8 + i % 25) for i in range(200)
    ]
    start = partial(
        EngineProcess.start,
        partial(HFEngine.from_pretrained, tied.path, max_num_seqs=32),
        num_threads=1,
    )
    engines: list[EngineProcess] = [await start() for _ in range(2)]
    replicas = EngineReplicas(engines)
    await replicas.update_weights(tied.new.state_dict().items(), version=1)
    found: dict[tuple[str, int], Completion] = {}
    async for c in replicas.generate(requests):
        assert (c.request_id, c.index) not in found
        found[c.request_id, c.index] = c
        if len(found) == 200:
            os.kill(engines[0].pid, signal.SIGKILL)
    assert len(replicas.engines) == 1
    assert len(found) == 800
    here: Engine = HFEngine.from_pretrained(tied.path)
    await here.update_weights(tied.new.state_dict().items(), version=1)
    assert tokens(found) == tokens(await collect(here, *requests))
    assert {int(v) for c in found.values() for v in c.weight_versions} == {1}
    await replicas.close()
