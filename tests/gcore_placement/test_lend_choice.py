"""Whether training ranks lend their devices: where it saves time, by a law at first, and then as measured."""

import pytest
from hypothesis import given, strategies as st

from gcore_placement import LendChoice, PlacementError


def steps(
    choice: LendChoice, count: int, *, work_s: float, floor_s: float, swap_s: float
) -> list[bool]:
    """Run steps of a cluster with one engine and three lent ones, where part of the work does not divide."""
    found: list[bool] = []
    for _ in range(count):
        found.append(choice.lends)
        num_engines = 4 if choice.lends else 1
        choice.observe(
            generation_s=floor_s + work_s / num_engines,
            generated=1000.0,
            swap_s=swap_s if choice.lends else 0.0,
        )
    return found


def test_work_that_divides_is_lent_for() -> None:
    """Three steps without measure it; 100 s are 25 s then, and 5 s of swaps."""
    choice = LendChoice(engines=1, lent=3)
    assert steps(choice, 20, work_s=100.0, floor_s=0.0, swap_s=5.0) == [False] * 3 + [True] * 17
    assert choice.gain_s == pytest.approx(70.0)


@pytest.mark.parametrize(("work_s", "floor_s", "swap_s"), [(100.0, 0.0, 80.0), (10.0, 90.0, 9.0)])
def test_swaps_that_cost_more_than_they_save_are_not_tried_again(
    work_s: float, floor_s: float, swap_s: float
) -> None:
    """Of 100 s, 75 s or 7.5 s are saved."""
    choice = LendChoice(engines=1, lent=3)
    assert (
        steps(choice, 20, work_s=work_s, floor_s=floor_s, swap_s=swap_s)
        == [False] * 3 + [True] * 3 + [False] * 14
    )
    assert choice.gain_s < 0


def test_longer_responses_make_lending_pay() -> None:
    choice = LendChoice(engines=1, lent=3)
    steps(choice, 10, work_s=8.0, floor_s=0.0, swap_s=7.0)
    assert not choice.lends
    assert all(steps(choice, 10, work_s=16.0, floor_s=0.0, swap_s=7.0)[3:])


@given(
    work_s=st.floats(0.1, 1e3),
    floor_s=st.floats(0.0, 1e3),
    swap_s=st.floats(0.0, 1e3),
    engines=st.integers(1, 9),
)
def test_it_settles_on_the_faster_way(
    work_s: float, floor_s: float, swap_s: float, engines: int
) -> None:
    choice, lent = LendChoice(engines=engines, lent=3), 3
    for _ in range(20):
        seconds = floor_s + work_s / (engines + lent if choice.lends else engines)
        choice.observe(generation_s=seconds, generated=10.0, swap_s=swap_s if choice.lends else 0.0)
    gain_s = work_s / engines - work_s / (engines + lent) - swap_s
    assert choice.lends == (gain_s > 0) or abs(gain_s) < 1e-6 * (floor_s + work_s)
    assert choice.gain_s == pytest.approx(gain_s, abs=1e-6 * (floor_s + work_s))


def test_a_step_without_samples_is_no_evidence() -> None:
    choice = LendChoice(engines=1, lent=1)
    for _ in range(5):
        assert not choice.observe(generation_s=1.0, generated=0.0, swap_s=0.0)
    assert choice.gain_s == 0.0


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"engines": 0, "lent": 1}, "engines is 0; expected"),
        ({"engines": 1, "lent": 0}, "lent is 0; expected"),
    ],
)
def test_there_are_engines_of_both_kinds(numbers: dict[str, int], expected: str) -> None:
    with pytest.raises(PlacementError, match=expected):
        LendChoice(**numbers)
