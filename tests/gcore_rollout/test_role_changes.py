"""An actor that changes its role: each engine has a process, one of them is awake, and nothing is left at the end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_oracles import TinyModel, collect, make_request
from fake_engine import FakeEngine
from ray import cloudpickle
from ray_cluster import ray_cluster

from gcore_rollout import (
    EngineDiedError,
    EngineHandle,
    EngineReplicas,
    HFEngine,
    InstrumentedEngine,
    LendingEngines,
    RayEngine,
    VLLMEngine,
    WeightReferences,
    engine_kind,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
MAKE: dict[str, Any] = {
    "hf": HFEngine.from_pretrained,
    "vllm": partial(VLLMEngine.from_pretrained, kv_cache_memory_bytes=64 << 20),
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportPrivateImportUsage]
    with ray_cluster("here"):
        yield


@asynccontextmanager
async def actor(kind: str, model: TinyModel, *, keeps_asleep: bool) -> AsyncGenerator[EngineHandle]:
    """An actor of the policy, ``max_num_seqs`` 4, that can be a judge, ``max_num_seqs`` 2."""
    make = partial(MAKE[kind], model.path)
    handle = EngineHandle.start(
        partial(make, max_num_seqs=4),
        num_cpus=0,
        num_threads=1,
        changes_role=True,
        keeps_asleep=keeps_asleep,
        preload=engine_kind(kind).preload,
    )
    yield handle.lendable("engine", {"judge": partial(make, max_num_seqs=2)})
    await handle.end()


def status_of(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and status_of(pid, "State") != "Z"


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(20):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.05)


async def actor_pid(handle: EngineHandle) -> int:
    return await handle.actor.__ray_call__.remote(lambda _: os.getpid())


async def engine_types(handle: EngineHandle) -> set[str]:
    """The classes of engines that are objects of the actor's own process."""

    def find(_: object) -> set[str]:
        import gc

        names = {type(thing).__name__ for thing in gc.get_objects()}
        return names & {"HFEngine", "VLLMEngine", "LLMEngine"}

    return await handle.actor.__ray_call__.remote(find)


async def tokens_of(engine: Any) -> list[list[int]]:
    samples = await collect(engine, make_request("r", 2, n=2, max_tokens=4))
    return [samples["r", index].token_ids.tolist() for index in range(2)]


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_a_change_of_role_leaves_one_process_with_an_engine(
    kind: str, tied: TinyModel
) -> None:
    """The one before has ended, and the actor's own process has never had one."""
    async with actor(kind, tied, keeps_asleep=False) as home:
        policy = await RayEngine.connect(home)
        expected = await tokens_of(policy)
        judge = await RayEngine.connect(home.lent("judge"))
        owner = await actor_pid(home)
        assert len({owner, policy.pid, judge.pid}) == 3
        await until_gone(policy.pid)
        assert await tokens_of(judge) == expected
        assert await engine_types(home) == set()
        with pytest.raises(EngineDiedError, match="was restarted: connect again"):
            await policy.pause()
        back = await RayEngine.connect(home)
        await until_gone(judge.pid)
        assert await tokens_of(back) == expected
        for client in (policy, judge, back):
            await client.close()
    await until_gone(owner, back.pid)


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_engines_of_both_roles_sleep_in_turns(kind: str, tied: TinyModel) -> None:
    """Each keeps its process, also if its clients had paused it. One that is killed asleep is made again."""
    async with actor(kind, tied, keeps_asleep=True) as home:
        policy = await RayEngine.connect(home)
        expected = await tokens_of(policy)
        await policy.pause()
        judge = await RayEngine.connect(home.lent("judge"))
        assert await tokens_of(judge) == expected
        back = await RayEngine.connect(home)
        assert back.pid == policy.pid
        assert await tokens_of(back) == expected
        again = await RayEngine.connect(home.lent("judge"))
        assert again.pid == judge.pid
        assert again.making_s < judge.making_s / 2, "waking, and starting"

        os.kill(policy.pid, signal.SIGKILL)
        await until_gone(policy.pid)
        assert await tokens_of(again) == expected, "the awake one works on"
        back = await RayEngine.connect(home)
        assert back.pid not in (policy.pid, judge.pid)
        assert await tokens_of(back) == expected

        owner = await actor_pid(home)
        assert is_alive(judge.pid), "asleep"
        os.kill(owner, signal.SIGKILL)
        await until_gone(owner, back.pid, judge.pid)
        # Ray restarts the actor.
        back = await RayEngine.connect(home)
        assert await tokens_of(back) == expected
    await until_gone(back.pid)


async def test_an_engine_of_no_role_ends_those_that_sleep(tied: TinyModel) -> None:
    async with actor("hf", tied, keeps_asleep=True) as home:
        policy = await RayEngine.connect(home)
        judge = await RayEngine.connect(home.lent("judge"))
        assert is_alive(policy.pid)
        other = await RayEngine.connect(home.becoming(partial(MAKE["hf"], tied.path)))
        await until_gone(policy.pid, judge.pid)
        assert len(await tokens_of(other)) == 2
    await until_gone(other.pid)


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_an_engine_that_slept_through_updates_wakes_with_the_newest_weights(
    kind: str, tied: TinyModel
) -> None:
    """One of two engines of the policy is lent to the judge while new weights arrive, and returns."""
    async with actor(kind, tied, keeps_asleep=True) as home:
        lent = InstrumentedEngine(await RayEngine.connect(home), name="engine 1")
        loans_s: list[float] = []

        async def lend(name: str, giver: int, taker: int) -> Any:
            del giver
            role = ["engine", "judge"][taker]
            return InstrumentedEngine(await RayEngine.connect(home.lent(role)), name=name)

        here = HFEngine.from_pretrained(tied.path)
        pools = [EngineReplicas[Any, Any]([here, lent]), EngineReplicas[Any, Any]([FakeEngine()])]
        lending = LendingEngines(
            pools,
            lend=lend,
            choose_loan=lambda *_, **__: None,
            report_loan=loans_s.append,
            announce=pytest.fail,
        )
        policy, _ = lending.engines
        old = await tokens_of(lent)
        for version, weights in ((1, tied.new), (2, tied.old)):
            lending.arrange([1, 2])
            await lending.settle()
            references = WeightReferences.put(weights.state_dict().items())
            await policy.update_weights(references, version=version)
            lending.arrange([2, 1])
            await lending.settle()
            _, back = pools[0].engines
            assert back.weight_version == policy.weight_version == version
            assert (await tokens_of(back) == old) == (weights is tied.old)
        start_s, *rest_s = loans_s
        assert min(rest_s) < start_s, "one start, three times awake"
        for engine in lending.engines:
            await engine.close()
