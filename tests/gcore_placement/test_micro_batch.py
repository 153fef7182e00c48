"""Micro-batches hold every sequence once, keep the budget, are few and are even."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from gcore_placement import PlacementError, TransformerWorkload, micro_batches

MODEL = TransformerWorkload(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=100), max_size=40),
    max_tokens=st.integers(min_value=100, max_value=300),
    num_multiple=st.integers(min_value=1, max_value=5),
    with_costs=st.booleans(),
)
def test_every_sequence_once_under_the_budget(
    lengths: list[int], max_tokens: int, num_multiple: int, with_costs: bool
) -> None:
    costs = np.array(lengths) ** 2 if with_costs else None
    batches = micro_batches(lengths, max_tokens=max_tokens, num_multiple=num_multiple, costs=costs)
    assert sorted(index for batch in batches for index in batch.tolist()) == list(
        range(len(lengths))
    )
    assert len(batches) % num_multiple == 0
    for batch in batches:
        assert (np.diff(batch) > 0).all()
        assert sum(lengths[index] for index in batch) <= max_tokens
    assert sum(not len(batch) for batch in batches) == max(0, len(batches) - len(lengths))
    again = micro_batches(lengths, max_tokens=max_tokens, num_multiple=num_multiple, costs=costs)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=10), min_size=1, max_size=6),
    max_tokens=st.integers(min_value=10, max_value=20),
)
def test_the_count_is_the_least_possible_for_few_sequences(
    lengths: list[int], max_tokens: int
) -> None:
    def fits(count: int) -> bool:
        packings = product(range(count), repeat=len(lengths))
        return any(
            np.bincount(packing, weights=lengths).max() <= max_tokens for packing in packings
        )

    least = next(count for count in range(1, len(lengths) + 1) if fits(count))
    assert len(micro_batches(lengths, max_tokens=max_tokens)) == least


def imbalance(costs: NDArray[np.float64], batches: list[NDArray[np.intp]]) -> float:
    work = [costs[batch].sum() for batch in batches]
    return float(np.max(work) / np.mean(work))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_sequences", "max_tokens"), [(512, 32768), (2048, 65536)])
def test_a_real_batch_is_packed_to_the_lower_bound_and_even(
    num_sequences: int, max_tokens: int, seed: int
) -> None:
    lengths = (
        np.random.default_rng(seed).lognormal(6.5, 1.0, num_sequences).clip(16, 16384).astype(int)
    )
    flops = MODEL.flops(lengths)
    least = -(-int(lengths.sum()) // max_tokens)
    by_tokens = micro_batches(lengths, max_tokens=max_tokens)
    by_flops = micro_batches(lengths, max_tokens=max_tokens, costs=flops)
    assert len(by_tokens) == len(by_flops) == least
    assert imbalance(lengths.astype(np.float64), by_tokens) <= 1.005
    # Full to the last percent, tokens decide; with room to choose, costs do.
    assert imbalance(flops, by_flops) < imbalance(flops, by_tokens)
    roomy = micro_batches(lengths, max_tokens=max_tokens, costs=flops, num_multiple=least + 3)
    lower_bound = max(flops.sum() / len(roomy), flops.max())
    assert max(flops[batch].sum() for batch in roomy) <= lower_bound * 1.001


def test_costs_are_evened_rather_than_tokens() -> None:
    lengths = np.array([8, 2, 2, 2, 2])
    batches = micro_batches(lengths, max_tokens=10, costs=lengths**2)
    assert sorted(batch.tolist() for batch in batches) == [[0], [1, 2, 3, 4]]


def test_rounding_up_leaves_empty_micro_batches_only_where_sequences_run_out() -> None:
    assert sorted(
        len(batch) for batch in micro_batches([5, 5, 5], max_tokens=100, num_multiple=4)
    ) == [0, 1, 1, 1]
    assert [len(batch) for batch in micro_batches([0, 0, 0, 0], max_tokens=1, num_multiple=4)] == [
        1,
        1,
        1,
        1,
    ]
    assert micro_batches([], max_tokens=1, num_multiple=4) == []


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        PlacementError, match=r"lengths\[1\] is 5000 tokens.*max_tokens=4096.*at least 5000"
    ):
        micro_batches([10, 5000], max_tokens=4096)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(PlacementError, match="max_tokens is 0; expected an integer of at least 1"):
        micro_batches([1], max_tokens=0)
    with pytest.raises(
        PlacementError, match="num_multiple is -1; expected an integer of at least 1"
    ):
        micro_batches([1], max_tokens=1, num_multiple=-1)
    with pytest.raises(PlacementError, match=r"lengths is 1\.5; expected whole numbers of tokens"):
        micro_batches([1.5], max_tokens=2)
    with pytest.raises(
        PlacementError, match=r"lengths\[0\] is .*; expected a finite number of at least 0"
    ):
        micro_batches([-1], max_tokens=2)
    with pytest.raises(
        PlacementError, match=r"costs has 1 values; expected one per sequence \(2\)"
    ):
        micro_batches([1, 1], max_tokens=2, costs=[1.0])
