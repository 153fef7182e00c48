"""Waves of prompts between controllers, under every runtime."""

import asyncio

import pytest
from runtimes import Ctx, Run, inline, over_messages

from gcore_controller import PromptLoader
from gcore_controller.rlhf.prompts import SharedPrompts

ROWS = [f"row {i}" for i in range(23)]


@pytest.fixture(params=[inline, over_messages], ids=["inline", "messages"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def loader_of(ctx: Ctx) -> PromptLoader[str]:
    return PromptLoader(ROWS, seed=1, rank=ctx.rank, world_size=ctx.world_size)


def drawn(sizes: list[int]) -> list[list[tuple[int, str]]]:
    """The prompts of each wave, as one controller alone would have them."""
    alone = PromptLoader(ROWS, seed=1)
    return [alone.take(size) for size in sizes]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_wave_has_the_same_prompts_on_any_controller(run: Run, world_size: int) -> None:
    sizes = [8, 3, 1, 16]

    async def program(ctx: Ctx) -> list[list[tuple[int, str]]]:
        loader = loader_of(ctx)
        prompts = SharedPrompts(loader, ctx.group)
        waves: list[list[tuple[int, str]]] = []
        for wave, size in enumerate(sizes):
            await prompts.open(loader.take(size))
            waves.append([])
            while taken := await prompts.take(1 + (ctx.rank + wave) % 3):
                waves[-1] += taken
                await asyncio.sleep(0.001 * (ctx.rank + 1))
            await ctx.group.barrier()
        return waves

    waves = zip(*run(program, world_size), strict=True)
    assert [sorted(entry for mine in wave for entry in mine) for wave in waves] == drawn(sizes)


def test_the_idle_take_from_the_loaded(run: Run) -> None:
    """Rank 0 takes a prompt, and no more until the others have had all the rest."""
    others_are_done = asyncio.Event()

    async def program(ctx: Ctx) -> list[int]:
        loader = loader_of(ctx)
        prompts = SharedPrompts(loader, ctx.group)
        await prompts.open(loader.take(18))
        mine = [index for index, _ in await prompts.take(1)]
        await ctx.group.barrier()
        if ctx.rank == 0:
            await others_are_done.wait()
            assert await prompts.take(1) == []
        else:
            while taken := await prompts.take(2):
                mine += [index for index, _ in taken]
            others_are_done.set()
        return mine

    loaded, *idle = run(program, 3)
    assert loaded == [0]
    assert sorted(index for mine in idle for index in mine) == list(range(1, 18))


def test_own_prompts_come_first(run: Run) -> None:
    async def program(ctx: Ctx) -> list[int]:
        loader = loader_of(ctx)
        prompts = SharedPrompts(loader, ctx.group)
        await prompts.open(loader.take(12))
        taken = await prompts.take(4)
        await ctx.group.barrier()
        assert await prompts.take(4) == []
        return [index for index, _ in taken]

    assert run(program, 3) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_a_slice_is_taken_in_its_owners_order(run: Run) -> None:
    """Also by others, and in each of several waves, whose slices differ in size."""

    async def program(ctx: Ctx) -> list[list[int]]:
        loader = loader_of(ctx)
        prompts = SharedPrompts(loader, ctx.group)
        waves: list[list[int]] = []
        for size in (7, 4):
            await prompts.open(loader.take(size)[::-1])
            waves.append([])
            if ctx.rank == 1:
                while taken := await prompts.take(1):
                    waves[-1] += [index for index, _ in taken]
            await ctx.group.barrier()
        return waves

    assert run(program, 2)[1] == [[5, 3, 1, 6, 4, 2, 0], [9, 7, 10, 8]]
