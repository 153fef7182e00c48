"""How good splits are: against the optimum where it can be enumerated, and against Karmarkar-Karp elsewhere."""

from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from gcore_placement import balance

TINY_CASES = 150


def imbalance(costs: NDArray[np.float64], num_parts: int, *, equal_count: bool) -> float:
    sums = [costs[part].sum() for part in balance(costs, num_parts, equal_count=equal_count)]
    return float(np.max(sums) / np.mean(sums))


def karmarkar_karp_imbalance(
    costs: NDArray[np.float64], num_parts: int, *, equal_count: bool
) -> float:
    """Largest over mean sum of the differencing method (Karmarkar and Karp 1982).

    A state is one sum per part, falling; the two of widest spread are merged, largest to smallest. With equal counts a
    state starts with an item in every part, as in verl's get_seqlen_balanced_partitions(equal_size=True).
    """
    falling = np.sort(costs)[::-1]
    if equal_count:
        states = list(falling.reshape(-1, num_parts))
    else:
        states = [
            np.pad(falling[item : item + 1], (0, num_parts - 1)) for item in range(len(falling))
        ]
    heap = [(float(state[-1] - state[0]), number, state) for number, state in enumerate(states)]
    heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        merged = np.sort(heappop(heap)[2] + heappop(heap)[2][::-1])[::-1]
        heappush(heap, (float(merged[-1] - merged[0]), number, merged))
        number += 1
    sums = heap[0][2]
    return float(sums.max() / sums.mean())


def optimal_makespan(costs: NDArray[np.float64], num_parts: int, *, equal_count: bool) -> float:
    part_of = np.array(list(product(range(num_parts), repeat=len(costs))))
    in_part = part_of[:, :, None] == np.arange(num_parts)
    if equal_count:
        in_part = in_part[(in_part.sum(axis=1) == len(costs) // num_parts).all(axis=1)]
    return float(np.einsum("i,sip->sp", costs, in_part).max(axis=1).min())


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize(("num_items", "num_parts"), [(6, 2), (8, 2), (6, 3)])
def test_tiny_splits_are_near_the_optimum(
    num_items: int, num_parts: int, equal_count: bool
) -> None:
    """Never beyond 4/3 - 1/3m of the optimum (Graham's bound for LPT), and within 2 percent on average."""
    ratios: list[float] = []
    for seed in range(TINY_CASES):
        costs = np.random.default_rng(seed).lognormal(0.0, 1.0, num_items)
        optimum = optimal_makespan(costs, num_parts, equal_count=equal_count)
        parts = balance(costs, num_parts, equal_count=equal_count)
        ratios.append(max(costs[part].sum() for part in parts) / optimum)
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 4 / 3 - 1 / (3 * num_parts) + 1e-12
    assert np.mean(ratios) <= 1.02


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize(
    ("num_parts", "per_part"), [(2, 20), (8, 20), (8, 200), (32, 20), (64, 32)]
)
def test_no_worse_than_karmarkar_karp(num_parts: int, per_part: int, equal_count: bool) -> None:
    for seed in range(4):
        lengths = (
            np.random.default_rng(seed)
            .lognormal(6.5, 1.0, num_parts * per_part)
            .clip(16, 32768)
            .round()
        )
        theirs = karmarkar_karp_imbalance(lengths, num_parts, equal_count=equal_count)
        assert imbalance(lengths, num_parts, equal_count=equal_count) <= theirs * (1 + 1e-9)


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("num_parts", [8, 64, 512])
def test_a_cluster_sized_batch_is_even(num_parts: int, equal_count: bool) -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 102_400).clip(16, 32768).round()
    assert imbalance(lengths, num_parts, equal_count=equal_count) <= 1 + 1e-6
