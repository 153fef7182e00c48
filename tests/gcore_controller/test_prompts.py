import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore_controller.errors import StateError
from gcore_controller.prompts import PromptLoader, ShardedSampler


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 5), world_size=st.integers(1, 5), draws=st.integers(1, 30))
def test_controllers_together_draw_what_one_would(num_rows: int, seed: int, world_size: int, draws: int) -> None:
    rows = [f"row {i}" for i in range(num_rows)]
    alone = PromptLoader(rows, seed=seed).take(draws * world_size)
    together = [
        drawn
        for rank in range(world_size)
        for drawn in PromptLoader(rows, seed=seed, rank=rank, world_size=world_size).take(draws)
    ]
    assert sorted(together) == alone
    assert [ticket for ticket, _ in alone] == list(range(draws * world_size))


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 5), num_epochs=st.integers(1, 4))
def test_every_row_once_an_epoch(num_rows: int, seed: int, num_epochs: int) -> None:
    loader = PromptLoader(range(num_rows), seed=seed)
    orders: list[list[int]] = []
    for _ in range(num_epochs):
        orders.append([row for _, row in loader.take(num_rows)])
        assert sorted(orders[-1]) == list(range(num_rows))
    assert loader.epoch == num_epochs
    if num_rows > 20 and num_epochs > 1:
        assert orders[0] != orders[1]


@given(
    taken=st.lists(st.integers(0, 7), max_size=5),
    world_size=st.integers(1, 3),
    new_world_size=st.integers(1, 3),
    num_workers=st.sampled_from([0, 2]),
)
def test_resumes_from_its_state_with_any_number_of_controllers(
    taken: list[int], world_size: int, new_world_size: int, num_workers: int
) -> None:
    rows = list(range(17))
    loaders = [PromptLoader(rows, seed=3, rank=r, world_size=world_size) for r in range(world_size)]
    for count in taken:
        for loader in loaders:
            loader.take(count)
    assert all(loader.state() == loaders[0].state() for loader in loaders)
    drawn = sum(taken) * world_size
    expected = PromptLoader(rows, seed=3).take(drawn + 4 * new_world_size)[drawn:]
    resumed: list[tuple[int, int]] = []
    for rank in range(new_world_size):
        loader = PromptLoader(rows, seed=3, rank=rank, world_size=new_world_size, num_workers=num_workers)
        loader.load_state(loaders[0].state())
        resumed += loader.take(4)
    assert sorted(resumed) == expected


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptLoader(range(10), seed=0).state()
    with pytest.raises(StateError, match="num_rows=10: this data set has num_rows=11"):
        PromptLoader(range(11), seed=0).load_state(state)
    with pytest.raises(StateError, match="seed=0: this data set has seed=1"):
        PromptLoader(range(10), seed=1).load_state(state)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_rows is 0"):
        ShardedSampler(0, seed=0, rank=0, world_size=1)
