"""Prompt order: fixed by the seed, whatever the number of controllers and however often it is resumed."""

from collections import UserList
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gcore_controller.context import StageTimer, seconds_by_stage
from gcore_controller.errors import ControllerError
from gcore_controller.rlhf.curriculum import Curriculum
from gcore_controller.rlhf.prompts import PromptLoader

sizes = st.integers(1, 30)
seeds = st.integers(0, 2**31)


def drawn(num_rows: int, seed: int, world_size: int, per_controller: int) -> dict[int, int]:
    """Ticket to row, over all controllers."""
    found: dict[int, int] = {}
    for rank in range(world_size):
        loader = PromptLoader(range(num_rows), seed=seed, rank=rank, world_size=world_size)
        taken = loader.take(per_controller * world_size)
        assert [index for index, _ in taken] == [
            rank + i * world_size for i in range(per_controller)
        ]
        for index, row in taken:
            assert loader.row(index) == row
            found[index] = row
    return found


@given(sizes, seeds, st.integers(1, 8), st.integers(0, 20))
def test_controllers_share_out_one_order(
    num_rows: int, seed: int, world_size: int, per_controller: int
) -> None:
    alone = drawn(num_rows, seed, 1, world_size * per_controller)
    assert drawn(num_rows, seed, world_size, per_controller) == alone


@given(sizes, seeds, st.integers(1, 4))
def test_every_row_once_an_epoch(num_rows: int, seed: int, num_epochs: int) -> None:
    taken = PromptLoader(range(num_rows), seed=seed).take(num_rows * num_epochs)
    rows = [row for _, row in taken]
    for epoch in range(num_epochs):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_and_seeds_differ_in_order() -> None:
    first, second = ([row for _, row in PromptLoader(range(50), seed=s).take(100)] for s in (0, 1))
    assert first[:50] != second[:50]
    assert first[:50] != first[50:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_prompt_indices_and_their_rows(num_workers: int) -> None:
    names = [f"row {i}" for i in range(7)]
    order = PromptLoader(range(7), seed=5)
    taken: dict[int, str] = {}
    for rank in range(3):
        loader = PromptLoader(names, seed=5, rank=rank, world_size=3, num_workers=num_workers)
        taken |= dict(loader.take(2) + loader.take(11))
        assert loader.epoch == 13 / 7
    assert taken == {index: names[order.row(index)] for index in range(13)}


def test_waiting_for_rows_is_a_stage_of_its_own() -> None:
    class Slow(UserList[str]):
        def __getitem__(self, index: Any) -> Any:
            now_s[0] += 0.5
            return self.data[index]

    now_s = [0.0]
    timer = StageTimer(lambda: now_s[0])
    loader = PromptLoader(Slow(["a", "b", "c"]), seed=0, timer=timer)
    with timer.stage("gen"):
        now_s[0] += 1.0
        loader.take(2)
        loader.row(0)
    assert seconds_by_stage(timer.drain()) == {"gen": 1.0, "data": 1.5}


@given(
    sizes,
    seeds,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 3, 8]),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_a_resumed_loader_continues_in_the_same_order(
    num_rows: int, seed: int, before: int, after: int, draws: list[int]
) -> None:
    """With another number of controllers too: the position is one number, the same on all of them."""
    rows = list(range(num_rows))
    loaders = [
        PromptLoader(rows, seed=seed, rank=rank, world_size=before) for rank in range(before)
    ]
    taken = [pair for loader in loaders for count in draws for pair in loader.take(count)]
    state = loaders[0].state()
    assert all(loader.state() == state for loader in loaders)
    resumed = [PromptLoader(rows, seed=seed, rank=rank, world_size=after) for rank in range(after)]
    for loader in resumed:
        loader.load_state(state)
        taken += loader.take(8)
    order = PromptLoader(range(num_rows), seed=seed)
    assert sorted(taken) == [(index, order.row(index)) for index in range(sum(draws) + 8)]


def test_a_state_of_other_data_is_refused() -> None:
    loader = PromptLoader([1, 2, 3], seed=0)
    loader.take(2)
    expected = loader.state()
    for state, message in (
        (
            PromptLoader([1, 2], seed=0).state(),
            "num_rows of the saved position is 2; expected 3",
        ),
        (
            PromptLoader([1, 2, 3], seed=9).state(),
            "seed of the saved position is 9; expected 0",
        ),
    ):
        with pytest.raises(ControllerError, match=message):
            loader.load_state(state)
        assert loader.state() == expected, "a refused state changes nothing"


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="num_rows is 0; expected at least 1"):
        PromptLoader([], seed=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2; expected a rank from 0 to 1"),
        ({"rank": -1, "world_size": 2}, "rank is -1; expected a rank from 0 to 1"),
        ({"world_size": 0}, "world_size is 0; expected at least 1"),
        ({"num_workers": -1}, "num_workers is -1; expected 0 or more"),
    ],
)
def test_a_loader_of_no_controller_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        PromptLoader(list("abc"), seed=0, **options)


def test_a_negative_count_is_refused() -> None:
    """And the loader stays where it is."""
    loader = PromptLoader(list("abc"), seed=0)
    loader.take(2)
    with pytest.raises(ValueError, match="count is -1; expected 0 or more"):
        loader.take(-1)
    with pytest.raises(ValueError, match="prompt_index is -1; expected 0 or more"):
        loader.row(-1)
    with pytest.raises(
        ControllerError, match="cursor of the saved position is -1; expected 0 or more"
    ):
        loader.load_state({**loader.state(), "cursor": -1})
    assert (loader.cursor, loader.take(0)) == (2, [])


@given(seeds, st.integers(1, 5), st.lists(st.booleans(), min_size=3, max_size=20))
def test_a_curriculum_divides_what_it_takes_among_controllers(
    seed: int, world_size: int, are_alike: list[bool]
) -> None:
    """All controllers pass over the same prompts: mixed ones never, those that score alike once in eight times."""
    groups = [
        (row, [0.0, 0.0] if is_alike else [0.0, 1.0]) for row, is_alike in enumerate(are_alike)
    ]
    loaders: list[PromptLoader[int]] = []
    for rank in range(world_size):
        curriculum = Curriculum(seed)
        curriculum.record(groups)
        restored = Curriculum(seed)
        restored.load_state(curriculum.state())
        assert restored.scores == curriculum.scores
        rows = range(len(groups))
        loaders.append(
            PromptLoader(rows, seed=seed, rank=rank, world_size=world_size, curriculum=restored)
        )
    parts = [loader.take(64) for loader in loaders]
    assert {loader.cursor for loader in loaders} == {loaders[0].cursor}
    taken = sorted(index for part in parts for index, _ in part)
    assert len(set(taken)) == 64
    assert all(abs(len(part) - 64 / world_size) < 1 for part in parts)
    for index in set(range(loaders[0].cursor)) - set(taken):
        assert are_alike[loaders[0].locate(index)]


def test_how_often_a_curriculum_takes_prompts() -> None:
    curriculum = Curriculum(7)
    curriculum.record([(0, [1.0] * 4), (1, [0.0, 0.0, 0.0, 1.0]), (2, [0.0, 0.0, 1.0, 1.0])])
    typical = (3**0.5 / 4 + 1 / 2) / 2
    expected = [1 / 8, 3**0.5 / 4 / typical, 1.0, 1.0]
    for row, probability in enumerate(expected):
        assert curriculum.probability(row) == pytest.approx(probability)
        share = np.mean([curriculum.takes(index, row) for index in range(4000)])
        assert share == pytest.approx(probability, abs=0.03)


def test_rows_that_a_curriculum_passes_over_are_not_read() -> None:
    class Counted(UserList[int]):
        num_reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.num_reads += 1
            return super().__getitem__(index)

    rows = Counted(range(20))
    curriculum = Curriculum(0)
    curriculum.record([(row, [1.0, 1.0]) for row in range(20)])
    loader = PromptLoader(rows, seed=0, num_workers=2, curriculum=curriculum)
    assert len(loader.take(5)) == rows.num_reads == 5
    assert loader.cursor > 5


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3]),
)
def test_prompts_that_are_given_back_are_taken_first(
    counts: list[int], before: int, after: int
) -> None:
    """Each once, with any number of controllers, also after a checkpoint."""
    rows = range(100, 120)
    loaders = [PromptLoader(rows, seed=1, rank=rank, world_size=before) for rank in range(before)]
    taken = [entry for loader in loaders for entry in loader.take(20)]
    indices = [7, 2, 11, 3]
    for loader in loaders:
        loader.give_back(indices[:1])
        loader.give_back(indices[1:])
    assert {loader.epoch for loader in loaders} == {16 / 20}
    state = loaders[0].state()
    loaders = [PromptLoader(rows, seed=1, rank=rank, world_size=after) for rank in range(after)]
    again: list[tuple[int, int]] = []
    for loader in loaders:
        loader.load_state(state)
    for count in counts:
        again += sorted(entry for loader in loaders for entry in loader.take(count))
    expected = [2, 3, 7, 11, *range(20, 100)][: sum(counts)]
    assert [index for index, _ in again] == expected
    rows_by_index = dict(taken)
    assert all(rows_by_index.get(index, row) == row for index, row in again)
