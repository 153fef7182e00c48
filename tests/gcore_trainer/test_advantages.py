"""Group-relative advantages against their definition."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from gcore_trainer import BatchError, grpo_advantages

scores = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


@given(scores=scores, epsilon=st.floats(1e-8, 1e-2))
def test_the_group_is_centred_and_scaled(scores: list[float], epsilon: float) -> None:
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    expected = [(score - mean) / (std + epsilon) for score in scores]
    assert_allclose(grpo_advantages(scores, epsilon=epsilon), expected, rtol=1e-6, atol=1e-6)


@given(scores=scores)
def test_dr_grpo_only_centres(scores: list[float]) -> None:
    mean = statistics.fmean(scores)
    advantages = grpo_advantages(scores, norm_adv_by_std_in_grpo=False)
    assert advantages.dtype == np.float32
    assert_allclose(advantages, [score - mean for score in scores], rtol=1e-6, atol=1e-5)


def test_a_group_without_a_signal_has_none() -> None:
    assert grpo_advantages([0.5]).tolist() == [0.0]
    assert grpo_advantages([1.0, 1.0, 1.0]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]], [1.0, math.nan], [1.0, math.inf], 1.0])
def test_scores_that_cannot_be_compared_are_refused(bad: list[float]) -> None:
    with pytest.raises(BatchError, match=r"^scores is "):
        grpo_advantages(bad)
