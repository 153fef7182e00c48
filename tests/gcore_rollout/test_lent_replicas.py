"""Replicas of which some sleep while the others serve: what these miss, and when they are replaced."""

import asyncio

import torch
from engine_oracles import collect, make_request
from fake_engine import FakeEngine

from gcore_rollout import EngineReplicas, Request


def requests_of(count: int) -> list[Request]:
    return [
        make_request(f"r{i}", 2 + i % 3, n=3, seed=i, max_tokens=1 + (i * 7) % 12)
        for i in range(count)
    ]


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((4,), value))]


async def test_lent_replicas_serve_while_they_are_awake_alone() -> None:
    """The samples are the same with them and without."""
    own, lent = FakeEngine(step_s=0.001), FakeEngine(step_s=0.001)
    replicas = EngineReplicas([own, lent], lent=[lent])
    found = [await collect(replicas, *requests_of(6))]
    assert lent.served
    await replicas.sleep()
    assert (own.calls, replicas.num_serving) == ([], 1)
    lent.served.clear()
    found.append(await collect(replicas, *requests_of(6)))
    assert not lent.served
    await replicas.wake()
    found.append(await collect(replicas, *requests_of(6)))
    assert lent.served
    first, *others = ({key: c.token_ids.tolist() for key, c in one.items()} for one in found)
    assert len(first) == 18
    assert all(other == first for other in others)
    await replicas.close()


async def test_an_update_that_lent_replicas_sleep_through_is_made_up_for_by_the_next() -> None:
    own, lent = FakeEngine(), FakeEngine()
    replicas = EngineReplicas([own, lent], lent=[lent])
    await replicas.sleep(keep_weights=False)
    await replicas.update_weights(weights(1.0), version=1)
    assert (own.weight_version, lent.weight_version, replicas.num_serving) == (1, 0, 1)
    await replicas.wake(cache=False)
    assert replicas.num_serving == 1, "its weights are old"
    await replicas.update_weights(weights(2.0), version=2)
    assert replicas.num_serving == 1, "its keys and values are asleep"
    await replicas.wake()
    assert (own.weight_version, lent.weight_version, replicas.num_serving) == (2, 2, 2)
    assert own.calls == []
    await replicas.close()


async def test_a_lent_replica_that_dies_asleep_is_replaced_when_the_others_wake() -> None:
    """One that is not lent is replaced at once, without the device of anything else."""
    made: list[FakeEngine] = []

    async def restart() -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    own, lent, spare = FakeEngine(), FakeEngine(), FakeEngine()
    replicas = EngineReplicas([own, spare, lent], restart=restart, lent=[lent])
    await replicas.sleep(keep_weights=False)
    lent.die()
    await replicas.wake(cache=False)
    await replicas.update_weights(weights(1.0), version=1)
    own.die()
    await collect(replicas, *requests_of(4))
    while len(replicas.engines) < 2:
        await asyncio.sleep(0)
    assert replicas.engines == [spare, made[0]]
    assert made[0].calls == [], "it stays awake"
    await replicas.wake()
    while len(replicas.engines) < 3:
        await asyncio.sleep(0)
    assert [engine.weight_version for engine in made] == [1, 1]
    await replicas.sleep()
    assert [engine.calls[-1:] for engine in made] == [[], ["sleep"]]
    await replicas.close()
