"""Engines of several models that help each other: with real engines, the samples of engines that are left alone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engine_oracles import TinyModel, collect, make_request, until

from gcore_rollout import (
    Completion,
    Engine,
    EngineDiedError,
    EngineReplicas,
    HFEngine,
    InstrumentedEngine,
    LendingEngines,
    Request,
)

NUM_SLOTS = 2
ENDLESS: dict[str, Any] = {"eos_token_ids": []}
"""Samples end at max_tokens alone."""


class NamedEngine(InstrumentedEngine[Request, Completion]):
    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name=name)
        self.num_finished = 0

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        async for completion in super().generate(requests):
            self.num_finished += completion.finish_reason != "abort"
            yield completion


def make_engine(model: TinyModel, name: str, **options: Any) -> NamedEngine:
    return NamedEngine(
        HFEngine.from_pretrained(model.path, max_num_seqs=NUM_SLOTS, **options), name
    )


@dataclass
class Script:
    """A rule that lends whenever it may, but so many times at most."""

    num_loans: int
    at_a_time: int = 1
    arriving: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    seen: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    def observe(
        self,
        now_s: float,
        *,
        idle: Sequence[int],
        waiting: Sequence[int],
        arriving: Sequence[int],
        **_: object,
    ) -> tuple[int, int, int] | None:
        del now_s
        self.arriving.append(tuple(arriving))
        pairs = (
            (g, t)
            for g in range(len(idle))
            for t in range(len(idle))
            if g != t and idle[g] and waiting[t]
        )
        pair = next(pairs, None)
        if pair is None or len(self.seen) == self.num_loans:
            return None
        giver, taker = pair
        count = min(self.at_a_time, idle[giver], self.num_loans - len(self.seen))
        self.seen += [giver] * count
        return giver, taker, count

    def lent(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Cluster:
    """A policy, which has new weights, and judges, with engines that are made again when they are lent."""

    def __init__(
        self, model: TinyModel, counts: tuple[int, ...], num_loans: int, **options: Any
    ) -> None:
        self.model, self.options = model, options
        self.engines: dict[str, NamedEngine] = {}
        self.lent: list[tuple[str, int, int]] = []
        self.lines: list[str] = []
        self.before_lending: Callable[[], Awaitable[None]] | None = None
        self.rule = Script(num_loans)
        roles = ("engine", "judge", "style")[: len(counts)]
        self.pools = [
            EngineReplicas(
                [self.make(f"{role} {i}") for i in range(n)],
                restart=self.restart,
                announce=self.lines.append,
            )
            for role, n in zip(roles, counts, strict=True)
        ]
        self.all = LendingEngines(
            self.pools,
            lend=self.lend,
            choose_loan=self.rule.observe,
            report_loan=self.rule.lent,
            announce=self.lines.append,
        )
        self.policy, self.judge, *_ = self.all.engines

    def make(self, name: str) -> NamedEngine:
        self.engines[name] = make_engine(self.model, name, **self.options)
        return self.engines[name]

    async def lend(self, name: str, giver: int, taker: int) -> Engine:
        if self.before_lending is not None:
            await self.before_lending()
        self.lent.append((name, giver, taker))
        await self.engines[name].close()
        return self.make(name)

    async def restart(self) -> Engine:
        return self.make("replacement")

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.all.engines))


def requests_of(count: int, prefix: str = "r", *, n: int = 2) -> list[Request]:
    return [
        make_request(f"{prefix}{i}", 3 + i % 5, n=n, seed=i, max_tokens=10 + i % 20)
        for i in range(count)
    ]


def tokens(
    found: dict[tuple[str, int], Completion],
) -> dict[tuple[str, int], tuple[list[int], str]]:
    return {key: (c.token_ids.tolist(), c.finish_reason) for key, c in found.items()}


async def alone(
    model: TinyModel, requests: list[Request], *, is_new: bool, **options: Any
) -> dict[tuple[str, int], Any]:
    engine: Engine = HFEngine.from_pretrained(model.path, **options)
    if is_new:
        await engine.update_weights(model.new.state_dict().items(), version=1)
    return tokens(await collect(engine, *requests))


async def started(
    engines: list[NamedEngine], requests: list[Request]
) -> tuple[EngineReplicas[Request, Completion], asyncio.Task[dict[tuple[str, int], Completion]]]:
    """Engines as one, and what collects the samples of requests of which some are running now."""
    replicas = EngineReplicas(engines)
    running = asyncio.create_task(collect(replicas, *requests))
    await until(lambda: replicas.stats().num_running)
    return replicas, running


async def test_added_replica_takes_over_what_waits(tied: TinyModel) -> None:
    first, second = (make_engine(tied, f"{i}") for i in range(2))
    requests = requests_of(16)
    replicas, running = await started([first], requests)
    await replicas.add(second)
    assert tokens(await running) == await alone(tied, requests, is_new=False)
    assert first.num_finished + second.num_finished == 32 == replicas.num_finished
    assert second.num_finished > 10
    await replicas.close()


async def test_a_request_that_is_being_moved_can_be_aborted(tied: TinyModel) -> None:
    first, second = (make_engine(tied, f"{i}") for i in range(2))
    requests = requests_of(16)
    replicas, running = await started([first], requests)
    await asyncio.gather(replicas.add(second), replicas.abort([f"r{i}" for i in range(8, 16)]))
    found = await running
    assert len(found) == 32
    expected = await alone(tied, requests[:8], is_new=False)
    assert {key: c for key, c in tokens(found).items() if key in expected} == expected
    assert {c.finish_reason for key, c in found.items() if key not in expected} == {"abort"}
    await replicas.close()


async def test_idle_engines_help_the_other_model_with_its_weights(tied: TinyModel) -> None:
    cluster = Cluster(tied, (1, 3), num_loans=2)
    await cluster.policy.update_weights(tied.new.state_dict().items(), version=1)
    requests = requests_of(24)
    found = await collect(cluster.policy, *requests)
    assert tokens(found) == await alone(tied, requests, is_new=True)
    assert {int(v) for c in found.values() for v in c.weight_versions} == {1}
    assert cluster.lent == [("judge 2", 1, 0), ("judge 1", 1, 0)]
    assert len(cluster.rule.seconds) == 2
    assert [len(pool.engines) for pool in cluster.pools] == [3, 1]
    assert min(cluster.engines[f"judge {i}"].num_finished for i in (1, 2)) > 0
    # And back, with the judge's own weights.
    cluster.rule.num_loans = 4
    requests = requests_of(24, "j")
    assert tokens(await collect(cluster.judge, *requests)) == await alone(
        tied, requests, is_new=False
    )
    assert cluster.rule.seen == [1, 1, 0, 0]
    assert [len(pool.engines) for pool in cluster.pools] == [1, 3]
    await cluster.close()
    assert cluster.lines == []


async def test_an_engine_that_was_lent_before_is_lent_first(tied: TinyModel) -> None:
    """It may have an engine of that model asleep."""
    cluster = Cluster(tied, (3, 1), num_loans=1)
    await collect(cluster.judge, *requests_of(24, "j"))
    cluster.all.arrange([3, 1])
    await cluster.all.settle()
    await cluster.pools[0].add(cluster.make("engine 3"))
    cluster.rule.num_loans = 2
    await collect(cluster.judge, *requests_of(24, "k"))
    lent = ("engine 2", 0, 1)
    assert cluster.lent == [lent, ("engine 2", 1, 0), lent]
    await cluster.close()


async def test_several_engines_are_on_their_way_at_a_time(tied: TinyModel) -> None:
    cluster = Cluster(tied, (1, 4), num_loans=3)
    cluster.rule.at_a_time = 2
    on_their_way, three = 0, asyncio.Event()

    async def wait() -> None:
        nonlocal on_their_way
        on_their_way += 1
        if on_their_way == 3:
            three.set()
        await three.wait()

    cluster.before_lending = wait
    requests = requests_of(24)
    assert tokens(await collect(cluster.policy, *requests)) == await alone(
        tied, requests, is_new=False
    )
    await cluster.all.settle()
    assert cluster.rule.seen == [1, 1, 1]
    assert {(0, 0), (2, 0)} <= set(cluster.rule.arriving), (
        "the rule is asked while two are on their way"
    )
    assert [len(pool.engines) for pool in cluster.pools] == [4, 1]
    assert min(cluster.engines[f"judge {i}"].num_finished for i in (1, 2, 3)) > 0
    await cluster.close()
    assert cluster.lines == []


async def test_the_last_samples_end_on_few_engines(tied: TinyModel) -> None:
    """Each of three engines has one long sample left: two are lent, and the third has places for two of them."""
    cluster = Cluster(tied, (3, 1), num_loans=9, **ENDLESS)
    short = [make_request(f"s{i}", 3, seed=i, max_tokens=60) for i in range(3 * NUM_SLOTS)]
    long = [make_request(f"l{i}", 3, seed=i, max_tokens=450) for i in range(3)]
    expected = await alone(tied, [*short, *long], is_new=False, **ENDLESS)
    queue = requests_of(24, "j")
    running = asyncio.create_task(collect(cluster.policy, *short, *long))
    await until(lambda: cluster.pools[0].num_finished >= len(short))
    assert cluster.lent == [], "the judge has no queue"
    judging = asyncio.create_task(collect(cluster.judge, *queue))
    await until(lambda: cluster.lent)
    assert cluster.pools[0].num_finished < len(expected), "it was lent while it had work"
    assert tokens(await running) == expected
    assert tokens(await judging) == await alone(tied, queue, is_new=False, **ENDLESS)
    assert {(giver, taker) for _, giver, taker in cluster.lent} == {(0, 1)}
    await cluster.close()
    assert cluster.lines == []


async def test_replicas_that_can_be_spared(tied: TinyModel) -> None:
    engines = [make_engine(tied, f"{i}", **ENDLESS) for i in range(3)]
    replicas = EngineReplicas(engines)
    assert replicas.spare() == [engines[2], engines[1]], "one stays"
    long = [make_request(f"l{i}", 3, seed=i, max_tokens=400) for i in range(3)]
    running = asyncio.create_task(collect(replicas, *long))
    await until(lambda: all(engine.stats().num_running == 1 for engine in engines))
    assert replicas.spare() == [], "none was seen to run two samples"
    await replicas.abort()
    await running
    others = [replace(request, request_id=f"other {request.request_id}") for request in long]
    more = asyncio.create_task(collect(replicas, *long, *others))
    await until(lambda: all(engine.stats().num_running == NUM_SLOTS for engine in engines))
    assert replicas.spare() == [], "all places are taken"
    await replicas.abort([request.request_id for request in long])
    await until(lambda: all(engine.stats().num_running == 1 for engine in engines))
    assert len(replicas.spare()) == 1, (
        "two of three samples have places on two engines, the third on one of them"
    )
    await replicas.abort()
    await more
    await replicas.close()


async def test_sleep_waits_for_an_engine_on_its_way(tied: TinyModel) -> None:
    cluster = Cluster(tied, (1, 2), num_loans=1)
    may_lend, is_lending = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_lending.set()
        await may_lend.wait()

    cluster.before_lending = wait
    running = asyncio.create_task(collect(cluster.policy, *requests_of(40)))
    await is_lending.wait()
    await cluster.policy.abort()
    sleeping = asyncio.gather(cluster.policy.sleep(), cluster.judge.sleep())
    await asyncio.sleep(0.2)
    assert not sleeping.done(), "its memory would be taken by what comes after the sleep"
    may_lend.set()
    await sleeping
    await running
    assert [len(pool.engines) for pool in cluster.pools] == [2, 1]
    await asyncio.gather(cluster.policy.wake(), cluster.judge.wake())
    requests = requests_of(8)
    assert tokens(await collect(cluster.policy, *requests)) == await alone(
        tied, requests, is_new=False
    )
    await cluster.close()


async def test_engines_move_while_they_work(tied: TinyModel) -> None:
    """Two of three at once; what they leave unfinished the third continues, and every sample comes once."""
    cluster = Cluster(tied, (3, 1), num_loans=0)
    requests = requests_of(24)
    running = asyncio.create_task(collect(cluster.policy, *requests))
    await until(lambda: cluster.pools[0].stats().num_running == 3 * NUM_SLOTS)
    cluster.all.arrange([1, 3])
    assert tokens(await running) == await alone(tied, requests, is_new=False)
    await until(lambda: len(cluster.pools[1].engines) == 3)
    assert sorted(cluster.lent) == [("engine 1", 0, 1), ("engine 2", 0, 1)]
    requests = requests_of(24, "j")
    assert tokens(await collect(cluster.judge, *requests)) == await alone(
        tied, requests, is_new=False
    )
    assert min(cluster.engines[f"engine {i}"].num_finished for i in (1, 2)) > 0
    await cluster.close()
    assert cluster.lines == []


async def test_engines_that_sleep_move_when_all_are_awake(tied: TinyModel) -> None:
    """To the new weights of the other model; the later of two wishes counts."""
    cluster = Cluster(tied, (1, 3), num_loans=0)
    await asyncio.gather(cluster.policy.sleep(), cluster.judge.sleep())
    cluster.all.arrange([2, 2])
    cluster.all.arrange([3, 1])
    await cluster.policy.wake(cache=False)
    await cluster.policy.update_weights(tied.new.state_dict().items(), version=1)
    await cluster.judge.wake()
    await asyncio.sleep(0.1)
    assert cluster.lent == []
    await cluster.policy.wake()
    requests = requests_of(24)
    assert tokens(await collect(cluster.policy, *requests)) == await alone(
        tied, requests, is_new=True
    )
    await cluster.all.settle()
    assert sorted(cluster.lent) == [("judge 1", 1, 0), ("judge 2", 1, 0)]
    assert [len(pool.engines) for pool in cluster.pools] == [3, 1]
    await cluster.close()


async def test_engines_of_three_models_are_arranged(tied: TinyModel) -> None:
    """Two models give to a third one, which then gives back to one of them, while the policy samples."""
    cluster = Cluster(tied, (3, 2, 1), num_loans=0)
    requests = requests_of(24)
    running = asyncio.create_task(collect(cluster.policy, *requests))
    await until(lambda: cluster.pools[0].stats().num_running == 3 * NUM_SLOTS)
    cluster.all.arrange([1, 1, 4])
    cluster.all.arrange([2, 1, 3])
    assert tokens(await running) == await alone(tied, requests, is_new=False)
    await cluster.all.settle()
    assert [len(pool.engines) for pool in cluster.pools] == [2, 1, 3]
    assert sorted(cluster.lent[:3]) == [("engine 1", 0, 2), ("engine 2", 0, 2), ("judge 1", 1, 2)]
    [(_, giver, taker)] = cluster.lent[3:]
    assert (giver, taker) == (2, 0)
    for number, engine in enumerate(cluster.all.engines):
        requests = requests_of(12, f"of model {number} ")
        assert tokens(await collect(engine, *requests)) == await alone(tied, requests, is_new=False)
    await cluster.close()
    assert cluster.lines == []


async def test_idle_engines_of_two_models_help_a_third(tied: TinyModel) -> None:
    cluster = Cluster(tied, (2, 2, 1), num_loans=2)
    requests = requests_of(24)
    assert tokens(await collect(cluster.all.engines[2], *requests)) == await alone(
        tied, requests, is_new=False
    )
    assert cluster.lent == [("engine 1", 0, 2), ("judge 1", 1, 2)]
    assert [len(pool.engines) for pool in cluster.pools] == [1, 1, 3]
    # After the call they are taken back.
    assert not cluster.all.is_sampling
    cluster.all.arrange([2, 2, 1])
    await cluster.all.settle()
    assert [len(pool.engines) for pool in cluster.pools] == [2, 2, 1]
    await cluster.close()


async def test_an_engine_of_each_model_stays(tied: TinyModel) -> None:
    cluster = Cluster(tied, (2, 1), num_loans=0)
    cluster.all.arrange([0, 3])
    await cluster.all.settle()
    assert [len(pool.engines) for pool in cluster.pools] == [1, 2]
    await cluster.close()


async def test_engine_that_cannot_be_lent_returns(tied: TinyModel) -> None:
    cluster = Cluster(tied, (1, 2), num_loans=3)

    async def fail() -> None:
        raise MemoryError("the model does not fit")

    cluster.before_lending = fail
    requests = requests_of(24)
    assert tokens(await collect(cluster.policy, *requests)) == await alone(
        tied, requests, is_new=False
    )
    assert cluster.rule.seen == [1], "once"
    assert cluster.lines == [
        "judge 1 could not be lent, and no more engines are: MemoryError('the model does not fit')"
    ]
    await until(lambda: len(cluster.pools[1].engines) == 2)
    assert [len(pool.engines) for pool in cluster.pools] == [1, 2]
    await cluster.close()


@pytest.mark.parametrize(
    "error", [EngineDiedError("it was killed"), ValueError("it is not one of the replicas")]
)
async def test_engine_that_dies_before_it_leaves_is_not_lent(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cluster = Cluster(tied, (1, 3), num_loans=2)
    remove = cluster.pools[1].remove
    removed: list[Engine] = []

    async def fail_once(engine: Engine, *, drain: bool = True) -> None:
        removed.append(engine)
        if len(removed) == 1:
            raise error
        await remove(engine, drain=drain)

    monkeypatch.setattr(cluster.pools[1], "remove", fail_once)
    requests = requests_of(24)
    assert tokens(await collect(cluster.policy, *requests)) == await alone(
        tied, requests, is_new=False
    )
    assert len(cluster.rule.seconds) == 1, "the other loan of the rule"
    assert ("replacement" in cluster.engines) == isinstance(error, EngineDiedError)
    await cluster.close()
    assert cluster.lines == []


async def test_nothing_is_lent_while_nothing_samples(tied: TinyModel) -> None:
    cluster = Cluster(tied, (2, 2), num_loans=9)
    await collect(cluster.policy, make_request("a", 3, max_tokens=4))
    await asyncio.sleep(0.2)
    assert cluster.rule.seen == []
    with pytest.raises(ValueError, match="pools has 1 models; expected at least 2"):
        LendingEngines(
            cluster.pools[:1],
            lend=cluster.lend,
            choose_loan=cluster.rule.observe,
            report_loan=cluster.rule.lent,
            announce=cluster.lines.append,
        )
    await cluster.close()
