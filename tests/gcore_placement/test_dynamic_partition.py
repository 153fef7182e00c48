"""The live policy: what every decision keeps to, and how it meets noise, drifts and jumps."""

import json
from dataclasses import replace
from typing import Any

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
from gcore_placement.partition.space import Partition
from gcore_placement.partition.statistics import weighted_median

EAGER = DynamicPartitionConfig(min_gain=0.0, noise_floor=0.0, law_error=0.0, tolerance=1e9)
"""No hysteresis, nothing hedged, no safeguard: the optimum itself is the aim."""

spaces = st.builds(
    lambda devices, policy, reward, unit: PartitionSpace(
        num_devices=devices,
        roles=(RoleLimits(devices_per_replica=policy), RoleLimits(devices_per_replica=reward)),
        unit_devices=unit,
    ),
    st.integers(24, 96),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 8]),
)
works = st.floats(10, 10_000)
floors = st.sampled_from([0.0, 5.0, 60.0])


def load(work: float, floor: float, devices: int) -> RoleLoad:
    """A role that takes just what the model says."""
    return RoleLoad(
        work_device_s=work,
        floor_s=floor,
        busy_device_s=work + floor * devices,
        finish_s=floor + work / devices,
        was_waiting=False,
    )


def loads(
    partition: Partition, works: tuple[float, float], floors: tuple[float, float] = (0.0, 0.0)
) -> tuple[RoleLoad, RoleLoad]:
    return (
        load(works[0], floors[0], partition.devices[0]),
        load(works[1], floors[1], partition.devices[1]),
    )


def best_index(
    space: PartitionSpace, works: tuple[float, float], floors: tuple[float, float] = (0.0, 0.0)
) -> int:
    """By trying all."""
    seconds = [
        max(f + w / d for f, w, d in zip(floors, works, p.devices, strict=True))
        for p in space.partitions
    ]
    return int(np.argmin(seconds))


def middle(space: PartitionSpace) -> Partition:
    return space.partitions[len(space.partitions) // 2]


@settings(max_examples=20)
@given(space=spaces, seed=st.integers(0, 10**6))
def test_constraints_hold_for_any_measurement(space: PartitionSpace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = DynamicPartition(space, middle(space), EAGER)
    for _ in range(30):
        measured = [
            RoleLoad(
                work_device_s=float(rng.lognormal(3, 3)) * (rng.random() > 0.1),
                floor_s=float(rng.lognormal(0, 2)),
                busy_device_s=float(rng.lognormal(3, 3)),
                finish_s=float(rng.lognormal(2, 2)),
                was_waiting=bool(rng.random() > 0.5),
            )
            for _ in range(2)
        ]
        partition = policy.observe(*measured)
        assert partition in space.partitions
        assert partition.num_devices == space.num_devices


@pytest.mark.parametrize("has_waves", [False, True])
@pytest.mark.parametrize(("noise", "most"), [(0.05, 0.016), (0.1, 0.038)])
def test_noise_moves_little(noise: float, most: float, has_waves: bool) -> None:
    """In few rounds, in the mean over clusters and loads that are drawn once for all: single ones have long tails.

    With `EAGER` they would be 1.3 to 3.7 times as many, and too many in each case.
    """
    rng = np.random.default_rng(0)
    num_rounds, num_moves = 1200, 0
    for _ in range(num_rounds // 150):
        limits = [
            RoleLimits(devices_per_replica=int(rng.choice(sizes)))
            for sizes in ([1, 2, 4], [1, 2, 8])
        ]
        space = PartitionSpace(num_devices=8 * int(rng.integers(3, 13)), roles=tuple(limits))
        work = tuple((1000 * rng.uniform(1, 3, 2)).tolist())
        policy = DynamicPartition(space, space.partitions[best_index(space, work)])
        for _ in range(150):
            before = policy.partition
            size = float(rng.choice([1.0, 0.5, 0.05])) if has_waves else 1.0
            factor = size * np.exp(noise / np.sqrt(size) * rng.standard_normal(2))
            policy.observe(*loads(before, (work[0] * factor[0], work[1] * factor[1])), size=size)
            num_moves += policy.partition != before
    assert num_moves <= most * num_rounds


@given(
    space=spaces,
    before=st.tuples(works, works),
    after=st.tuples(works, works),
    floors=st.tuples(floors, floors),
)
def test_after_a_jump_the_best_partition_is_reached_in_two_rounds(
    space: PartitionSpace,
    before: tuple[float, float],
    after: tuple[float, float],
    floors: tuple[float, float],
) -> None:
    policy = DynamicPartition(space, middle(space), EAGER)
    for _ in range(len(space.partitions) + 5):
        policy.observe(*loads(policy.partition, before, floors))
    old = policy.partition
    partitions = [old, *(policy.observe(*loads(policy.partition, after, floors)) for _ in range(2))]
    assert policy.config.window // 2 + 1 == 2
    best = space.partitions[best_index(space, after, floors)]
    seconds = [
        max(f + w / d for f, w, d in zip(floors, after, p.devices, strict=True))
        for p in (*partitions, best)
    ]
    assert seconds[-2] == pytest.approx(seconds[-1])
    # All that a jump costs beyond the best: the round that shows it, and one that is no worse.
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


@given(space=spaces, before=st.tuples(works, works), after=st.tuples(works, works))
def test_a_surprise_is_met_where_the_worse_case_is_least_bad_and_an_outlier_undone(
    space: PartitionSpace, before: tuple[float, float], after: tuple[float, float]
) -> None:
    policy = DynamicPartition(space, middle(space), EAGER)
    for _ in range(5):
        policy.observe(*loads(policy.partition, before))
    old = policy.partition

    def worst(partition: Partition) -> float:
        """Seconds over the least there can be, for the load that is worse served."""
        return max(
            max(w / d for w, d in zip(works, partition.devices, strict=True))
            / max(
                w / d
                for w, d in zip(
                    works, space.partitions[best_index(space, works)].devices, strict=True
                )
            )
            for works in (before, after)
        )

    def seconds(partition: Partition) -> float:
        return max(w / d for w, d in zip(after, partition.devices, strict=True))

    policy.observe(*loads(old, after))
    # What serves the last round no better than before is not moved to.
    served = [p for p in space.partitions if seconds(p) < seconds(old)]
    assert worst(policy.partition) <= min([worst(old), *map(worst, served)]) * (1 + 1e-9)
    policy.observe(*loads(policy.partition, before))
    assert max(
        w / d for w, d in zip(before, policy.partition.devices, strict=True)
    ) == pytest.approx(max(w / d for w, d in zip(before, old.devices, strict=True)))


def test_a_handful_of_prompts_decides_nothing() -> None:
    space = PartitionSpace(
        num_devices=32, roles=(RoleLimits(devices_per_replica=1), RoleLimits(devices_per_replica=1))
    )
    policy = DynamicPartition(space, space.nearest(16))
    for _ in range(10):
        policy.observe(*loads(policy.partition, (1000.0, 1000.0)), size=256)
        for _ in range(4):
            policy.observe(*loads(policy.partition, (8.0, 24.0)), size=2)
            assert policy.partition == space.nearest(16)


def test_a_move_within_a_step_must_earn_what_it_takes_in_the_next_round() -> None:
    space = PartitionSpace(
        num_devices=16, roles=(RoleLimits(devices_per_replica=1), RoleLimits(devices_per_replica=1))
    )
    # On half of the devices this takes 375 s, on the best partition 250 s.
    works = (3000.0, 1000.0)
    for within_s, moves in ((150.0, False), (100.0, True)):
        config = replace(EAGER, move_s=150.0, move_within_s=within_s)
        policy = DynamicPartition(space, space.nearest(8), config)
        policy.observe(*loads(policy.partition, works), is_within_step=True)
        assert (policy.partition != space.nearest(8)) == moves
        policy.observe(*loads(policy.partition, works))
        assert policy.partition == space.nearest(12)


@pytest.mark.parametrize("factor", [1 / 4, 1 / 2, 2, 4])
def test_a_jump_on_many_devices_is_followed_within_two_rounds_and_one_replica(
    factor: float,
) -> None:
    space = PartitionSpace(
        num_devices=64, roles=(RoleLimits(devices_per_replica=2), RoleLimits(devices_per_replica=2))
    )
    policy = DynamicPartition(space, middle(space), DynamicPartitionConfig(min_gain=0.0))
    rng = np.random.default_rng(0)

    def noisy() -> float:
        return float(np.exp(0.02 * rng.standard_normal()))

    for _ in range(40):
        policy.observe(*loads(policy.partition, (1000 * noisy(), 1000 * noisy())))
    for _ in range(2):
        policy.observe(*loads(policy.partition, (1000 * noisy(), 1000 * factor * noisy())))
    assert abs(space.index(policy.partition) - best_index(space, (1000, 1000 * factor))) <= 1


@settings(max_examples=40)
@given(
    space=spaces,
    works=st.tuples(works, works),
    move_s=st.floats(0, 100),
    horizon=st.integers(1, 50),
)
def test_no_move_costs_more_than_it_saves(
    space: PartitionSpace, works: tuple[float, float], move_s: float, horizon: int
) -> None:
    config = DynamicPartitionConfig(move_s=move_s, horizon_steps=horizon, tolerance=1e9)
    policy = DynamicPartition(space, middle(space), config)
    for _ in range(10):
        before = space.index(policy.partition)
        policy.observe(*loads(policy.partition, works))
        seconds = policy.predicted_seconds()
        after = space.index(policy.partition)
        assert after == before or (seconds[before] - seconds[after]) * horizon > move_s


def test_a_move_that_never_pays_is_not_made_and_one_that_does_is() -> None:
    space = PartitionSpace(
        num_devices=16, roles=(RoleLimits(devices_per_replica=1), RoleLimits(devices_per_replica=1))
    )
    for move_s, moves in ((1e6, False), (1.0, True)):
        policy = DynamicPartition(space, space.nearest(8), DynamicPartitionConfig(move_s=move_s))
        policy.observe(*loads(policy.partition, (3000.0, 1000.0)))
        assert (policy.partition != space.nearest(8)) == moves


@settings(max_examples=20)
@given(space=spaces, seed=st.integers(0, 10**6))
def test_roles_are_treated_alike(space: PartitionSpace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mirrored = replace(space, roles=space.roles[::-1])
    one = DynamicPartition(space, middle(space))
    start = one.partition
    other = DynamicPartition(mirrored, exchanged(start))
    for _ in range(30):
        works = (float(rng.lognormal(6, 1)), float(rng.lognormal(6, 1)))
        policy, reward = loads(one.partition, works, (5.0, 7.0))
        assert exchanged(one.observe(policy, reward)) == other.observe(reward, policy)


def exchanged(partition: Partition) -> Partition:
    return replace(partition, replicas=partition.replicas[::-1], devices=partition.devices[::-1])


@settings(max_examples=20)
@given(space=spaces, seed=st.integers(0, 10**6))
def test_it_continues_from_its_state(space: PartitionSpace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = DynamicPartition(space, middle(space))
    for _ in range(12):
        policy.observe(
            *loads(policy.partition, (float(rng.lognormal(6, 1)), float(rng.lognormal(6, 1))))
        )
    again = DynamicPartition(space, middle(space))
    again.load_state(json.loads(json.dumps(policy.state())))
    for _ in range(12):
        works = (float(rng.lognormal(6, 1)), float(rng.lognormal(6, 1)))
        assert policy.observe(*loads(policy.partition, works)) == again.observe(
            *loads(again.partition, works)
        )
    assert again.state() == policy.state()


@pytest.mark.parametrize("factor", [1 / 4, 1 / 2, 2, 4])
def test_a_model_that_is_off_is_corrected_by_what_is_measured(factor: float) -> None:
    space = PartitionSpace(
        num_devices=32, roles=(RoleLimits(devices_per_replica=1), RoleLimits(devices_per_replica=1))
    )
    policy = DynamicPartition(space, space.nearest(16), EAGER)
    works = (3000.0, 1000.0)
    for _ in range(30):
        true_policy, true_reward = loads(policy.partition, works)
        waits = true_reward.finish_s < true_policy.finish_s
        measured = replace(
            true_reward,
            work_device_s=works[1] * factor,
            finish_s=max(true_reward.finish_s, true_policy.finish_s),
            was_waiting=waits,
        )
        policy.observe(true_policy, measured)
    assert abs(space.index(policy.partition) - best_index(space, works)) <= 1
    assert policy.corrections[1] * factor == pytest.approx(1, rel=0.1)


def test_what_is_left_of_a_step_has_a_best_partition_too() -> None:
    space = PartitionSpace(
        num_devices=10, roles=(RoleLimits(devices_per_replica=1), RoleLimits(devices_per_replica=1))
    )
    policy = DynamicPartition(space, space.nearest(5))
    assert policy.best((80.0, 20.0)).devices == (8, 2)
    assert policy.best((0.0, 20.0)).devices == (1, 9)
    assert policy.partition.devices == (5, 5)


@given(
    values=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 6)), min_size=1, max_size=8),
)
def test_a_median_counts_values_by_their_weight(values: list[tuple[int, int]]) -> None:
    repeated = [value for value, times in values for _ in range(times)]
    numbers, weights = np.array(values, dtype=np.float64).T
    assert weighted_median(numbers, weights) == np.median(repeated)


def test_wrong_use_is_refused() -> None:
    space = PartitionSpace(
        num_devices=8, roles=(RoleLimits(devices_per_replica=2), RoleLimits(devices_per_replica=2))
    )
    larger = replace(space, num_devices=16)
    with pytest.raises(PlacementError, match=r"partition is .*; expected one of the 3"):
        DynamicPartition(space, middle(larger))
    policy = DynamicPartition(space, middle(space))
    with pytest.raises(PlacementError, match=r"partition is .*; expected one of the 3"):
        policy.load_state(DynamicPartition(larger, middle(larger)).state())
    with pytest.raises(PlacementError, match=r"observed rounds is .*; expected at least 1"):
        policy.predicted_seconds()
    with pytest.raises(PlacementError, match=r"size is .*; expected a finite number above 0"):
        policy.observe(*loads(policy.partition, (1.0, 1.0)), size=0.0)
    with pytest.raises(PlacementError, match=r"window is .*; expected odd"):
        DynamicPartitionConfig(window=4)
    with pytest.raises(PlacementError, match=r"finish_s is .*; expected a finite number"):
        RoleLoad(work_device_s=1, busy_device_s=1, finish_s=np.nan, was_waiting=False)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"work_device_s": float("inf")},
            "work_device_s is inf; expected a finite number of at least 0",
        ),
        ({"finish_s": "3"}, "finish_s is '3'; expected a finite number of at least 0"),
        (
            {"busy_device_s": [3.0]},
            r"busy_device_s is \[3.0\]; expected a finite number of at least 0",
        ),
        ({"floor_s": True}, "floor_s is True; expected a finite number of at least 0"),
    ],
)
def test_a_load_of_no_numbers_is_refused(changed: dict[str, Any], expected: str) -> None:
    fine: dict[str, Any] = {
        "work_device_s": 8.0,
        "busy_device_s": 8.0,
        "finish_s": 2.0,
        "was_waiting": False,
    }
    with pytest.raises(PlacementError, match=expected):
        RoleLoad(**{**fine, **changed})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_round_has_a_load_of_each_role(count: int) -> None:
    """What is refused leaves nothing behind."""
    limits = RoleLimits(devices_per_replica=1)
    space = PartitionSpace(num_devices=8, roles=(limits, limits))
    policy = DynamicPartition(space, middle(space))
    before = policy.state()
    with pytest.raises(
        PlacementError, match=f"number of loads is {count}; expected 2, one for each role"
    ):
        policy.observe(*[load(8.0, 0.0, 4)] * count)
    wrong: Any = "8.0"
    with pytest.raises(PlacementError, match=r"loads\[1\] is '8.0'; expected a RoleLoad"):
        policy.observe(load(8.0, 0.0, 4), wrong)
    assert policy.state() == before
