"""Partitions of more than two roles: the same policy, whatever their number and order."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gcore_placement import (
    DynamicPartition,
    DynamicPartitionConfig,
    PartitionSpace,
    PlacementError,
    RoleLimits,
    RoleLoad,
)
from gcore_placement.partition.space import Partition, stage_seconds
from gcore_placement.partition.statistics import expected_max

EAGER = DynamicPartitionConfig(min_gain=0.0, noise_floor=0.0, law_error=0.0, tolerance=1e9)


@st.composite
def spaces(draw: st.DrawFn, *, sizes: Sequence[int] = (1, 2, 4)) -> PartitionSpace:
    num_roles = draw(st.integers(2, 4))
    limits = [
        RoleLimits(devices_per_replica=draw(st.sampled_from(sizes))) for _ in range(num_roles)
    ]
    return PartitionSpace(num_devices=draw(st.integers(16, 18)), roles=tuple(limits))


def works_of(space: PartitionSpace, seed: int) -> list[float]:
    return np.random.default_rng(seed).lognormal(6, 1, len(space.roles)).tolist()


def loads_of(partition: Partition, works: Sequence[float]) -> list[RoleLoad]:
    """Roles that take just what the law says."""
    return [
        RoleLoad(work_device_s=work, busy_device_s=work, finish_s=work / devices, was_waiting=False)
        for work, devices in zip(works, partition.devices, strict=True)
    ]


def middle(space: PartitionSpace) -> Partition:
    return space.nearest(*[space.num_devices / len(space.roles)] * len(space.roles))


@settings(max_examples=30)
@given(
    devices=st.integers(3, 14),
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    extra=st.lists(st.none() | st.integers(0, 6), min_size=3, max_size=3),
    unit=st.sampled_from([1, 2, 3]),
)
def test_all_that_leave_no_role_room_for_more(
    devices: int, sizes: list[int], extra: list[int | None], unit: int
) -> None:
    limits = [
        RoleLimits(devices_per_replica=size, max_replicas=None if more is None else 1 + more)
        for size, more in zip(sizes, extra, strict=True)
    ]
    allowed = [
        counts
        for counts in itertools.product(*(limit.counts(devices, unit) for limit in limits))
        if np.dot(counts, sizes) <= devices
    ]
    largest = [
        own
        for own in allowed
        if not any(
            other != own and all(o >= n for o, n in zip(other, own, strict=True))
            for other in allowed
        )
    ]
    try:
        space = PartitionSpace(num_devices=devices, roles=tuple(limits), unit_devices=unit)
    except PlacementError:
        assert not allowed
        return
    assert [partition.replicas for partition in space.partitions] == sorted(largest)
    assert all(partition.num_devices == devices for partition in space.partitions)


@given(
    devices=st.integers(4, 20),
    works=st.lists(st.floats(1, 1000), min_size=2, max_size=4),
    floors=st.lists(st.sampled_from([0.0, 1.0, 30.0]), min_size=4, max_size=4),
)
def test_the_best_of_all_is_that_of_water_filling(
    devices: int, works: list[float], floors: list[float]
) -> None:
    """With replicas of one device, giving each device to the slowest role is optimal."""
    floors = floors[: len(works)]
    space = PartitionSpace(
        num_devices=devices, roles=(RoleLimits(devices_per_replica=1),) * len(works)
    )
    filled = np.ones(len(works))
    for _ in range(devices - len(works)):
        filled[np.argmax(np.array(floors) + works / filled)] += 1
    found = DynamicPartition(space, middle(space)).best(works, floors)
    assert np.isclose(
        stage_seconds(works, floors, np.array([found.devices])),
        stage_seconds(works, floors, filled[None]),
    )


@given(
    values=st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_the_mean_of_the_largest_is_that_over_all_combinations(values: list[list[float]]) -> None:
    weights = np.array([1, 4, 1]) / 6
    expected = sum(
        np.prod(weights[list(chosen)]) * max(own[k] for own, k in zip(values, chosen, strict=True))
        for chosen in itertools.product(range(3), repeat=len(values))
    )
    assert expected_max(np.array([values]), weights)[0] == pytest.approx(expected, abs=1e-12)


@settings(max_examples=15)
@given(space=spaces(), seed=st.integers(0, 10**6), data=st.data())
def test_roles_in_another_order_have_the_same_devices(
    space: PartitionSpace, seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(space.roles))))

    def permuted(partition: Partition) -> Partition:
        return Partition(
            replicas=tuple(partition.replicas[role] for role in order),
            devices=tuple(partition.devices[role] for role in order),
            unassigned_devices=partition.unassigned_devices,
        )

    other_space = PartitionSpace(
        num_devices=space.num_devices, roles=tuple(space.roles[role] for role in order)
    )
    start = data.draw(st.sampled_from(space.partitions))
    one, other = DynamicPartition(space, start), DynamicPartition(other_space, permuted(start))
    for number in range(15):
        loads = loads_of(one.partition, works_of(space, seed + number))
        assert permuted(one.observe(*loads)) == other.observe(*(loads[role] for role in order))


@settings(max_examples=20)
@given(space=spaces(), seed=st.integers(0, 10**6))
def test_a_load_that_stays_is_served_best(space: PartitionSpace, seed: int) -> None:
    works = works_of(space, seed)
    policy = DynamicPartition(space, middle(space), EAGER)
    for _ in range(3):
        policy.observe(*loads_of(policy.partition, works))
    best_s = stage_seconds(works, 0.0, space.role_devices).min()
    assert stage_seconds(works, 0.0, np.array([policy.partition.devices]))[0] == pytest.approx(
        best_s
    )


@settings(max_examples=20)
@given(space=spaces(), seed=st.integers(0, 10**6), move_s=st.sampled_from([0.0, 5.0, 50.0]))
def test_what_moves_pays_and_only_that(space: PartitionSpace, seed: int, move_s: float) -> None:
    """By its own law; it stays where the best is not much better, or a move takes as long as it saves."""
    config = DynamicPartitionConfig(move_s=move_s, tolerance=1e9, near=0.0)
    policy = DynamicPartition(space, middle(space), config)
    works = works_of(space, seed)
    for _ in range(4):
        before = space.index(policy.partition)
        policy.observe(*loads_of(policy.partition, works))
        seconds, after = policy.predicted_seconds(), space.index(policy.partition)
        if after != before:
            assert (seconds[before] - seconds[after]) * config.horizon_steps > move_s
            assert seconds[after] == pytest.approx(seconds.min())
        else:
            saved_s = seconds[before] - seconds.min()
            assert saved_s <= max(
                config.min_gain * seconds[before], move_s / config.horizon_steps
            ) * (1 + 1e-9)


def test_devices_come_from_the_role_that_needs_them_least() -> None:
    space = PartitionSpace(num_devices=12, roles=(RoleLimits(devices_per_replica=1),) * 3)
    policy = DynamicPartition(space, space.nearest(4, 4, 4))
    for _ in range(5):
        policy.observe(*loads_of(policy.partition, (400.0, 600.0, 200.0)))
    assert policy.partition.devices == (4, 6, 2)
    assert space.nearest(6, 4).devices == (6, 4, 2)


def test_too_many_partitions_are_refused() -> None:
    roles = (RoleLimits(devices_per_replica=1),) * 4
    with pytest.raises(
        PlacementError, match=r"unit_devices is 1; expected more: 4 roles divide 256 devices"
    ):
        PartitionSpace(num_devices=256, roles=roles)
    assert len(PartitionSpace(num_devices=256, roles=roles, unit_devices=8).partitions) == 4495
    with pytest.raises(PlacementError, match=r"roles is .*; expected at least 2 roles"):
        PartitionSpace(num_devices=256, roles=roles[:1])
