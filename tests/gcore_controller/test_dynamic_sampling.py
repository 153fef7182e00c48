import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore_controller import Context, DynamicSampler, Harvest, run_inline
from gcore_controller.prompts import PromptLoader


@dataclass(frozen=True)
class _Group:
    ticket: int
    step: int


Step = tuple[list[int], Harvest[_Group]]


def _sample_steps(accepts: set[int], *, world_size: int, quota: int, steps: int, max_waves: int) -> list[Step]:
    """Each step's chosen tickets, and the harvest as rank 0 saw it; prompts whose row is in ``accepts`` have signal."""

    async def program(ctx: Context[None]) -> list[Harvest[_Group]]:
        loader = PromptLoader(range(64), seed=1, rank=ctx.rank, world_size=ctx.world_size)
        sampler: DynamicSampler[_Group] = DynamicSampler(group=ctx.group, max_waves=max_waves)
        harvests: list[Harvest[_Group]] = []
        for step in range(steps):

            async def wave(count: int, step: int = step) -> list[_Group]:
                # The last rank is the fastest.
                for _ in range(ctx.world_size - ctx.rank):
                    await asyncio.sleep(0)
                return [_Group(ticket, step) for ticket, row in loader.take(count) if row in accepts]

            harvests.append(await sampler.harvest(quota, wave))
        return harvests

    by_rank = asyncio.run(run_inline(program, roles=None, world_size=world_size))
    return [
        (sorted(g.ticket for h in harvests for g in h.groups), harvests[0]) for harvests in zip(*by_rank, strict=True)
    ]


@settings(max_examples=40)
@given(
    accepts=st.sets(st.integers(0, 63), min_size=8),
    quota=st.integers(1, 24),
    steps=st.integers(1, 4),
    max_waves=st.integers(1, 20),
)
def test_the_same_groups_for_any_number_of_controllers(
    accepts: set[int], quota: int, steps: int, max_waves: int
) -> None:
    alone = _sample_steps(accepts, world_size=1, quota=quota, steps=steps, max_waves=max_waves)
    used: set[int] = set()
    for tickets, harvest in alone:
        assert harvest.num_groups == len(tickets) <= quota
        assert len(tickets) == quota or harvest.num_waves == max_waves
        assert not used & set(tickets)
        used |= set(tickets)
    for world_size in (2, 4, 8):
        spread = _sample_steps(accepts, world_size=world_size, quota=quota, steps=steps, max_waves=max_waves)
        assert [tickets for tickets, _ in spread] == [tickets for tickets, _ in alone]
        assert [h.num_sampled for _, h in spread] == [h.num_sampled for _, h in alone]


def test_surplus_is_used_first_and_the_oldest_come_first() -> None:
    [(first, _), (second, harvest)] = _sample_steps(set(range(64)), world_size=1, quota=5, steps=2, max_waves=3)
    assert first == [0, 1, 2, 3, 4]
    assert second == [5, 6, 7, 8, 9]
    # A wave is eight prompts: three were left over, and one more wave gives the other two.
    assert [g.step for g in harvest.groups] == [0, 0, 0, 1, 1]
    assert harvest.num_waves == 1


def test_no_signal_at_all_ends_at_the_cap_with_nothing() -> None:
    [(tickets, harvest)] = _sample_steps(set(), world_size=2, quota=4, steps=1, max_waves=3)
    assert tickets == []
    assert (harvest.num_groups, harvest.num_kept, harvest.num_waves) == (0, 0, 3)
    assert harvest.num_sampled == 3 * 8


def test_state_round_trip() -> None:
    async def program(ctx: Context[None]) -> None:
        loader = PromptLoader(range(64), seed=1)
        sampler: DynamicSampler[_Group] = DynamicSampler(group=ctx.group, max_waves=3)

        async def wave(count: int) -> list[_Group]:
            return [_Group(ticket, 0) for ticket, row in loader.take(count) if row % 3]

        await sampler.harvest(6, wave)
        state = sampler.state(lambda g: [g.ticket, g.step])
        again: DynamicSampler[_Group] = DynamicSampler(group=ctx.group, max_waves=3)
        again.load_state(state, lambda pair: _Group(*pair))
        assert again.surplus == sampler.surplus
        assert again.acceptance == pytest.approx(sampler.acceptance, abs=0)

    asyncio.run(run_inline(program, roles=None))
