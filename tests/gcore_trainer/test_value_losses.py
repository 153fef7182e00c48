"""The clipped value loss and its gradient case by case, and explained variance of a batch in parts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from numpy.testing import assert_allclose

from gcore_trainer.objectives.value import explained_variance, value_loss, value_moments

number = st.integers(-3000, 3000).map(
    lambda n: n / 1000
)  # no subnormals: which clip they hit is rounding's choice
rows = st.lists(st.tuples(number, number, number), min_size=1, max_size=20)


def one_token(value: float, old: float, target: float, c: float) -> tuple[float, float, bool]:
    """Loss, its derivative, and whether the clip is active."""
    nearest = min(max(value, old - c), old + c)
    is_clipped = abs(nearest - target) > abs(value - target)
    error = nearest - target if is_clipped else value - target
    return error**2 / 2, 0.0 if is_clipped else error, is_clipped


@given(table=rows, c=st.floats(0.01, 3.0))
def test_value_loss(table: list[tuple[float, float, float]], c: float) -> None:
    v, old, target = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*table, strict=True)
    )
    assume((((v - old).abs() - c).abs() > 1e-9).all())
    nearest = old + (v - old).clamp(-c, c)
    assume(((nearest == v) | (((nearest - target).abs() - (v - target).abs()).abs() > 1e-9)).all())
    values = v.clone().requires_grad_()
    loss, clipped = value_loss(values, old, target, cliprange_value=c)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    expected = np.array([one_token(*row, c) for row in table])
    assert_allclose(loss.detach().numpy(), expected[:, 0], rtol=1e-9, atol=1e-12)
    assert_allclose(gradient.numpy(), expected[:, 1], rtol=1e-9, atol=1e-12)
    assert_allclose(clipped.numpy(), expected[:, 2])


def test_without_a_bound_it_is_half_the_squared_error() -> None:
    values, old, returns = torch.tensor([1.0, -50.0]), torch.zeros(2), torch.tensor([3.0, 50.0])
    loss, clipped = value_loss(values, old, returns, cliprange_value=math.inf)
    assert loss.tolist() == [2.0, 5000.0]
    assert not clipped.any()


@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(2, 60),
    cut=st.integers(0, 60),
    offset=st.sampled_from([0.0, 100.0]),
)
def test_explained_variance_of_a_batch_in_parts(
    seed: int, num: int, cut: int, offset: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    returns, noise = torch.randn(2, num, generator=generator, dtype=torch.float64)
    returns, values = returns + offset, returns + 0.5 * noise + 0.2
    mask = torch.rand(num, generator=generator) < 0.8
    mask[:2] = True
    assume(
        torch.var(returns[mask]) > 0.01
    )  # sums of squares hold a spread far below the mean less exactly
    whole = value_moments(values, returns, mask)
    parts = sum(
        value_moments(values[s], returns[s], mask[s]) for s in (slice(0, cut), slice(cut, num))
    )
    assert isinstance(parts, torch.Tensor)
    assert_allclose(parts.numpy(), whole.numpy(), rtol=1e-12, atol=1e-9)
    # As verl measures it.
    expected = 1 - torch.var((returns - values)[mask]) / (torch.var(returns[mask]) + 1e-5)
    assert explained_variance(parts) == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)


def test_a_perfect_critic_explains_all_and_a_mean_nothing() -> None:
    returns, mask = torch.tensor([1.0, -2.0, 4.0, 9.0]), torch.tensor([True, True, True, False])
    assert explained_variance(value_moments(returns, returns, mask)) == 1.0
    nothing = explained_variance(value_moments(torch.full((4,), 1.0), returns, mask))
    assert nothing == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_tokens_explain_nothing(count: int) -> None:
    mask = torch.arange(3) < count
    assert explained_variance(value_moments(torch.zeros(3), torch.ones(3), mask)) == 0.0


def test_moments_are_kept_in_double_precision_without_a_gradient() -> None:
    values = torch.zeros(2, requires_grad=True)
    moments = value_moments(values, torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    assert moments.dtype == torch.float64
    assert not moments.requires_grad
    assert moments.tolist() == [2.0, 4.0, 10.0, 4.0, 10.0]
