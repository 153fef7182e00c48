"""Orders of large data sets and of mixtures: every row once an epoch, the weights' shares, and one number to resume."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from gcore_controller import Mixture, PromptLoader
from gcore_controller.rlhf.prompts import permute_entry


@given(st.integers(1, 700), st.integers(0, 2**40), st.integers(0, 5))
def test_a_computed_permutation_has_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    order = [permute_entry(i, num_rows, seed=seed, epoch=epoch) for i in range(num_rows)]
    assert sorted(order) == list(range(num_rows))


def test_a_computed_permutation_is_well_shuffled() -> None:
    """Neighbours end up anywhere, and seeds and epochs are unrelated."""
    num_rows = 20_000
    orders = [
        [permute_entry(i, num_rows, seed=seed, epoch=epoch) for i in range(num_rows)]
        for seed, epoch in ((0, 0), (1, 0), (0, 1))
    ]
    for i, order in enumerate(orders):
        steps = [abs(b - a) for a, b in pairwise(order)]
        assert sum(steps) / len(steps) == pytest.approx(num_rows / 3, rel=0.02), (
            "as of independent draws"
        )
        thirds = Counter(row * 3 // num_rows for row in order[: num_rows // 3])
        assert min(thirds.values()) > 0.95 * num_rows / 9
        for other in orders[:i]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 12, (
                "about one in expectation"
            )


def test_a_large_data_set_is_shuffled_in_constant_memory() -> None:
    num_rows = 10**8
    tracemalloc.start()
    loader = PromptLoader(range(num_rows), seed=3)
    taken = loader.take(1000)
    loader.cursor = num_rows - 500
    loader.load_state(loader.state())
    across = [row for _, row in loader.take(1000)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20
    assert len({row for _, row in taken}) == len(set(across)) == 1000
    assert loader.epoch == (num_rows + 500) / num_rows
    again = PromptLoader(range(num_rows), seed=3, rank=1, world_size=3)
    assert again.take(1000) == taken[1::3]


def test_rows_without_weights() -> None:
    rows = Mixture([[0, 1], [], [2, 3, 4]])
    assert list(rows) == [0, 1, 2, 3, 4]
    assert PromptLoader(rows, seed=2).take(9) == PromptLoader(list(rows), seed=2).take(9)
    assert rows[-1] == 4
    assert rows[1:4] == [1, 2, 3]
    with pytest.raises(IndexError):
        rows[5]


def test_parts_of_a_mixture_have_their_shares() -> None:
    parts = [
        [f"{name}{i}" for i in range(size)] for name, size in (("a", 40), ("b", 9000), ("c", 300))
    ]
    rows = Mixture(parts, [1, 2, 0.5])
    drawn = [row for _, row in PromptLoader(rows, seed=5).take(7000)]
    assert Counter(row[0] for row in drawn) == {"a": 7 * 286, "b": 7 * 571, "c": 7 * 143}
    counts = Counter(drawn)
    for part in parts:
        times = [counts[row] for row in part]
        assert max(times) - min(times) <= 1, "a part starts over when all of its rows were taken"
    assert Counter(row[0] for row in drawn[:200])["b"] == pytest.approx(114, abs=25), (
        "shuffled, not one after the other"
    )
    assert [row for _, row in PromptLoader(rows, seed=6).take(50)] != drawn[:50]


def test_a_resumed_mixture_continues_on_any_number_of_controllers() -> None:
    rows = Mixture([range(100), range(1000, 1003)], [3, 1])
    whole = PromptLoader(rows, seed=1).take(2500)
    first = PromptLoader(rows, seed=1)
    taken = first.take(1111)
    for rank in range(3):
        loader = PromptLoader(rows, seed=1, rank=rank, world_size=3)
        loader.load_state(first.state())
        taken += loader.take(1389)
    assert sorted(taken) == whole


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1e5, 1.0]])
def test_weights_that_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights are"):
        Mixture([[1], [2]], weights)


def test_up_to_a_million_rows_the_order_is_numpys() -> None:
    """Runs that were started by an earlier version continue in their order."""
    import numpy as np

    for num_rows in (1000, 2**20):
        expected = np.random.default_rng([7, 0]).permutation(num_rows)[:100].tolist()
        taken = PromptLoader(range(num_rows), seed=7).take(100)
        assert [row for _, row in taken] == expected
