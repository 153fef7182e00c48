"""What the last rounds are read for: a trend, noise, and the error of the law."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gcore_placement import DynamicPartitionConfig, RoleLoad
from gcore_placement.partition.load_history import LoadHistory, measured_error
from gcore_placement.partition.statistics import (
    NORMAL_NODES,
    NORMAL_WEIGHTS,
    expected_max,
    median_line,
)
from gcore_placement.quantities import Floats

CONFIG = DynamicPartitionConfig()


def history_of(
    works: np.ndarray, *, sizes: np.ndarray | None = None, config: DynamicPartitionConfig = CONFIG
) -> LoadHistory:
    """Rounds of two roles on four devices each, whose law is exact; work is for a size of 1."""
    history = LoadHistory(CONFIG, 2)
    for work, size in zip(works, np.ones(len(works)) if sizes is None else sizes, strict=True):
        seconds = work * size / 4
        loads = [
            RoleLoad(work_device_s=w * size, busy_device_s=w * size, finish_s=s, was_waiting=False)
            for w, s in zip(work, seconds, strict=True)
        ]
        history.add(loads, (4, 4), size)
    return history


def courses(num_rounds: int, growth: float, noise: float) -> Floats:
    """Work of which the first role's grows, and the second's stays."""
    rng = np.random.default_rng(0)
    logs = np.outer(np.arange(num_rounds), (growth, 0.0)) + noise * rng.standard_normal(
        (num_rounds, 2)
    )
    return 100 * np.exp(logs)


@given(st.floats(0.03, 0.2), st.sampled_from([1.0, -1.0]))
def test_a_trend_is_seen_and_carried_on(growth: float, sign: float) -> None:
    """The load of the next round is that of the course, and not that of the rounds before."""
    rng = np.random.default_rng(1)
    sizes = rng.choice([1.0, 0.5, 0.1], 21)
    at = (np.cumsum(sizes) - sizes / 2) / (sizes @ sizes / sizes.sum())
    works = 100 * np.exp(
        np.stack([sign * growth * at, np.zeros(21)], axis=1) + 0.01 * rng.standard_normal((21, 2))
    )
    history = history_of(works, sizes=sizes)
    first, second = history.trend()
    assert first == pytest.approx(sign * growth, abs=0.005)
    assert second == 0
    next_at = at[-1] + sizes[-1] / 2 / (sizes @ sizes / sizes.sum()) + 0.5
    work, _ = history.settled_load()
    usual = sizes @ sizes / sizes.sum()
    assert work[0] == pytest.approx(100 * np.exp(sign * growth * next_at) * usual, rel=0.05)
    assert work[1] == pytest.approx(100 * usual, rel=0.05)


@pytest.mark.parametrize(
    "works",
    [
        courses(21, 0.0, 0.03),
        courses(21, 0.0, 0.3),
        courses(21, 0.005, 0.1),
        courses(8, 0.1, 0.01),
        np.repeat([[100.0, 100.0], [400.0, 100.0]], (10, 11), axis=0),
        np.tile([[100.0, 400.0], [400.0, 100.0]], (10, 1)),
        100 * np.exp(np.sin(np.outer(np.arange(21), (1.0, 0.5)))),
    ],
    ids=[
        "steady",
        "noisy",
        "grows less than noise",
        "few rounds",
        "a jump",
        "every other",
        "swings",
    ],
)
def test_what_is_no_trend(works: Floats) -> None:
    assert (history_of(works).trend() == 0).all()


def test_a_jump_in_the_first_rounds_is_no_noise() -> None:
    history = history_of(np.array([[100.0, 100.0], [100.0, 100.0], [400.0, 100.0]]))
    assert history.noise() == pytest.approx([CONFIG.noise_floor] * 2)
    assert history.deviation() > CONFIG.far


@given(st.floats(0.6, 1.0), st.floats(0.0, 0.5))
def test_the_error_that_makes_a_round_longer_is_found(ratio: float, error: float) -> None:
    """A round as long as the mean of the longest role, with this error, shows it, or shows none at all."""
    seconds = np.array([100.0, 100.0 * ratio])
    factors = np.exp(error * NORMAL_NODES)
    finish_s = expected_max((seconds[:, None] * factors)[None], NORMAL_WEIGHTS)[0] / (
        factors @ NORMAL_WEIGHTS
    )
    found = measured_error(seconds, finish_s)
    if found < 0:
        assert ratio < 0.85
    elif finish_s > 100 * (1 + 1e-6):
        assert found == pytest.approx(error, abs=0.01)
    else:
        assert found <= error + 1e-9


def test_an_error_is_at_least_the_configured_one() -> None:
    history = history_of(courses(5, 0.0, 0.0))
    assert history.error() == CONFIG.law_error
    late = RoleLoad(work_device_s=400.0, busy_device_s=400.0, finish_s=120.0, was_waiting=True)
    for _ in range(3):
        history.add([late, late], (4, 4), 1.0)
    assert 0.3 < history.error() < 0.5
    alone = RoleLoad(work_device_s=4.0, busy_device_s=4.0, finish_s=120.0, was_waiting=True)
    history.add([late, alone], (4, 4), 1.0)
    assert 0.3 < history.error() < 0.5, "a round of one role alone says nothing"


def test_a_line_is_that_of_most_values() -> None:
    at = np.arange(11, dtype=np.float64)
    values = 3 * at + 2
    values[[0, 4, 10]] += 100, -50, 80
    assert median_line(at, values, np.ones(11)) == pytest.approx((3.0, 0.0))
