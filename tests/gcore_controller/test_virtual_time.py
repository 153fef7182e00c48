"""The same programs in simulated time: what they compute is the same, and time is what they sleep."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from gcore_controller import Context, DynamicSampler, run_inline, run_simulated, seconds_by_stage
from gcore_controller.errors import ControllerError, StuckError

Ctx = Context[None]


async def uneven_work(ctx: Ctx) -> tuple[float, dict[str, float]]:
    """Controller r sleeps (r + 1) * 100 s, and all meet; when they met, and what they did until then."""
    with ctx.timer.stage("work"):
        await asyncio.sleep(100.0 * (ctx.rank + 1))
    with ctx.timer.stage("wait"):
        await ctx.group.barrier()
    return ctx.clock(), seconds_by_stage(ctx.timer.drain())


def test_time_is_what_programs_sleep() -> None:
    began = time.monotonic()
    results = run_simulated(uneven_work, roles=None, world_size=4)
    assert time.monotonic() - began < 50
    for rank, (met, seconds) in enumerate(results):
        assert met == pytest.approx(400, abs=1e-6)
        assert seconds["work"] == pytest.approx(100 * (rank + 1), abs=1e-6)
        assert seconds.get("wait", 0.0) == pytest.approx(100 * (3 - rank), abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_are_those_of_the_inline_runtime(world_size: int) -> None:
    @dataclass(frozen=True)
    class Group:
        prompt_index: int
        oldest_version: int | None = None
        scores: tuple[float, ...] = ()
        has_signal: bool = True

        def state(self) -> dict[str, object]:
            raise AssertionError("nothing is saved")

    async def program(ctx: Ctx) -> tuple[list[int], list[str]]:
        drawn = 0

        async def wave(count: int) -> list[Group]:
            nonlocal drawn
            indices = [t for t in range(drawn, drawn + count) if t % ctx.world_size == ctx.rank]
            drawn += count
            await asyncio.sleep(0.001 * (ctx.rank + 1))
            return [Group(t) for t in indices if t % 3]

        batch = await DynamicSampler[Group](group=ctx.group, max_waves=9).collect(20, wave)
        gathered = await ctx.group.all_gather(f"{ctx.rank} has {len(batch.groups)}")
        return [g.prompt_index for g in batch.groups], gathered

    expected = asyncio.run(run_inline(program, roles=None, world_size=world_size))
    assert run_simulated(program, roles=None, world_size=world_size) == expected
    assert sum(len(indices) for indices, _ in expected) == 20


def test_timeouts_and_order_are_of_simulated_time() -> None:
    async def program(ctx: Ctx) -> list[str]:
        log: list[str] = []

        async def say(after_s: float, what: str) -> None:
            await asyncio.sleep(after_s)
            log.append(f"{what} at {ctx.clock():g}")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say(3600 * 30, "late"))
            tasks.create_task(say(5, "early"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(1e9), timeout=60)
            log.append(f"given up at {ctx.clock():g}")
        return log

    assert run_simulated(program, roles=None) == [
        ["early at 5", "given up at 60", "late at 108000"]
    ]


def test_a_program_without_events_is_stuck() -> None:
    ended: list[int] = []

    async def program(ctx: Ctx) -> None:
        try:
            await asyncio.sleep(2)
            if ctx.rank:
                await ctx.group.barrier()
            else:
                await asyncio.get_running_loop().create_future()
        finally:
            ended.append(ctx.rank)

    with pytest.raises(
        StuckError, match=r"after 2\.000 simulated seconds every controller waits for something"
    ):
        run_simulated(program, roles=None, world_size=3)
    assert sorted(ended) == [0, 1, 2]


async def slow_in_places(ctx: Ctx) -> None:
    if ctx.rank == 1:
        with ctx.timer.stage("gen"):
            await asyncio.sleep(10)
    await ctx.group.barrier()


def test_deadline_names_where_everybody_was() -> None:
    with pytest.raises(
        ControllerError, match="not done after 5 s: controller 0 in no stage, controller 1 in gen"
    ):
        run_simulated(slow_in_places, roles=None, world_size=2, timeout_s=5)
    assert run_simulated(slow_in_places, roles=None, world_size=2, timeout_s=11) == [None, None]


async def test_deadline_in_real_time() -> None:
    async def program(_: Ctx) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("while it was ended")

    with pytest.raises(ControllerError, match=r"not done after 0\.02 s: controller 0 in no stage"):
        await run_inline(program, roles=None, timeout_s=0.02)
    assert await run_inline(slow_in_places, roles=None, timeout_s=60) == [None]
