"""Ranks that divide a packed row compute what one process does with all of it: attention, gradients, a model's loss."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from context_parallel_cases import (
    Attended,
    AttentionCase,
    Layout,
    attended_at_once,
    model_gradients_at_once,
)
from hypothesis import given, strategies as st
from rank_pool import RankPool
from trainer_oracles import Group, deviation

from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.context_parallel.ring import equal_segments

pytestmark = pytest.mark.slow

ULYSSES_2, ULYSSES_4 = Layout(ulysses_size=2), Layout(ulysses_size=4)
RING_2, RING_4, BOTH = Layout(ring_size=2), Layout(ring_size=4), Layout(ring_size=2, ulysses_size=2)
LAYOUTS = [ULYSSES_2, ULYSSES_4, RING_2, RING_4, BOTH]

UNEVEN = [Group(1, [1]), Group(40, [60]), Group(3, [4, 4]), Group(130, [71]), Group(7, [1, 30])]
"""Sequences of 1 to 200 tokens, some of equal length."""

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2}

layouts = st.builds(Layout, st.integers(1, 5), st.integers(1, 5))


def assert_same(shares: list[Attended], expected: Attended, tolerance: float) -> None:
    """Every place is held by one of the ranks, which has the same output and gradients there."""
    places = torch.cat([share.places for share in shares])
    assert places.sort().values.equal(expected.places)
    for i, whole in enumerate(expected.tensors):
        actual = torch.cat([share.tensors[i] for share in shares], dim=2).double()
        assert (actual - whole.double()[:, :, places]).abs().max() < tolerance * whole.abs().max()
    grad_sinks = torch.stack([share.grad_sinks for share in shares]).double().sum(0)
    assert (
        grad_sinks - expected.grad_sinks
    ).abs().max() <= tolerance * expected.grad_sinks.abs().max()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_attention_is_that_of_one_process(
    ranks: RankPool, layout: Layout, num_kv_heads: int
) -> None:
    for dtype in (torch.float32, torch.float64):
        case = AttentionCase(groups=UNEVEN, layout=layout, num_kv_heads=num_kv_heads, dtype=dtype)
        size = layout.ring_size * layout.ulysses_size
        shares: list[Attended] = ranks.run("attended", case, size=4)
        for first in range(0, 4, size):
            assert_same(shares[first : first + size], attended_at_once(case), TOLERANCES[dtype])


@pytest.mark.parametrize("layout", [ULYSSES_2, ULYSSES_4], ids=str)
def test_prompts_are_shared_where_heads_are_exchanged(ranks: RankPool, layout: Layout) -> None:
    groups = [Group(50, [8, 1, 30, 31]), Group(5, [3]), Group(1, [1, 2])]
    case = AttentionCase(groups=groups, layout=layout, share_prefix=True, dtype=torch.float64)
    shares: list[Attended] = ranks.run("attended", case, size=4)
    assert_same(shares[: layout.ulysses_size], attended_at_once(case), TOLERANCES[case.dtype])


@pytest.mark.parametrize(
    "options",
    [
        {"value_dim": 6},
        {"scale": 0.7},
        {"num_heads": 12, "num_kv_heads": 6},
        {"dtype": torch.bfloat16, "num_heads": 8},
        {"groups": [Group(1, [1])]},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [ULYSSES_4, RING_4, BOTH], ids=str)
def test_attention_of_other_shapes(
    ranks: RankPool, layout: Layout, options: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"groups": UNEVEN, "dtype": torch.float64} | options
    case = AttentionCase(layout=layout, **arguments)
    assert_same(ranks.run("attended", case, size=4), attended_at_once(case), TOLERANCES[case.dtype])


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1, "has_sinks": True},
        {"sliding_window": 13, "scale": 0.7},
        {"sliding_window": 25, "has_sinks": True},
        {"sliding_window": 26, "softcap": 0.8},
        {"sliding_window": 150, "softcap": 0.8, "has_sinks": True},
        {"sliding_window": 1000, "has_sinks": True, "num_heads": 8, "num_kv_heads": 4},
        {"has_sinks": True, "dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_windows_caps_and_sinks(ranks: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    """A ring of two cuts the sequences of 100 and 200 tokens in chunks of 25 and 50."""
    arguments: dict[str, Any] = {
        "groups": [*UNEVEN, Group(30, [71])],
        "dtype": torch.float64,
    } | options
    case = AttentionCase(layout=layout, **arguments)
    size = layout.ring_size * layout.ulysses_size
    shares: list[Attended] = ranks.run("attended", case, size=4)
    expected = attended_at_once(case)
    for first in range(0, 4, size):
        assert_same(shares[first : first + size], expected, TOLERANCES[case.dtype])


def test_a_long_sequence(ranks: RankPool) -> None:
    groups = [Group(8192, [8193])]
    expected = attended_at_once(AttentionCase(groups=groups, layout=Layout()))
    for layout in (RING_4, ULYSSES_4):
        shares: list[Attended] = ranks.run(
            "attended", AttentionCase(groups=groups, layout=layout), size=4
        )
        print(
            f"{layout}: {max(s.time_s for s in shares):.1f} s, one process {expected.time_s:.1f} s"
        )
        assert_same(shares, expected, TOLERANCES[torch.float32])


def test_a_ring_rank_keeps_no_more_of_a_longer_row(ranks: RankPool) -> None:
    def footprints(layout: Layout, num_tokens: int) -> list[tuple[int, int, float]]:
        groups = [Group(num_tokens // 2, [num_tokens // 2 + 1])]
        return ranks.run("footprint", AttentionCase(groups=groups, layout=layout), size=4)

    two, four = footprints(RING_2, 1024), footprints(RING_4, 2048)
    sizes = {(saved_bytes, largest) for saved_bytes, largest, _ in two + four}
    ((saved_bytes, largest),) = sizes
    # Queries and output of 4 heads, keys and values of 2, the log-sum-exp of 4: in float32, of 512 tokens.
    assert saved_bytes == 512 * 4 * (4 * 8 + 4 * 8 + 2 * 16 + 4)
    assert largest == 512 * 4 * 8


@pytest.mark.parametrize("layout", [RING_2, RING_4], ids=str)
def test_ring_ranks_compute_equally_many_scores_and_none_that_is_masked(
    ranks: RankPool, layout: Layout
) -> None:
    case = AttentionCase(groups=[Group(100, [157]), Group(60, [5]), Group(60, [5])], layout=layout)
    scores = [footprint[2] for footprint in ranks.run("footprint", case, size=4)]
    assert len(set(scores)) == 1
    num_seen = sum(n * (n + 1) // 2 for n in case.batch().segment_lengths.tolist())
    assert scores[0] * layout.ring_size == 4 * num_seen


def test_a_sum_over_ranks_leads_each_rank_to_its_own_gradient(ranks: RankPool) -> None:
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    results = ranks.run("summed", BOTH, weights, size=4)
    total = (weights**2).sum()
    assert {loss for loss, _ in results} == {total.item() ** 2}
    assert (
        torch.stack([gradient for _, gradient in results]).sum(0).allclose(2 * total * 2 * weights)
    )


@pytest.mark.parametrize("layout", [ULYSSES_2, RING_4, BOTH], ids=str)
def test_a_model_learns_the_same(ranks: RankPool, layout: Layout) -> None:
    share_prefix = layout.ring_size == 1
    held_by_one = [
        Group(40, [1])
    ]  # the others predict nothing, and go backward for its keys and values
    for groups in ([Group(20, [8, 3]), Group(4, [1]), Group(9, [30])], held_by_one):
        expected = model_gradients_at_once(groups, layout, share_prefix)
        for actual in ranks.run("model_gradients", groups, layout, share_prefix, size=4):
            assert deviation(actual, expected) < 1e-10


def test_query_heads_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    case = AttentionCase(groups=UNEVEN, layout=ULYSSES_4, num_heads=6)
    for error in ranks.errors("attended", case, size=4):
        assert re.match(
            "ConfigError: ulysses_size is 4; expected a divisor of the 6 query heads", error
        )


def test_tokens_that_are_not_the_ranks_own_are_refused(ranks: RankPool) -> None:
    case = AttentionCase(groups=[Group(5, [6])], layout=RING_2)
    for error in ranks.errors("attended_without", case, 1, size=4):
        assert (
            error == "BatchError: attention was called with 5 tokens; expected the 6 of this rank"
        )


@pytest.mark.parametrize(
    ("groups", "packed_for", "share_prefix", "divided_by", "message"),
    [
        (
            [Group(3, [5, 4])],
            ULYSSES_2,
            True,
            ULYSSES_4,
            "a row of 10 tokens cannot be divided among ring_size=1 x",
        ),
        (
            [Group(3, [4])],
            ULYSSES_2,
            False,
            RING_2,
            "a segment of 6 tokens cannot be cut in 4 chunks for ring_size=2",
        ),
        (
            [Group(4, [5, 5])],
            ULYSSES_4,
            True,
            RING_2,
            "the row shares prompts; expected one packed with share_prefix=False for ring_size 2",
        ),
    ],
)
def test_rows_packed_for_another_layout_are_refused(
    ranks: RankPool,
    groups: list[Group],
    packed_for: Layout,
    share_prefix: bool,
    divided_by: Layout,
    message: str,
) -> None:
    for error in ranks.errors("plan_of", groups, packed_for, share_prefix, divided_by, size=4):
        assert error.startswith(f"BatchError: {message}")


def test_groups_are_ring_major(ranks: RankPool) -> None:
    assert ranks.run("place_in_groups", [[0, 1, 2, 3]], 2, size=4) == [
        (4, 0, 0, 0, 4),
        (4, 1, 0, 1, 4),
        (4, 2, 1, 0, 4),
        (4, 3, 1, 1, 4),
    ]
    assert ranks.run("place_in_groups", [[0, 2], [1, 3]], 1, size=4) == [
        (2, 0, 0, 0, 4),
        (2, 0, 0, 0, 4),
        (2, 1, 1, 0, 4),
        (2, 1, 1, 0, 4),
    ]
    assert ranks.run("place_in_groups", [[0], [1], [2], [3]], 1, size=4) == [(1, 0, 0, 0, 1)] * 4


@pytest.mark.parametrize(
    ("cp_groups", "ulysses_size", "message"),
    [
        ([[0, 1], [2]], 1, r"cp_groups is \[\[0, 1\], \[2\]\]; expected each of the 4 ranks once"),
        ([[1, 0], [2, 3]], 1, r"cp_groups has \[1, 0\]; expected ascending ranks"),
        ([[0, 1, 2, 3]], 3, r"ulysses_size is 3; expected a divisor of 4"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    ranks: RankPool, cp_groups: list[list[int]], ulysses_size: int, message: str
) -> None:
    for error in ranks.errors("place_in_groups", cp_groups, ulysses_size, size=4):
        assert re.match(f"ConfigError: {message}", error)


@given(layout=layouts, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_every_place_is_held_once_and_work_is_even(layout: Layout, lengths: list[int]) -> None:
    sizes: dict[str, Any] = {"ring_size": layout.ring_size, "ulysses_size": layout.ulysses_size}
    row_multiple, segment_multiple = ContextParallel(**sizes).padding
    padded = [-(-n // segment_multiple) * segment_multiple for n in lengths]
    padded.append(-sum(padded) % row_multiple or row_multiple)
    segment_lengths = np.array(padded)
    size = layout.ring_size * layout.ulysses_size
    shares = [ContextParallel(**sizes, rank=rank).places(segment_lengths) for rank in range(size)]
    assert {share.size for share in shares} == {sum(padded) // size}
    assert (np.sort(np.concatenate(shares)) == np.arange(sum(padded))).all()

    if layout.ring_size > 1:
        # Chunks r and 2R - 1 - r hold as many query-key pairs, whatever r.
        num_keys = np.concatenate([np.arange(1, n + 1) for n in padded])
        work = num_keys[np.stack(shares)].reshape(layout.ring_size, -1).sum(1)
        assert (work == work[0]).all()
        segments = equal_segments(segment_lengths, ring_size=layout.ring_size)
        parts = [2 * s.num_segments * s.chunk_length for s in segments]
        assert [s.start for s in segments] == [sum(parts[:i]) for i in range(len(parts))]
        assert sum(parts) == sum(padded) // layout.ring_size
