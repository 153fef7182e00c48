import asyncio

import pytest

from gcore_controller import Context, InlineGroup, run_inline
from gcore_controller.errors import CollectiveMismatchError


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_give_every_controller_the_same(world_size: int) -> None:
    async def program(ctx: Context[str]) -> tuple[list[int], float, str, list[str]]:
        assert ctx.roles == "services"
        # Late ranks first, so that arrival order differs from rank order.
        for _ in range(ctx.world_size - ctx.rank):
            await asyncio.sleep(0)
        gathered = await ctx.group.all_gather(ctx.rank * 10)
        total = await ctx.group.all_reduce(0.5 + ctx.rank)
        word = await ctx.group.broadcast("from one" if ctx.rank == world_size - 1 else None, src=world_size - 1)
        received = await ctx.group.all_to_all([f"{ctx.rank}->{to}" for to in range(world_size)])
        await ctx.group.barrier()
        return gathered, total, word, received

    results = asyncio.run(run_inline(program, roles="services", world_size=world_size))
    for rank, (gathered, total, word, received) in enumerate(results):
        assert gathered == [10 * r for r in range(world_size)]
        assert total == sum(0.5 + r for r in range(world_size))
        assert word == "from one"
        assert received == [f"{r}->{rank}" for r in range(world_size)]


def test_objects_pass_by_reference() -> None:
    payload = bytearray(1)

    async def program(ctx: Context[None]) -> bool:
        return all(part is payload for part in await ctx.group.all_gather(payload))

    assert asyncio.run(run_inline(program, roles=None, world_size=3)) == [True] * 3


def test_different_collectives_are_an_error_that_names_both() -> None:
    async def program(ctx: Context[None]) -> None:
        if ctx.rank == 0:
            await ctx.group.barrier()
        else:
            await ctx.group.all_gather(1)

    with pytest.raises(CollectiveMismatchError, match=r"rank 1 called all_gather .* called barrier"):
        asyncio.run(run_inline(program, roles=None, world_size=2))


def test_one_controllers_error_cancels_the_others_and_surfaces_as_itself() -> None:
    cancelled: list[int] = []

    async def program(ctx: Context[None]) -> None:
        if ctx.rank == 1:
            raise LookupError("gone")
        try:
            await ctx.group.barrier()
        except asyncio.CancelledError:
            cancelled.append(ctx.rank)
            raise

    with pytest.raises(LookupError, match="gone"):
        asyncio.run(run_inline(program, roles=None, world_size=3))
    assert sorted(cancelled) == [0, 2]


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        InlineGroup(0)

    async def program(ctx: Context[None]) -> None:
        await ctx.group.all_to_all([1, 2, 3])

    with pytest.raises(ValueError, match="parts has 3 entries: one for each of 2 controllers"):
        asyncio.run(run_inline(program, roles=None, world_size=2))
