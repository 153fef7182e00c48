"""Distributions of lengths against closed forms and against draws."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from gcore_placement import Lengths, PlacementError


def draws(
    median: float, sigma: float, longest: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(median), sigma, count), 1, longest)


def test_moments_of_an_uncut_law() -> None:
    """Of a log-normal: median exp(s^2 / 2), median^2 exp(2 s^2)."""
    lengths = Lengths.log_normal(median=1000, sigma=0.8, longest=1e9)
    assert_allclose(lengths.mean, 1000 * np.exp(0.32), rtol=1e-3)
    assert_allclose(lengths.mean_square, 1e6 * np.exp(2 * 0.64), rtol=1e-2)


@pytest.mark.parametrize("count", [1, 10, 1000, 100_000])
def test_the_longest_of_many(count: int) -> None:
    lengths = Lengths.log_normal(median=1000, sigma=0.8, longest=30_000)
    drawn = draws(1000, 0.8, 30_000, 1_000_000)
    longest = drawn[: 1_000_000 // count * count].reshape(-1, count).max(axis=1).mean()
    # Ten blocks of 100,000 draws have a mean longest with an error of their own.
    assert_allclose(lengths.expected_longest(count), longest, rtol=0.03)


def test_the_widest_laws_are_cut() -> None:
    assert_allclose(
        Lengths.log_normal(median=10, sigma=1e6, longest=100).mean, (1 + 100) / 2, rtol=0.01
    )


def test_a_record_is_itself() -> None:
    drawn = draws(300, 1.0, 4000, 5000)
    lengths = Lengths.recorded(drawn)
    assert_allclose(
        [lengths.mean, lengths.mean_square], [drawn.mean(), (drawn**2).mean()], rtol=1e-12
    )
    assert lengths.longest == drawn.max()
    assert_allclose(lengths.expected_longest(10**9), drawn.max())
    assert Lengths.recorded([7]).expected_longest(3) == 7
    assert lengths.cut(100).longest == 100


def test_what_remains_of_a_running_sequence() -> None:
    """A sequence caught at random is chosen by its length, and at an even place of it: mean E[L^2] / 2 E[L]."""
    drawn = draws(500, 0.7, 8000, 20_000)
    lengths = Lengths.recorded(drawn)
    remaining = lengths.remaining()
    rng = np.random.default_rng(1)
    caught = rng.choice(drawn, 200_000, p=drawn / drawn.sum()) * rng.random(200_000)
    assert_allclose(remaining.mean, lengths.mean_square / (2 * lengths.mean), rtol=0.01)
    assert_allclose(remaining.mean, caught.mean(), rtol=0.02)
    assert_allclose(
        remaining.expected_longest(50), caught.reshape(-1, 50).max(axis=1).mean(), rtol=0.03
    )


def test_most_tokens_of_those_that_still_run() -> None:
    drawn = draws(500, 0.7, 8000, 2000)
    held = [(drawn >= t).mean() * (100 + t) for t in np.sort(drawn)]
    assert_allclose(Lengths.recorded(drawn).most_alive(100), max(held), rtol=1e-9)


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"median is 20; expected at most longest \(10\)"):
        Lengths.log_normal(median=20, sigma=1, longest=10)
    with pytest.raises(PlacementError, match=r"median is 0; expected a finite number above 0"):
        Lengths.log_normal(median=0, sigma=1, longest=10)
    with pytest.raises(
        PlacementError, match=r"sigma is -1.0; expected a finite number of at least 0"
    ):
        Lengths.log_normal(median=1, sigma=-1, longest=10)
    with pytest.raises(PlacementError, match=r"lengths is \[\]; expected at least one length"):
        Lengths.recorded([])
