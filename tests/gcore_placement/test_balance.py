"""What every split must be, whatever the costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from gcore_placement import PlacementError, balance

costs_lists = st.lists(st.floats(min_value=0, max_value=1e300), max_size=40) | st.lists(
    st.integers(min_value=0, max_value=12).map(float), max_size=40
)
part_counts = st.integers(min_value=1, max_value=9)


def makespan(costs: NDArray[np.float64], parts: list[NDArray[np.intp]]) -> float:
    return max(float(costs[part].sum()) for part in parts)


def round_robin(num_items: int, num_parts: int) -> list[NDArray[np.intp]]:
    return [np.arange(part, num_items, num_parts) for part in range(num_parts)]


def lognormal(seed: int, num_items: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).lognormal(6.5, 1.0, num_items).clip(16, 32768).round()


def check_split(costs: NDArray[np.float64], parts: list[NDArray[np.intp]], num_parts: int) -> None:
    assert len(parts) == num_parts
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))
    for part in parts:
        assert part.dtype == np.intp
        assert (np.diff(part) > 0).all()
    assert sum(not len(part) for part in parts) == max(0, num_parts - len(costs))
    if len(costs):
        assert makespan(costs, parts) <= makespan(costs, round_robin(len(costs), num_parts)) * (1 + 1e-12)


@given(costs=costs_lists, num_parts=part_counts)
def test_free_counts(costs: list[float], num_parts: int) -> None:
    parts = balance(costs, num_parts)
    check_split(np.array(costs), parts, num_parts)
    for part, again in zip(parts, balance(costs, num_parts), strict=True):
        np.testing.assert_array_equal(part, again)


@given(costs=costs_lists, num_parts=part_counts)
def test_equal_counts(costs: list[float], num_parts: int) -> None:
    costs = costs[: len(costs) // num_parts * num_parts]
    parts = balance(costs, num_parts, equal_count=True)
    assert {len(part) for part in parts} == {len(costs) // num_parts}
    if costs:
        check_split(np.array(costs), parts, num_parts)


@given(costs=costs_lists, num_parts=part_counts, slack=st.integers(min_value=0, max_value=4))
def test_bounded_counts(costs: list[float], num_parts: int, slack: int) -> None:
    max_count = -(-len(costs) // num_parts) + max(slack, int(not costs))
    parts = balance(costs, num_parts, max_count=max_count)
    check_split(np.array(costs), parts, num_parts)
    assert max(len(part) for part in parts) <= max_count


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_items_does_not_change_what_is_achieved(seed: int, equal_count: bool) -> None:
    costs = lognormal(seed, 160)
    shuffled = np.random.default_rng(seed).permutation(costs)
    achieved = makespan(costs, balance(costs, 8, equal_count=equal_count))
    assert achieved == makespan(shuffled, balance(shuffled, 8, equal_count=equal_count))


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("scale", [1e-300, 3.0, 1e300])
def test_the_unit_of_costs_does_not_matter(scale: float, equal_count: bool) -> None:
    costs = lognormal(0, 160)
    achieved = makespan(costs, balance(costs, 8, equal_count=equal_count))
    scaled = makespan(costs, balance(costs * scale, 8, equal_count=equal_count))
    assert scaled == pytest.approx(achieved, rel=1e-3)


def test_zero_costs_are_spread_by_count() -> None:
    assert [len(part) for part in balance(np.zeros(8), 4)] == [2, 2, 2, 2]
    assert sorted(len(part) for part in balance([5.0, 0, 0, 0], 4)) == [1, 1, 1, 1]


def test_fewer_items_than_parts() -> None:
    assert sorted(part.tolist() for part in balance([3.0, 1.0], 4)) == [[], [], [0], [1]]
    assert [part.tolist() for part in balance([], 2)] == [[], []]
    assert [part.tolist() for part in balance([], 2, equal_count=True)] == [[], []]


def test_one_part_takes_all() -> None:
    assert [part.tolist() for part in balance([1, 2, 3], 1)] == [[0, 1, 2]]


@pytest.mark.parametrize("equal_count", [False, True])
def test_one_long_sequence_among_many_short(equal_count: bool) -> None:
    costs = np.where(np.arange(64 * 20) == 700, 2000.0, np.random.default_rng(0).integers(50, 150, 64 * 20))
    parts = balance(costs, 64, equal_count=equal_count)
    lowest = max(costs.mean() * 20, 2000 + (np.sort(costs)[:19].sum() if equal_count else 0))
    assert makespan(costs, parts) <= lowest * 1.005


@pytest.mark.parametrize(
    ("costs", "num_parts", "options", "message"),
    [
        ([1.0, float("nan")], 2, {}, r"costs\[1\] must be finite and at least 0, got nan"),
        ([1.0, float("inf")], 2, {}, r"costs\[1\] must be finite and at least 0, got inf"),
        ([-1.0], 1, {}, r"costs\[0\] must be finite and at least 0, got -1.0"),
        ([[1.0]], 1, {}, r"costs.ndim must be 1 \(one number per item\), got 2"),
        (["many"], 1, {}, "costs must be an array of numbers"),
        ([1.0], 0, {}, "num_parts must be an integer of at least 1, got 0"),
        ([1.0, 2.0, 3.0], 2, {"equal_count": True}, r"that num_parts \(2\) divides, got 3"),
        ([1.0], 2, {"equal_count": True}, r"that num_parts \(2\) divides, got 1"),
        ([1.0, 2.0], 2, {"equal_count": True, "max_count": 1}, "max_count must be None with equal_count=True"),
        ([1.0, 2.0, 3.0], 2, {"max_count": 1}, "max_count must be at least 2 for 3 costs in 2 parts, got 1"),
        ([1.0], 2, {"max_count": 0}, "max_count must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_input_is_refused(costs: ArrayLike, num_parts: int, options: dict[str, int], message: str) -> None:
    equal_count, max_count = bool(options.get("equal_count", False)), options.get("max_count")
    with pytest.raises(PlacementError, match=message):
        balance(costs, num_parts, equal_count=equal_count, max_count=max_count)
