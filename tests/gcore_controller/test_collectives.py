"""Collectives, and the runtime that runs one program on every controller."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gcore_controller import Collectives, Context, InlineCollectives, InlineGroup, run_inline
from gcore_controller.errors import CollectiveMismatchError

Ctx = Context[list[str]]


async def run(program: Callable[[Ctx], Awaitable[Any]], world_size: int) -> list[Any]:
    return await run_inline(program, roles=[], world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
async def test_every_collective(world_size: int) -> None:
    async def program(ctx: Ctx) -> None:
        everyone = range(world_size)
        assert ctx.world_size == world_size
        assert await ctx.group.all_gather(ctx.rank) == list(everyone)
        assert await ctx.group.all_reduce(float(ctx.rank)) == sum(everyone)
        last = world_size - 1
        assert await ctx.group.broadcast(f"from {ctx.rank}" if ctx.rank == last else None, src=last) == f"from {last}"
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


async def test_collectives_keep_their_order_however_late_a_controller_is() -> None:
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


async def test_sums_are_added_in_rank_order() -> None:
    """Whoever arrives first: floating-point sums are the same on every controller and in every run."""
    values = [1e16, 1.0, -1e16, 1.0]

    async def program(ctx: Ctx) -> float:
        for _ in range(3 - ctx.rank):
            await asyncio.sleep(0)
        return await ctx.group.all_reduce(values[ctx.rank])

    assert await run(program, 4) == [sum(values)] * 4


async def test_what_is_gathered_belongs_to_the_caller() -> None:
    async def program(ctx: Ctx) -> list[int]:
        gathered = await ctx.group.all_gather(ctx.rank)
        gathered.append(99)
        await ctx.group.barrier()
        return gathered

    assert await run(program, 2) == [[0, 1, 99]] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda group: group.barrier(), lambda group: group.all_gather(1)),
        (lambda group: group.broadcast(1, src=0), lambda group: group.broadcast(1, src=1)),
    ],
    ids=["operation", "source"],
)
async def test_programs_that_go_different_ways(
    first: Callable[[Collectives], Awaitable[Any]], second: Callable[[Collectives], Awaitable[Any]]
) -> None:
    async def program(ctx: Ctx) -> None:
        await ctx.group.barrier()
        await (second if ctx.rank == 2 else first)(ctx.group)

    with pytest.raises(
        CollectiveMismatchError, match=r"collective 1: rank 2 called .* where another controller called"
    ):
        await asyncio.wait_for(run(program, 4), timeout=5)


class OneOfUsFailedError(Exception):
    pass


@pytest.mark.parametrize("world_size", [1, 4])
async def test_an_error_ends_all_and_surfaces_as_itself(world_size: int) -> None:
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
        await asyncio.wait_for(run(program, world_size), timeout=5)
    assert sorted(ended) == list(range(world_size))
    assert raised.value.__context__ is None or raised.value.__suppress_context__


async def test_cancellation_reaches_every_controller() -> None:
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
