"""Collectives, in one process and over messages, and the runtime that runs one program on every controller."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from runtimes import Ctx, Run, run_here, run_over_messages

from gcore_controller import Collectives, InlineCollectives, InlineGroup, run_inline
from gcore_controller.errors import CollectiveMismatchError


@pytest.fixture(params=[run_here, run_over_messages])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
async def test_every_collective(run: Run, world_size: int) -> None:
    async def program(ctx: Ctx) -> None:
        everyone = range(world_size)
        assert ctx.world_size == world_size
        assert await ctx.group.all_gather(ctx.rank) == list(everyone)
        assert await ctx.group.all_reduce(float(ctx.rank)) == sum(everyone)
        for src in everyone:
            said = await ctx.group.broadcast(f"from {ctx.rank}" if ctx.rank == src else None, src=src)
            assert said == f"from {src}"
        sent = [(ctx.rank, to) for to in everyone]
        assert await ctx.group.all_to_all(sent) == [(source, ctx.rank) for source in everyone]
        await ctx.group.barrier()

    assert await run(program, world_size) == [None] * world_size


async def test_results_are_by_rank_and_roles_are_shared() -> None:
    roles: list[str] = []

    async def program(ctx: Ctx) -> int:
        await asyncio.sleep(0.001 * (4 - ctx.rank))
        ctx.roles.append(f"controller {ctx.rank}")
        return ctx.rank**2

    assert await run_inline(program, roles=roles, world_size=4) == [0, 1, 4, 9]
    assert sorted(roles) == [f"controller {rank}" for rank in range(4)]


async def test_collectives_keep_their_order_however_late_a_controller_is(run: Run) -> None:
    """A fast controller's next call never mixes with a slow one's last."""

    async def program(ctx: Ctx) -> list[list[tuple[int, int]]]:
        rounds: list[list[tuple[int, int]]] = []
        for i in range(20):
            for _ in range((ctx.rank * 7 + i) % 5):
                await asyncio.sleep(0)
            rounds.append(await ctx.group.all_gather((i, ctx.rank)))
        return rounds

    expected = [[(i, rank) for rank in range(4)] for i in range(20)]
    assert await run(program, 4) == [expected] * 4


async def test_sums_are_added_in_rank_order(run: Run) -> None:
    """Whoever arrives first: floating-point sums are the same on every controller and in every run."""
    values = [1e16, 1.0, -1e16, 1.0]

    async def program(ctx: Ctx) -> float:
        for _ in range(3 - ctx.rank):
            await asyncio.sleep(0)
        return await ctx.group.all_reduce(values[ctx.rank])

    assert await run(program, 4) == [sum(values)] * 4


async def test_what_is_gathered_belongs_to_the_caller(run: Run) -> None:
    async def program(ctx: Ctx) -> list[int]:
        gathered = await ctx.group.all_gather(ctx.rank)
        gathered.append(99)
        await ctx.group.barrier()
        return gathered

    assert await run(program, 2) == [[0, 1, 99]] * 2


@pytest.mark.parametrize(
    ("ops", "first", "second"),
    [
        (("barrier", "all_gather"), lambda group: group.barrier(), lambda group: group.all_gather(1)),
        (
            ("broadcast from 0", "broadcast from 1"),
            lambda group: group.broadcast(1, src=0),
            lambda group: group.broadcast(1, src=1),
        ),
    ],
    ids=["operation", "source"],
)
async def test_programs_that_go_different_ways(
    run: Run,
    ops: tuple[str, str],
    first: Callable[[Collectives], Awaitable[Any]],
    second: Callable[[Collectives], Awaitable[Any]],
) -> None:
    async def program(ctx: Ctx) -> None:
        await ctx.group.barrier()
        await (second if ctx.rank == 2 else first)(ctx.group)

    called = "collective 1: rank 2 called {1} where another controller called {0};"
    if run is not run_here:
        # Over messages, whoever hears of it first says so.
        called = "collective 1: rank (2 called {1}|[013] called {0}) where another controller called ({0}|{1});"
    with pytest.raises(CollectiveMismatchError, match=called.format(*ops)):
        await asyncio.wait_for(run(program, 4), timeout=60)


class OneOfUsFailedError(Exception):
    pass


@pytest.mark.parametrize("world_size", [1, 4])
async def test_an_error_ends_all_and_surfaces_as_itself(run: Run, world_size: int) -> None:
    ended: list[int] = []

    async def program(ctx: Ctx) -> None:
        try:
            if ctx.rank == world_size - 1:
                await asyncio.sleep(0.01)
                raise OneOfUsFailedError
            await (ctx.group.barrier() if ctx.rank % 2 else asyncio.sleep(60))
        finally:
            ended.append(ctx.rank)

    with pytest.raises(OneOfUsFailedError) as raised:
        await asyncio.wait_for(run(program, world_size), timeout=60)
    assert sorted(ended) == list(range(world_size))
    assert raised.value.__context__ is None or raised.value.__suppress_context__


async def test_cancellation_reaches_every_controller(run: Run) -> None:
    cancelled: list[int] = []

    async def program(ctx: Ctx) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(ctx.rank)
            raise

    task = asyncio.create_task(run(program, 3))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]


async def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="world_size is 0: at least 1 is needed"):
        InlineGroup(0)
    alone = InlineCollectives(InlineGroup(1), 0)
    with pytest.raises(ValueError, match="parts has 2 entries: one for each of 1 controllers is needed"):
        await alone.all_to_all([1, 2])
    assert await alone.all_gather(1) == [1], "a refused call does not count"


async def test_tickets_go_to_one_controller_each(run: Run) -> None:
    async def program(ctx: Ctx) -> list[int]:
        mine: list[int] = []
        for i in range(5):
            await asyncio.sleep(0.001 * ((ctx.rank + i) % 3))
            mine += await ctx.group.take_tickets(ctx.rank + 1)
            assert await ctx.group.take_tickets(1, counter=f"own {ctx.rank}") == range(i, i + 1)
        with pytest.raises(ValueError, match="count is -1: 0 or more is needed"):
            await ctx.group.take_tickets(-1)
        assert await ctx.group.take_tickets(ctx.rank, counter="elsewhere", at=ctx.rank) == range(ctx.rank)
        return mine

    taken = await run(program, 4)
    assert [len(tickets) for tickets in taken] == [5, 10, 15, 20]
    assert sorted(t for tickets in taken for t in tickets) == list(range(50))


async def test_channels_keep_their_own_order(run: Run) -> None:
    """Two tasks of each controller, in the one order or the other, with different collectives."""

    async def program(ctx: Ctx) -> tuple[list[list[int]], list[float]]:
        async def gathers() -> list[list[int]]:
            return [await ctx.group.all_gather(10 * n + ctx.rank) for n in range(3)]

        async def sums() -> list[float]:
            beside = ctx.group.channel("beside")
            return [await beside.all_reduce(n * (ctx.rank + 1)) for n in range(4)]

        if ctx.rank % 2:
            added = asyncio.create_task(sums())
            await asyncio.sleep(0)
            return await gathers(), await added
        gathered = asyncio.create_task(gathers())
        await asyncio.sleep(0)
        added_here = await sums()
        return await gathered, added_here

    for gathered, added in await run(program, 3):
        assert gathered == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
        assert added == [0, 6, 12, 18]


async def test_tickets_below_a_limit(run: Run) -> None:
    """A counter stops there, and goes on behind it under a higher one."""

    async def program(ctx: Ctx) -> list[int]:
        mine: list[int] = []
        for limit in (7, 12):
            while taken := await ctx.group.take_tickets(3, counter="waves", at=1, limit=limit):
                mine += taken
            await ctx.group.barrier()
        return mine

    taken = await run(program, 3)
    assert sorted(ticket for mine in taken for ticket in mine) == list(range(12))
