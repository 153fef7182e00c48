"""The safeguard: following the load never loses much to the best fixed partition, whatever the load does."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from gcore_placement import (
    DynamicPartition,
    DynamicPartitionConfig,
    PartitionSpace,
    RoleLimits,
    RoleLoad,
)
from gcore_placement.partition.safeguard import LOST, WON, Safeguard
from gcore_placement.partition.space import stage_seconds

TOLERANCE = 0.02
NUM_ROUNDS = 60
FLOOR_S = 60.0
MOVE_S = 15.0
SPACE = PartitionSpace(
    num_devices=64,
    roles=(RoleLimits(devices_per_replica=4), RoleLimits(devices_per_replica=4)),
    unit_devices=4,
)

Loads = NDArray[np.float64]
"""[rounds, 2] device-seconds of both roles."""


@given(
    advantages=st.lists(st.floats(-1, 1), min_size=1, max_size=200),
    move_s=st.sampled_from([0.0, 0.5]),
)
def test_following_loses_no_more_than_the_bound(advantages: list[float], move_s: float) -> None:
    """Of two partitions one is always best on the whole; rounds differ by up to one, of length one."""
    safeguard = Safeguard(np.array([[1.0, 1.0], [1.0, 1.0]]), 0, TOLERANCE)
    lost, spent, follows = 0.0, np.zeros(2), True
    for advantage in advantages:
        # The partition that follows is always the second; the first stays the best, by a round that costs it nothing.
        seconds = np.array([1.0 + max(0.0, advantage), 1.0 + max(0.0, -advantage)])
        if (spent + seconds).argmin() == 1:
            seconds = np.array([1.0, 2.0])
        spent += seconds
        lost += (seconds[1] - seconds[0]) * follows
        safeguard.choose(seconds, before=1, after=1, move_s=move_s, is_within_step=False)
        follows = safeguard.follows_load
    count = len(advantages)
    bound = TOLERANCE * count + move_s + 1 + LOST * (1 + math.log2(max(1, count / WON)))
    assert lost <= bound


@given(
    advantages=st.lists(st.floats(-1, 1), min_size=1, max_size=200),
    move_s=st.sampled_from([0.01, 0.1]),
)
def test_the_fixed_partition_does_not_change_with_each_leader(
    advantages: list[float], move_s: float
) -> None:
    """By the seconds of two partitions alone, each of 1 or 2 a round."""
    safeguard = Safeguard(np.array([[1.0, 2.0], [2.0, 1.0]]), 0, TOLERANCE)
    spent, cost_s, widest_s, changes = np.zeros(2), 0.0, 0.0, 0
    for advantage in advantages:
        seconds = np.array([1.0 + max(0.0, advantage), 1.0 + max(0.0, -advantage)])
        before = int(safeguard.state()["fixed"])
        spent, cost_s = spent + seconds, cost_s + float(seconds[before])
        widest_s = max(widest_s, float(np.ptp(spent)))
        safeguard.choose(seconds, before=0, after=0, move_s=move_s, is_within_step=False)
        changes += safeguard.state()["fixed"] != before
    assert changes <= 2 + math.log2(max(1.0, widest_s / (3 * move_s)))
    assert cost_s - spent.min() <= 4 * widest_s + 2 * changes


def square(period: int, factor: float) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    return lambda t: np.where(t % period < period / 2, factor, 1 / factor)


FAMILY: dict[str, Callable[[NDArray[np.int64]], NDArray[np.float64]]] = {
    **{f"square of period {p}": square(p, 2.83) for p in (2, 4, 8, 12, 20, 40)},
    **{
        f"sine of period {p}": lambda t, p=p: np.exp(np.sin(2 * np.pi * t / p))
        for p in (6, 16, 20, 40)
    },
    **{f"pulse of period {p}": lambda t, p=p: np.where(t % p, 2.83, 1 / 2.83) for p in (4, 20)},
    "jump": lambda t: np.where(t < len(t) / 2, 1 / 2.83, 2.83),
    "drift": lambda t: np.geomspace(1 / 2.83, 2.83, len(t)),
    "a coin": lambda t: np.where(np.random.default_rng(1).random(len(t)) < 0.5, 2.83, 1 / 2.83),
    "heavy tails": lambda t: np.exp(
        np.clip(0.5 * np.random.default_rng(1).standard_t(2, len(t)), -2, 2)
    ),
    "no change": lambda t: np.ones(len(t)),
}
"""Ratios of the policy's work to the judge's, over a round's index."""


def loads_of(name: str) -> Loads:
    ratio = np.sqrt(FAMILY[name](np.arange(NUM_ROUNDS)))
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal((NUM_ROUNDS, 2)))
    return 3200 * noise * np.stack([ratio, 1 / ratio], axis=1)


def seconds_of(works: Loads, *, tolerance: float = TOLERANCE) -> float:
    """Generation and rewarding of all rounds, under decisions; roles take just what the law says."""
    config = DynamicPartitionConfig(move_s=MOVE_S, move_within_s=3 * MOVE_S, tolerance=tolerance)
    policy = DynamicPartition(SPACE, SPACE.nearest(SPACE.num_devices / 2), config)
    total = 0.0
    for work in works.tolist():
        before = policy.partition
        finish = [FLOOR_S + w / d for w, d in zip(work, before.devices, strict=True)]
        total += max(finish)
        loads = [
            RoleLoad(
                work_device_s=w,
                floor_s=FLOOR_S,
                busy_device_s=w + FLOOR_S * d,
                finish_s=s,
                was_waiting=False,
            )
            for w, d, s in zip(work, before.devices, finish, strict=True)
        ]
        total += MOVE_S * (policy.observe(*loads) != before)
    return total


def best_split_seconds(works: Loads) -> float:
    floors = (FLOOR_S, FLOOR_S)
    return float(
        np.sum([stage_seconds(work, floors, SPACE.role_devices) for work in works], axis=0).min()
    )


@pytest.mark.parametrize("name", FAMILY)
def test_no_load_makes_it_much_slower_than_the_best_split(name: str) -> None:
    """In 60 rounds, the first of which have to find the load; without the safeguard up to 90 % are lost."""
    works = loads_of(name)
    assert seconds_of(works) <= 1.04 * best_split_seconds(works)


def test_it_is_the_safeguard_that_bounds_the_loss() -> None:
    works = loads_of("square of period 4")
    assert seconds_of(works, tolerance=1e9) > 1.2 * best_split_seconds(works)


def test_what_can_be_followed_is_followed() -> None:
    for name, most in (("jump", 0.87), ("drift", 0.93), ("square of period 40", 0.95)):
        works = loads_of(name)
        assert seconds_of(works) < most * best_split_seconds(works), name
