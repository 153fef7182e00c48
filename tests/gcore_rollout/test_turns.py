"""Engines that take turns on the same devices: who is awake, and that nothing is lost on the way."""

import asyncio

import pytest
import torch
from engine_oracles import TinyModel, collect, make_request, until_sampled
from fake_engine import FakeEngine
from hypothesis import given, settings, strategies as st

from gcore_rollout import Completion, HFEngine, Request, RolloutError, TimeSharedEngines


class Sleeper(FakeEngine):
    """Refuses to sample asleep, and to be awake while another is."""

    def __init__(self, awake: "set[Sleeper]") -> None:
        super().__init__(step_s=0.0005)
        self.all_awake = awake
        self.num_swaps = 0
        self.num_weight_wakes = 0
        self.is_broken = False

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await super().sleep(keep_weights=keep_weights)
        await asyncio.sleep(0.001)
        self.all_awake.discard(self)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        assert weights
        if not cache:
            assert not self.all_awake
            self.num_weight_wakes += 1
            return
        if self.is_broken:
            raise RolloutError("no memory")
        await asyncio.sleep(0.001)
        self.all_awake.add(self)
        self.num_swaps += 1
        assert self.all_awake == {self}

    async def _sample(
        self, request: Request, index: int, finished: asyncio.Queue[Completion]
    ) -> None:
        await super()._sample(request, index, finished)
        assert self.all_awake == {self}


def tokens(found: dict[tuple[str, int], Completion]) -> dict[tuple[str, int], list[int]]:
    return {key: completion.token_ids.tolist() for key, completion in found.items()}


def sleepers(count: int) -> list[Sleeper]:
    awake: set[Sleeper] = set()
    engines = [Sleeper(awake) for _ in range(count)]
    awake.add(engines[0])
    return engines


async def test_the_judge_waits_until_the_policy_has_nothing_to_do() -> None:
    policy, judge = own = sleepers(2)
    first, second = TimeSharedEngines(own).engines
    ends: list[str] = []

    async def ask(name: str, *requests: Request) -> None:
        engine = first if name == "policy" else second
        await collect(engine, *requests)
        ends.append(name)

    verdict = make_request("v", 2, max_tokens=4)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask("policy", make_request("a", 2, n=4, max_tokens=20)))
        await asyncio.sleep(0)
        group.create_task(ask("judge", verdict))
        await asyncio.sleep(0.002)
        # Of the same turn, though the judge has waited for longer.
        group.create_task(ask("policy", make_request("b", 2, n=4, max_tokens=20)))
    assert ends == ["policy", "policy", "judge"]
    assert (policy.num_swaps, judge.num_swaps) == (0, 1)
    await first.update_weights([("w", torch.ones(2))], version=1)
    assert (policy.num_swaps, policy.weight_version) == (1, 1)


@settings(max_examples=30)
@given(calls=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=25))
def test_every_call_is_answered_as_by_its_engine_alone(calls: list[tuple[int, int]]) -> None:
    async def run() -> None:
        own = sleepers(3)
        engines = TimeSharedEngines(own).engines
        requests = [
            make_request(f"r{i}", 2, n=2, seed=i, max_tokens=tokens)
            for i, (_, tokens) in enumerate(calls)
        ]
        found = await asyncio.gather(
            *(
                collect(engines[who], request)
                for (who, _), request in zip(calls, requests, strict=True)
            )
        )
        assert [tokens(answers) for answers in found] == [
            tokens(await collect(FakeEngine(), r)) for r in requests
        ]
        assert sum(engine.num_swaps for engine in own) <= len({who for who, _ in calls})

    asyncio.run(run())


async def test_who_gives_up_ends_the_turn() -> None:
    own = sleepers(2)
    first, second = TimeSharedEngines(own).engines
    gone = asyncio.create_task(collect(first, make_request("a", 2, n=4, max_tokens=100_000)))
    await until_sampled(first, 1)
    gone.cancel()
    assert len(await collect(second, make_request("v", 2, max_tokens=3))) == 1
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_swap_that_fails_is_tried_again() -> None:
    policy, judge = own = sleepers(2)
    first, second = TimeSharedEngines(own).engines
    judge.is_broken = True
    with pytest.raises(RolloutError, match="no memory"):
        await collect(second, make_request("v", 2, max_tokens=3))
    assert len(await collect(first, make_request("a", 2, max_tokens=3))) == 1
    assert policy.num_swaps == 1
    judge.is_broken = False
    assert len(await collect(second, make_request("v", 2, max_tokens=3))) == 1


async def test_all_can_leave_the_devices() -> None:
    """Something else has them, and then the weights of one are updated, before the next call wakes an engine."""
    policy, judge = own = sleepers(2)
    first, second = TimeSharedEngines(own).engines
    await collect(second, make_request("v", 2, max_tokens=3))
    for number in (1, 2):
        await first.sleep(keep_weights=False)
        await second.sleep()
        assert not policy.all_awake
        await first.wake(cache=False)
        await first.update_weights([("w", torch.ones(2))], version=number)
        # All parts of both, as far as they fit next to each other: none until one is needed.
        await first.wake()
        await second.wake()
        assert not policy.all_awake
        assert (policy.weight_version, policy.num_weight_wakes) == (number, number)
        await collect(first, make_request("a", 2, max_tokens=3))
        await collect(second, make_request("v", 2, max_tokens=3))
    assert (policy.num_swaps, judge.num_swaps) == (2, 3)


async def test_real_engines_sample_the_same_in_turns(tied: TinyModel) -> None:
    policy, judge, alone = (HFEngine.from_pretrained(tied.path) for _ in range(3))
    await judge.sleep()
    engines = TimeSharedEngines([policy, judge]).engines
    requests = make_request("a", 5, n=3, max_tokens=12), make_request("v", 9, n=1, max_tokens=12)
    expected = [tokens(await collect(alone, request)) for request in requests]
    for _ in range(2):
        found = await asyncio.gather(*map(collect, engines, requests))
        assert [tokens(answers) for answers in found] == expected
    for engine in (policy, judge, alone):
        await engine.close()
