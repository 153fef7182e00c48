"""Items that come one after the other are given away within Graham's bounds."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gcore_placement import PlacementError, StreamingBalancer, balance

costs_lists = st.lists(
    st.floats(min_value=0, max_value=1e9) | st.integers(0, 3).map(float), min_size=1, max_size=40
)
part_counts = st.integers(min_value=1, max_value=9)


def stream(balancer: StreamingBalancer, costs: list[float], cuts: list[int]) -> list[int]:
    """The part of each item; chunks end at `cuts`."""
    chunks = np.split(np.array(costs), sorted(cut % len(costs) for cut in cuts))
    return [part for chunk in chunks for part in balancer.add(chunk).tolist()]


@given(costs=costs_lists, num_parts=part_counts, cuts=st.lists(st.integers(0, 99), max_size=6))
def test_the_heaviest_part_stays_within_an_item_of_the_mean(
    costs: list[float], num_parts: int, cuts: list[int]
) -> None:
    balancer = StreamingBalancer(num_parts)
    part_of = stream(balancer, costs, cuts)
    np.testing.assert_allclose(balancer.loads, np.bincount(part_of, costs, num_parts), rtol=1e-9)
    # The bounds are rounded, too: relatively, and near 0 by the least numbers that there are.
    heaviest = balancer.loads.max() * (1 - 1e-9) - np.finfo(float).tiny
    assert heaviest <= sum(costs) / num_parts + (1 - 1 / num_parts) * max(costs)
    offline = max(
        sum(costs[index] for index in part.tolist()) for part in balance(costs, num_parts)
    )
    assert heaviest <= (2 - 1 / num_parts) * offline
    again = StreamingBalancer(num_parts)
    assert stream(again, costs, cuts) == part_of


@given(costs=costs_lists, num_parts=part_counts)
def test_each_item_of_a_chunk_goes_to_the_lightest_part_heaviest_first(
    costs: list[float], num_parts: int
) -> None:
    loads = [0.0] * num_parts
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    balancer = StreamingBalancer(num_parts)
    balancer.add(costs)
    np.testing.assert_allclose(np.sort(balancer.loads), np.sort(loads), rtol=1e-9)


def test_a_long_stream_is_even() -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 64 * 1024).clip(16, 32768).round()
    balancer = StreamingBalancer(64)
    for chunk in np.split(lengths, 64):
        balancer.add(chunk)
    assert balancer.loads.max() / balancer.loads.mean() <= 1.01


def test_wrong_input_is_refused_and_nothing_given_away() -> None:
    with pytest.raises(PlacementError, match="num_parts is 0; expected an integer of at least 1"):
        StreamingBalancer(0)
    balancer = StreamingBalancer(2)
    with pytest.raises(
        PlacementError, match=r"costs\[1\] is -1\.0; expected a finite number of at least 0"
    ):
        balancer.add([1.0, -1.0])
    assert balancer.loads.tolist() == [0, 0]
    assert balancer.add([]).tolist() == []
