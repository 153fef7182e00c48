"""What every split must be, whatever the costs."""

import doctest
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import ArrayLike, NDArray

from gcore_placement import PlacementError, balance
from gcore_placement.balancing.balance import longest_first

costs_lists = st.lists(st.floats(min_value=0, max_value=1e300), max_size=40) | st.lists(
    st.integers(min_value=0, max_value=12).map(float), max_size=40
)
part_counts = st.integers(min_value=1, max_value=9)


def makespan(costs: NDArray[np.float64], parts: list[NDArray[np.intp]]) -> float:
    return max(float(costs[part].sum()) for part in parts)


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
        assert makespan(costs, parts) <= (costs / num_parts).sum() * (1 + 1e-12) + costs.max()


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


@given(costs=costs_lists.filter(bool), num_parts=part_counts)
def test_folding_keeps_counts_and_loads_within_an_item(costs: list[float], num_parts: int) -> None:
    falling = np.sort(np.array(costs))[::-1] / max(*costs, 1.0)
    part_of = longest_first(falling, num_parts, max_count=len(falling), is_folded=True)
    counts, loads = (
        np.bincount(part_of, minlength=num_parts),
        np.bincount(part_of, falling, num_parts),
    )
    assert np.ptp(counts) <= 1
    assert np.ptp(loads) <= falling[0] * (1 + 1e-12)


@given(costs=costs_lists, num_parts=part_counts, slack=st.integers(min_value=0, max_value=4))
def test_bounded_counts(costs: list[float], num_parts: int, slack: int) -> None:
    max_count = -(-len(costs) // num_parts) + max(slack, int(not costs))
    parts = balance(costs, num_parts, max_count=max_count)
    check_split(np.array(costs), parts, num_parts)
    assert max(len(part) for part in parts) <= max_count


@given(
    costs=costs_lists,
    num_parts=part_counts,
    order=st.randoms(use_true_random=False),
    kind=st.sampled_from(["free", "equal", "bounded", "within"]),
)
def test_the_order_of_items_does_not_matter(
    costs: list[float], num_parts: int, order: Random, kind: str
) -> None:
    if kind == "equal":
        costs = costs[: len(costs) // num_parts * num_parts]
    shuffled = order.sample(costs, len(costs))

    def shares(items: list[float]) -> list[list[float]]:
        weights = [1 + round(math.log1p(cost)) % 7 for cost in items]
        options: dict[str, Any] = {
            "free": {},
            "equal": {"equal_count": True},
            "bounded": {"max_count": len(items) // num_parts + 1},
            "within": {"weights": weights, "capacity": 2 * sum(weights) / num_parts + 7},
        }[kind]
        return [
            sorted(np.array(items)[part].tolist()) for part in balance(items, num_parts, **options)
        ]

    assert shares(costs) == shares(shuffled)


@given(
    items=st.lists(
        st.tuples(st.floats(min_value=0, max_value=1e6), st.integers(0, 20)), max_size=40
    ),
    num_parts=part_counts,
    slack=st.floats(min_value=0, max_value=10),
)
def test_no_part_exceeds_the_capacity(
    items: list[tuple[float, int]], num_parts: int, slack: float
) -> None:
    """With room for the largest weight beyond the mean, longest first by weight always fits."""
    costs, weights = np.array(items, dtype=np.float64).reshape(-1, 2).T
    capacity = weights.sum() / num_parts + weights.max(initial=1.0) + slack
    parts = balance(costs, num_parts, weights=weights, capacity=capacity)
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(costs)))
    assert max(weights[part].sum() for part in parts) <= capacity
    if len(costs):
        assert sum(not len(part) for part in parts) == max(0, num_parts - len(costs))


def test_memory_is_capped_at_little_cost() -> None:
    lengths = lognormal(0, 4096)
    flops = lengths * (24576 + lengths)
    free = balance(flops, 32)
    capacity = lengths.sum() / 32 * 1.001
    capped = balance(flops, 32, weights=lengths, capacity=capacity)
    assert max(lengths[part].sum() for part in free) > capacity
    assert max(lengths[part].sum() for part in capped) <= capacity
    assert makespan(flops, capped) <= flops.sum() / 32 * 1.02


def test_a_tight_packing_is_found_by_weight() -> None:
    # Longest first would put the two light sequences together, and the heavy ones with them would not fit.
    weights = [6.0, 6.0, 5.0, 5.0, 4.0, 4.0]
    parts = balance([0, 0, 9, 9, 9, 9], 3, weights=weights, capacity=10)
    assert [sum(weights[index] for index in part.tolist()) for part in parts] == [10, 10, 10]


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("scale", [1e-300, 3.0, 1e300])
def test_the_unit_of_costs_does_not_matter(scale: float, equal_count: bool) -> None:
    costs = lognormal(0, 160)
    achieved = makespan(costs, balance(costs, 8, equal_count=equal_count))
    scaled = makespan(costs, balance(costs * scale, 8, equal_count=equal_count))
    assert scaled == pytest.approx(achieved, rel=1e-3)


@pytest.mark.parametrize("equal_count", [False, True])
def test_a_search_ends_within_its_tolerance(equal_count: bool) -> None:
    """Of the mean; what it leaves is less even than what it finds without one."""
    costs = np.random.default_rng(0).lognormal(6.5, 1.0, 16_384)
    even = [
        makespan(costs, balance(costs, 64, equal_count=equal_count, tolerance=tolerance))
        / (costs.sum() / 64)
        for tolerance in (0.0, 1e-5, 1e-2)
    ]
    assert 1 <= even[0] <= 1 + 1e-8 < even[1] <= 1 + 1e-5 < even[2] <= 1 + 1e-2


def test_a_part_with_a_giant_gets_the_least_of_the_rest() -> None:
    """Equal counts leave no other way to make up for it."""
    costs = np.append(np.ones(90), [30.0, *np.full(29, 0.01)])
    parts = balance(costs, 4, equal_count=True, tolerance=0.1)
    giant = next(part for part in parts if 90 in part)
    assert (costs[giant] == 0.01).sum() == 29
    assert makespan(costs, parts) == pytest.approx(30 + 29 * 0.01)


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
    costs = np.where(
        np.arange(64 * 20) == 700, 2000.0, np.random.default_rng(0).integers(50, 150, 64 * 20)
    )
    parts = balance(costs, 64, equal_count=equal_count)
    lowest = max(costs.mean() * 20, 2000 + (np.sort(costs)[:19].sum() if equal_count else 0))
    assert makespan(costs, parts) <= lowest * 1.005


@pytest.mark.parametrize(
    ("costs", "num_parts", "options", "message"),
    [
        ([1.0, float("nan")], 2, {}, r"costs\[1\] is nan; expected a finite number of at least 0"),
        ([1.0, float("inf")], 2, {}, r"costs\[1\] is inf; expected a finite number of at least 0"),
        ([-1.0], 1, {}, r"costs\[0\] is -1.0; expected a finite number of at least 0"),
        ([[1.0]], 1, {}, r"costs.ndim is 2; expected 1 \(one number per item\)"),
        (["many"], 1, {}, r"costs is .*; expected an array of numbers"),
        ([1.0], 0, {}, "num_parts is 0; expected an integer of at least 1"),
        (
            [1.0, 2.0, 3.0],
            2,
            {"equal_count": True},
            r"costs has 3 values; expected a multiple of num_parts \(2\)",
        ),
        (
            [1.0],
            2,
            {"equal_count": True},
            r"costs has 1 values; expected a multiple of num_parts \(2\)",
        ),
        (
            [1.0, 2.0],
            2,
            {"tolerance": -0.5},
            "tolerance is -0.5; expected a finite number of at least 0",
        ),
        (
            [1.0, 2.0],
            2,
            {"equal_count": True, "max_count": 1},
            r"max_count is .*; expected None with equal_count=True",
        ),
        (
            [1.0, 2.0, 3.0],
            2,
            {"max_count": 1},
            "max_count is 1; expected at least 2 for 3 costs in 2 parts",
        ),
        ([1.0], 2, {"max_count": 0}, "max_count is 0; expected an integer of at least 1"),
        ([1.0], 2, {"weights": [1.0]}, "capacity is None; expected weights and capacity together"),
        ([1.0], 2, {"capacity": 1.0}, "weights is None; expected weights and capacity together"),
        (
            [1.0, 2.0],
            2,
            {"weights": [1.0], "capacity": 1.0},
            r"weights has 1 values; expected one per cost \(2\)",
        ),
        (
            [1.0],
            2,
            {"weights": [2.0], "capacity": 1.0},
            r"capacity is 1\.0; expected at least 2\.0, the largest weight",
        ),
        (
            [1.0],
            2,
            {"weights": [-2.0], "capacity": 1.0},
            r"weights\[0\] is .*; expected a finite number of at least 0",
        ),
        (
            [1.0],
            2,
            {"weights": [2.0], "capacity": 0},
            "capacity is 0; expected a finite number above 0",
        ),
        (
            [1.0, 1.0, 1.0],
            2,
            {"weights": [2.0] * 3, "capacity": 3.0},
            r"at least 4\.0 for weights of 6\.0 together",
        ),
        (
            [1.0],
            2,
            {"weights": [1.0], "capacity": 1.0, "max_count": 1},
            r"capacity is .*; expected None with equal_count or",
        ),
    ],
)
def test_wrong_input_is_refused(
    costs: ArrayLike, num_parts: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        balance(costs, num_parts, **options)


def test_a_tighter_capacity_is_not_the_only_way_to_even_parts() -> None:
    """A start by cost alone ends at 14 and 10 here, one by weight at 12 and 12."""
    costs, weights = [9, 8, 2, 2, 1, 1, 1], [1, 6, 1, 4, 1, 4, 1]
    for capacity in (9, 10, 18):
        parts = balance(costs, 2, weights=weights, capacity=capacity)
        assert [sum(costs[i] for i in part) for part in parts] == [12, 12]


def test_the_examples_of_the_docstring_are_right() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    found = parser.get_doctest(str(balance.__doc__), {"balance": balance}, "balance", None, 0)
    assert runner.run(found) == doctest.TestResults(failed=0, attempted=3)
