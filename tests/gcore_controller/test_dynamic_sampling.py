"""Dynamic sampling: exact quotas, of groups that do not depend on how many controllers there are."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from gcore_controller import Context, DynamicSampler, PromptLoader, run_inline
from gcore_controller.rlhf.dynamic_sampling import SampledBatch


@dataclass(frozen=True)
class Group:
    prompt_index: int
    oldest_version: int | None = None
    has_signal: bool = True
    scores: tuple[float, ...] = ()

    def state(self) -> dict[str, object]:
        raise AssertionError("nothing is saved")


@dataclass
class Steps:
    """What one controller saw over some steps."""

    batches: list[SampledBatch[Group]]
    surplus: list[list[int]]
    """Prompt indices carried over, after each step."""
    states: list[dict[str, object]]


async def sample(
    accepted: list[bool],
    quotas: list[int],
    *,
    world_size: int,
    max_waves: int = 50,
    interrupted: bool = False,
) -> list[Steps]:
    """Collect a step for each quota; prompts carry a signal as ``accepted`` says, over and over."""

    async def program(ctx: Context[None]) -> Steps:
        next_index = 0
        sampler: DynamicSampler[Group] = DynamicSampler(group=ctx.group, max_waves=max_waves)

        async def wave(count: int) -> list[Group]:
            nonlocal next_index
            indices = range(next_index, next_index + count)
            next_index += count
            return [
                Group(t)
                for t in indices
                if t % world_size == ctx.rank and accepted[t % len(accepted)]
            ]

        seen = Steps(batches=[], surplus=[], states=[])
        for quota in quotas:
            if interrupted:
                state = sampler.state(lambda group: group.prompt_index)
                sampler = DynamicSampler(group=ctx.group, max_waves=max_waves)
                sampler.load_state(state, Group)
            seen.batches.append(await sampler.collect(quota, wave))
            seen.surplus.append([g.prompt_index for g in sampler.surplus])
            seen.states.append(sampler.state(lambda group: group.prompt_index))
        return seen

    return await run_inline(program, roles=None, world_size=world_size)


def chosen(everyones: list[Steps]) -> list[list[int]]:
    """Prompt indices of each step, over all controllers."""
    return [
        sorted(g.prompt_index for seen in everyones for g in seen.batches[step].groups)
        for step in range(len(everyones[0].batches))
    ]


patterns = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)
quota_lists = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(patterns, quota_lists)
@settings(max_examples=60)
async def test_the_same_groups_for_any_number_of_controllers(
    accepted: list[bool], quotas: list[int]
) -> None:
    alone = await sample(accepted, quotas, world_size=1, max_waves=10_000)
    indices = [t for t in range(100_000) if accepted[t % len(accepted)]]
    expected: list[list[int]] = []
    for quota in quotas:
        expected.append(indices[:quota])
        indices = indices[quota:]
    assert chosen(alone) == expected, (
        "each step takes the oldest groups with a signal: none is skipped or used twice"
    )
    for world_size in (2, 4, 8):
        everyones = await sample(accepted, quotas, world_size=world_size, max_waves=10_000)
        assert chosen(everyones) == expected
        for seen in everyones:
            for batch, one in zip(seen.batches, alone[0].batches, strict=True):
                assert (batch.num_groups, batch.num_waves) == (one.num_groups, one.num_waves)
                assert (batch.num_sampled, batch.num_kept) == (one.num_sampled, one.num_kept)


@given(patterns, quota_lists, st.sampled_from([1, 4]), st.integers(1, 3))
@settings(max_examples=60)
async def test_a_short_harvest_is_all_there_is(
    accepted: list[bool], quotas: list[int], world_size: int, max_waves: int
) -> None:
    everyones = await sample(accepted, quotas, world_size=world_size, max_waves=max_waves)
    carried = 0
    for step, (quota, indices) in enumerate(zip(quotas, chosen(everyones), strict=True)):
        batch = everyones[0].batches[step]
        surplus = [t for seen in everyones for t in seen.surplus[step]]
        assert batch.num_groups == len(indices) <= quota
        assert batch.num_waves <= max_waves
        assert batch.num_groups == quota or (batch.num_waves == max_waves and not surplus)
        assert len(indices) + len(surplus) == carried + batch.num_kept
        assert not indices or not surplus or max(indices) < min(surplus)
        carried = len(surplus)


@given(patterns, quota_lists, st.sampled_from([1, 4]))
@settings(max_examples=40)
async def test_state_round_trip(accepted: list[bool], quotas: list[int], world_size: int) -> None:
    whole = await sample(accepted, quotas, world_size=world_size)
    resumed = await sample(accepted, quotas, world_size=world_size, interrupted=True)
    assert [seen.batches for seen in resumed] == [seen.batches for seen in whole]
    assert [seen.states for seen in resumed] == [seen.states for seen in whole]


@given(st.integers(1, 40), st.sampled_from([1, 3, 4, 8]))
@settings(max_examples=40)
async def test_where_all_are_kept_a_wave_is_the_batch(quota: int, world_size: int) -> None:
    """Nothing is left over for a later step, which has other weights."""
    for seen in await sample([True], [quota] * 3, world_size=world_size, max_waves=1):
        assert all(
            (h.num_waves, h.num_sampled, h.num_groups) == (1, quota, quota) for h in seen.batches
        )
        assert seen.surplus == [[], [], []]


async def test_surplus_is_used_before_anything_is_sampled() -> None:
    """The wave that makes up for three rejected prompts finds more than it needs."""
    [seen] = await sample([False] * 3 + [True] * 9, [4, 2], world_size=1)
    first, second = seen.batches
    assert ([g.prompt_index for g in first.groups], seen.surplus[0]) == ([3, 4, 5, 6], [7])
    assert [g.prompt_index for g in second.groups] == [7, 8]
    assert (second.num_waves, second.num_sampled, second.num_kept) == (1, 2, 2)
    assert seen.surplus[1] == [9]


async def test_nothing_has_a_signal() -> None:
    for seen in await sample([False], [8, 8], world_size=2, max_waves=3):
        assert all(
            (h.groups, h.num_groups, h.num_waves, h.num_kept) == ([], 0, 3, 0) for h in seen.batches
        )
        # However poor the acceptance rate, a wave is never much larger than a step.
        assert all(h.num_sampled == 3 * 8 for h in seen.batches)


async def test_waves_follow_the_acceptance_rate() -> None:
    """With one prompt in four accepted, a later step asks for what it needs in fewer waves than the first."""
    [seen] = await sample([True, False, False, False], [16] * 12, world_size=1)
    assert all(h.num_groups == 16 for h in seen.batches)
    assert seen.states[-1]["acceptance"] == pytest.approx(0.25, abs=0.05)


async def test_a_number_of_controllers_that_divides_nothing() -> None:
    everyones = await sample([True, False], [10, 10], world_size=3)
    assert [len(indices) for indices in chosen(everyones)] == [10, 10]


def test_indices_are_places_in_the_loaders_order() -> None:
    """The sampler above counts prompt indices as the loader does."""
    order = PromptLoader(range(10), seed=0)
    second_of_three = PromptLoader(range(10), seed=0, rank=1, world_size=3)
    assert second_of_three.take(9) == [(index, order.row(index)) for index in (1, 4, 7)]
