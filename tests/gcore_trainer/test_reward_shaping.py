"""Length and KL penalties by hand, and against the arithmetic of DAPO's reward manager; KL controllers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose

from gcore_trainer import (
    BatchError,
    ConfigError,
    KLControlConfig,
    KLController,
    StateError,
    kl_penalty,
    kl_rewards,
    overlong_penalty,
)
from gcore_trainer.advantages.reward_shaping import kl_estimates
from gcore_trainer.config import RewardKL

log_probs = st.floats(-8.0, 0.0)
tokens = st.lists(st.tuples(log_probs, log_probs, st.booleans()), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (140, -1.0)],
)
def test_overlong_penalty(length: int, expected: float) -> None:
    penalty = overlong_penalty(length, max_response_length=100, overlong_buffer_len=20)
    assert penalty == pytest.approx(expected)
    scaled = overlong_penalty(
        length, max_response_length=100, overlong_buffer_len=20, penalty_factor=0.5
    )
    assert scaled == pytest.approx(expected / 2)


@given(data=st.data(), limit=st.integers(1, 200), factor=st.floats(0.0, 4.0))
def test_overlong_penalty_is_that_of_the_dapo_reward_manager(
    data: st.DataObject, limit: int, factor: float
) -> None:
    buffer = data.draw(st.integers(1, limit))
    length = data.draw(
        st.integers(0, limit)
    )  # a longer one does not exist there, and is not bounded
    over = length - (limit - buffer)
    expected = min(-over / buffer * factor, 0)
    penalty = overlong_penalty(
        length, max_response_length=limit, overlong_buffer_len=buffer, penalty_factor=factor
    )
    assert penalty == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("buffer", [0, -3, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"overlong_buffer_len is {buffer}; expected 1 to max_response_length=100",
    ):
        overlong_penalty(5, max_response_length=100, overlong_buffer_len=buffer)


@pytest.mark.parametrize("factor", [-0.1, math.inf, math.nan])
def test_a_penalty_factor_out_of_bounds_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=f"penalty_factor is {factor}"):
        overlong_penalty(5, max_response_length=100, overlong_buffer_len=10, penalty_factor=factor)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@given(rows=tokens)
def test_estimates_are_those_of_the_loss(
    kind: RewardKL, rows: list[tuple[float, float, bool]]
) -> None:
    table = np.array(rows, np.float64)
    mask = table[:, 2].astype(np.bool_)
    expected = kl_penalty(
        torch.from_numpy(table[:, 0]), torch.from_numpy(table[:, 1]), kind
    ).numpy()
    actual = kl_estimates(table[:, 0], table[:, 1], mask, kind)
    assert_allclose(actual, np.where(mask, expected, 0.0), rtol=1e-9, atol=1e-12)


def test_the_score_is_on_the_last_token_that_counts() -> None:
    p, q = (
        np.array([-1.0, -2.0, -0.5, -4.0], np.float32),
        np.array([-1.5, -1.0, -0.5, -np.inf], np.float32),
    )
    rewards = kl_rewards(3.0, p, q, np.array([True, True, True, False]), coef=0.1)
    assert_allclose(rewards, [-0.05, 0.1, 3.0, 0.0], rtol=1e-6, atol=1e-9)
    rewards = kl_rewards(3.0, p, q, np.array([True, True, False, False]), coef=0.1, kind="k2")
    assert_allclose(rewards, [-0.0125, 2.95, 0.0, 0.0], rtol=1e-6, atol=1e-9)


def test_a_response_without_tokens_is_refused() -> None:
    with pytest.raises(BatchError, match="mask of 2 tokens has none that counts"):
        kl_rewards(1.0, np.zeros(2), np.zeros(2), np.zeros(2, np.bool_), coef=0.1)


def adaptive(**settings: Any) -> KLController:
    """A controller that follows the divergence."""
    return KLController(KLControlConfig(type="adaptive", **settings))


def test_a_fixed_coefficient_stays() -> None:
    controller = KLController(KLControlConfig(kl_coef=0.3))
    controller.update(100.0, 10)
    assert controller.value == 0.3


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_an_adaptive_coefficient_follows_the_divergence(kl: float, factor: float) -> None:
    controller = adaptive(kl_coef=0.2, target_kl=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor)


def test_a_divergence_that_follows_the_coefficient_ends_at_its_target() -> None:
    controller = adaptive(kl_coef=0.01, target_kl=6.0, horizon=1000)
    for _ in range(2000):
        controller.update(1.2 / controller.value, 100)
    assert controller.value == pytest.approx(0.2, rel=1e-6)


def test_a_coefficient_is_resumed() -> None:
    first = adaptive(kl_coef=0.2, target_kl=6.0, horizon=1000)
    first.update(9.0, 64)
    second = adaptive(kl_coef=1.0, target_kl=6.0, horizon=1000)
    second.load_state(first.state())
    for controller in (first, second):
        controller.update(3.0, 64)
    assert second.value == first.value != 0.2
    fixed = KLController(KLControlConfig(kl_coef=1.0))
    fixed.load_state(KLController(KLControlConfig(kl_coef=0.5)).state())
    assert fixed.value == 0.5


@pytest.mark.parametrize(
    "state", [{}, {"value": math.nan}, {"value": -1.0}, {"value": 1.0, "target": 2.0}]
)
def test_a_state_that_is_none_is_refused(state: dict[str, float]) -> None:
    for controller in (
        KLController(KLControlConfig(kl_coef=1.0)),
        adaptive(kl_coef=1.0, target_kl=1.0, horizon=1),
    ):
        with pytest.raises(StateError, match=r"state is .* one entry 'value'"):
            controller.load_state(state)
        assert controller.value == 1.0


def test_controllers_refuse_what_is_out_of_bounds() -> None:
    with pytest.raises(ConfigError, match=r"kl_coef is -0\.1"):
        KLController(KLControlConfig(kl_coef=-0.1))
    with pytest.raises(ConfigError, match="kl_coef is inf"):
        adaptive(kl_coef=math.inf, target_kl=6.0, horizon=10)
    with pytest.raises(ConfigError, match="target_kl is 0"):
        adaptive(kl_coef=0.1, target_kl=0.0, horizon=10)
    with pytest.raises(ConfigError, match="horizon is 0"):
        adaptive(kl_coef=0.1, target_kl=6.0, horizon=0)
    controller = adaptive(kl_coef=0.1, target_kl=6.0, horizon=10)
    with pytest.raises(BatchError, match="current_kl is nan"):
        controller.update(math.nan, 1)
    with pytest.raises(
        BatchError, match="n_steps is 50; expected 0 or more, and less than five times horizon=10"
    ):
        controller.update(1.0, 50)
    assert controller.value == 0.1
