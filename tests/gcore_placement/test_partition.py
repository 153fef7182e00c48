"""Which partitions a cluster allows."""

import pytest
from hypothesis import given, strategies as st

from gcore_placement import PartitionSpace, PlacementError, RoleLimits


@given(
    devices=st.integers(2, 60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    least=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    extra=st.tuples(st.none() | st.integers(0, 8), st.none() | st.integers(0, 8)),
    unit=st.integers(1, 8),
)
def test_all_that_leave_neither_role_room_for_more(
    devices: int,
    sizes: tuple[int, int],
    least: tuple[int, int],
    extra: tuple[int | None, int | None],
    unit: int,
) -> None:
    limits = [
        RoleLimits(devices_per_replica=s, min_replicas=m, max_replicas=None if e is None else m + e)
        for s, m, e in zip(sizes, least, extra, strict=True)
    ]

    def allowed(policy: int, reward: int) -> bool:
        held = (policy * sizes[0], reward * sizes[1])
        return sum(held) <= devices and all(
            h % unit == 0
            and r.min_replicas <= n
            and (r.max_replicas is None or n <= r.max_replicas)
            for h, r, n in zip(held, limits, (policy, reward), strict=True)
        )

    counts = [(p, r) for p in range(devices + 1) for r in range(devices + 1) if allowed(p, r)]
    largest = [
        (p, r)
        for p, r in counts
        if not any((q > p and s >= r) or (q >= p and s > r) for q, s in counts)
    ]
    try:
        space = PartitionSpace(num_devices=devices, roles=tuple(limits), unit_devices=unit)
    except PlacementError:
        assert not counts
        return
    assert [p.replicas for p in space.partitions] == sorted(largest)
    for partition in space.partitions:
        assert partition.num_devices == devices
        assert partition.devices == tuple(
            n * size for n, size in zip(partition.replicas, sizes, strict=True)
        )
        assert space.index(partition) == space.partitions.index(partition)


def test_the_nearest_to_a_share() -> None:
    limits = RoleLimits(devices_per_replica=4), RoleLimits(devices_per_replica=8)
    space = PartitionSpace(num_devices=64, roles=limits)
    assert space.nearest(40).devices[0] == 40
    assert space.nearest(1000).devices[1] == 8


def test_wrong_limits_are_refused() -> None:
    one = RoleLimits(devices_per_replica=4, min_replicas=2)
    with pytest.raises(
        PlacementError,
        match=r"num_devices is 15; expected at least 16, for the fewest replicas of all roles",
    ):
        PartitionSpace(num_devices=15, roles=(one, one))
    with pytest.raises(
        PlacementError, match=r"max_replicas is 1; expected at least min_replicas \(2\)"
    ):
        RoleLimits(devices_per_replica=4, min_replicas=2, max_replicas=1)
    with pytest.raises(
        PlacementError, match="devices_per_replica is 0; expected an integer of at least 1"
    ):
        RoleLimits(devices_per_replica=0)
