"""Group-relative advantages against their definition."""

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from by_name import group_advantages
from hypothesis import example, given, strategies as st
from numpy.testing import assert_allclose

from gcore_trainer import (
    BatchError,
    ScoredGroup,
    advantage_estimator,
    gae_advantages,
    grpo_advantages,
)
from gcore_trainer.advantages.estimator import get_advantage_estimator, whiten, whitening_moments
from gcore_trainer.advantages.estimators.reinforce.reinforce_plus_plus import discounted_returns
from gcore_trainer.advantages.estimators.remax import remax_advantages
from gcore_trainer.advantages.estimators.rloo import rloo_advantages

scores = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


@given(scores=scores, epsilon=st.floats(1e-8, 1e-2))
@example(
    scores=[86.09829974652448] * 3, epsilon=1e-8
)  # their mean in floating point is another number
def test_the_group_is_centred_and_scaled(scores: list[float], epsilon: float) -> None:
    exact = [Fraction(score) for score in scores]
    mean = statistics.mean(exact)
    scale = statistics.stdev(scores) + epsilon
    expected = [float(score - mean) / scale for score in exact]
    # The mean of scores up to 100 may be off by a rounding, which a small scale makes large.
    rounding = np.spacing(100.0) / scale
    assert_allclose(
        grpo_advantages(scores, epsilon=epsilon), expected, rtol=1e-6, atol=1e-6 + rounding
    )


@given(scores=scores)
def test_dr_grpo_only_centres(scores: list[float]) -> None:
    mean = statistics.fmean(scores)
    advantages = grpo_advantages(scores, norm_adv_by_std_in_grpo=False)
    assert advantages.dtype == np.float32
    assert_allclose(advantages, [score - mean for score in scores], rtol=1e-6, atol=1e-5)


def test_a_group_without_a_signal_has_none() -> None:
    for score in (1.0, 0.1):  # the mean of three times 0.1 is not 0.1
        assert (
            grpo_advantages([score] * 3).tolist()
            == rloo_advantages([score] * 3).tolist()
            == [0.0, 0.0, 0.0]
        )


def test_a_single_response_keeps_its_score() -> None:
    assert_allclose(grpo_advantages([0.5]), [0.5], rtol=1e-5)
    for estimator in ("dr_grpo", "reinforce_plus_plus_baseline", "rloo"):
        assert group_advantages([0.5], estimator).tolist() == [0.5]


def test_maxrl_weighs_a_success_by_how_rare_it_is() -> None:
    """In expectation the gradient of log p, cut after n - 1 terms: sum_k (1 - p)^(k - 1) grad p."""
    n, p = 5, 0.3
    expected = 0.0
    for successes in range(n + 1):
        scores = [1.0] * successes + [0.0] * (n - successes)
        advantages = group_advantages(scores, "maxrl")
        # grad log p(response) is 1/p of a success and -1/(1 - p) of a failure, for p itself as the parameter.
        gradients = np.where(np.array(scores) > 0, 1 / p, -1 / (1 - p))
        chance = math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        expected += chance * float((advantages * gradients).mean())
    assert_allclose(expected, sum((1 - p) ** (k - 1) for k in range(1, n)), rtol=1e-6)
    assert group_advantages([0.0, 0.0], "maxrl").tolist() == [0.0, 0.0]
    with pytest.raises(BatchError, match=r"expected numbers of at least 0"):
        group_advantages([-1.0, 1.0], "maxrl")


PARTS = st.lists(st.tuples(*[st.integers(-50, 50)] * 2), min_size=2, max_size=6)


@given(rows=PARTS, weight=st.floats(-2.0, 2.0), scale=st.integers(1, 100))
def test_gdpo_normalises_the_parts_one_by_one(
    rows: list[tuple[int, int]], weight: float, scale: int
) -> None:
    parts = np.array(rows, np.float64)
    expected = np.zeros(len(rows))
    for values, w in zip(parts.T, (1.0, weight), strict=True):
        expected += w * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    estimator = get_advantage_estimator("gdpo")
    # How large a part is has no influence beyond the small constant.
    for factor in (1, scale):
        masks = [np.ones(1, np.bool_)] * len(rows)
        group = ScoredGroup(
            rewards=[np.zeros(1)] * len(rows),
            masks=masks,
            parts=[{"right": a, "short": factor * b, "turns": 9.0} for a, b in rows],
        )
        advantages, _ = estimator(group, gdpo_rewards={"right": 1.0, "short": weight})
        assert_allclose(np.concatenate(advantages), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(BatchError, match=r"^parts is .*; expected a part 'long' of the reward$"):
        estimator(group, gdpo_rewards={"long": 1.0})


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]], [1.0, math.nan], [1.0, math.inf], 1.0])
def test_scores_that_cannot_be_compared_are_refused(bad: list[float]) -> None:
    with pytest.raises(BatchError, match=r"^scores is "):
        grpo_advantages(bad)


@given(scores=scores)
def test_rloo_compares_with_the_others(scores: list[float]) -> None:
    n = len(scores)
    expected = [score - (math.fsum(scores) - score) / (n - 1) for score in scores]
    assert_allclose(rloo_advantages(scores), expected, rtol=1e-5, atol=1e-4)


def test_remax_compares_with_the_greedy_response() -> None:
    assert_allclose(remax_advantages([1.0, 0.0, 0.25], 0.5), [0.5, -0.5, -0.25])
    with pytest.raises(BatchError, match=r"^scores is "):
        remax_advantages([1.0], math.nan)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-1.0 / 2**0.5, 1.0 / 2**0.5]),
        ("dr_grpo", [-0.5, 0.5]),
        ("reinforce_plus_plus_baseline", [-0.5, 0.5]),
        ("rloo", [-1.0, 1.0]),
        ("opo", [-0.5, 0.5]),
        ("grpo_passk", [0.0, 2.0**0.5]),
        ("maxrl", [-1.0, 1.0]),
    ],
)
def test_estimators_by_name(estimator: str, expected: list[float]) -> None:
    assert_allclose(group_advantages([0.0, 1.0], estimator), expected, rtol=1e-5)


tokens = st.lists(
    st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=12
)


@given(rows=tokens, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_weighted_sum_of_td_errors(
    rows: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, over the tokens of the policy alone."""
    rewards, values = (np.array([row[i] for row in rows], np.float64) for i in (0, 1))
    mask = np.array([row[2] for row in rows])
    advantages, returns = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    r, v = rewards[mask], values[mask]
    deltas = r + gamma * np.append(v, 0.0)[1:] - v
    expected = [
        sum((gamma * lam) ** i * d for i, d in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    assert_allclose(advantages[mask], expected, rtol=1e-9, atol=1e-9)
    assert_allclose(returns[mask], np.array(expected) + v, rtol=1e-9, atol=1e-9)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(rows=tokens, gamma=st.floats(0, 1))
def test_returns_without_a_critic_are_gae_of_zero_values(
    rows: list[tuple[float, float, bool]], gamma: float
) -> None:
    rewards, mask = np.array([row[0] for row in rows]), np.array([row[2] for row in rows])
    expected, _ = gae_advantages(rewards, np.zeros(len(rows)), mask, gamma=gamma, lam=1.0)
    assert_allclose(discounted_returns(rewards, mask, gamma=gamma), expected, rtol=1e-9, atol=1e-9)


@given(parts=st.lists(tokens, min_size=1, max_size=4))
def test_whitening_knows_the_whole_batch_by_its_moments(
    parts: list[list[tuple[float, float, bool]]],
) -> None:
    values = [np.array([row[0] for row in part]) for part in parts]
    masks = [np.array([row[2] for row in part]) for part in parts]
    batch = sum(
        (whitening_moments([v], [m]) for v, m in zip(values, masks, strict=True)), np.zeros(3)
    )
    assert_allclose(batch, whitening_moments(values, masks), rtol=1e-12, atol=1e-12)
    joined = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
    for value, mask in zip(values, masks, strict=True):
        whitened = whiten(value, mask, batch)
        assert not whitened[~mask].any()
        if joined.size > 1:
            expected = (value - joined.mean()) / np.sqrt(joined.var(ddof=1) + 1e-8)
            assert_allclose(whitened[mask], expected[mask], rtol=1e-4, atol=1e-4)


def test_returns_are_given_exactly_where_a_critic_is_needed() -> None:
    masks = [np.ones(2, np.bool_), np.ones(3, np.bool_)]
    values = [np.zeros(2), np.zeros(3)]
    group = ScoredGroup(rewards=values, masks=masks, values=values)
    pair = advantage_estimator(needs_critic=True)(lambda _group: (values, values))
    assert pair(group) == (values, values)
    # Of two responses, a tuple of two arrays is their advantages.
    alone = advantage_estimator()(lambda _group: tuple(values))
    assert alone(group) == (tuple(values), None)
    with pytest.raises(BatchError, match="returns is None; expected returns"):
        advantage_estimator(needs_critic=True)(alone.function)(group)
    with pytest.raises(BatchError, match="expected None for an advantage estimator with needs_"):
        advantage_estimator()(pair.function)(group)


@given(seed=st.integers(0, 2**32 - 1), is_normed=st.booleans())
def test_process_supervision_adds_up_the_steps_that_follow(seed: int, is_normed: bool) -> None:
    """DeepSeekMath, section 4.1.3: the advantage of a token is the sum of normalised rewards from its step on."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, 3)
    rewards = [rng.normal(size=size).round(1) for size in sizes]
    ends = [2 * np.arange(1, size + 1) + 1 for size in sizes]
    turns: list[list[tuple[int, int, float, int]]] = []
    for steps, stops in zip(rewards, ends, strict=True):
        starts = [0, *stops[:-1].tolist()]
        turns.append(list(zip(starts, stops.tolist(), steps.tolist(), [0] * 4, strict=False)))
    masks = [np.ones(stops[-1] + 1, np.bool_) for stops in ends]
    group = ScoredGroup(rewards=[np.zeros(m.size) for m in masks], masks=masks, turns=turns)
    options = {"norm_adv_by_std_in_grpo": is_normed}
    advantages, _ = get_advantage_estimator("grpo_process")(group, **options)
    together = np.concatenate(rewards)
    scale = np.std(together, ddof=1) + 1e-6 if is_normed else 1.0
    for steps, stops, actual in zip(rewards, ends, advantages, strict=True):
        normalised = (steps - together.mean()) / scale
        expected = [normalised[stops - 1 >= t].sum() for t in range(actual.size)]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), is_normed=st.booleans())
def test_gigpo_compares_turns_at_equal_states(seed: int, is_normed: bool) -> None:
    """Verl-agent's two steps, one turn after the other; a state that one turn alone starts at has no advantage."""
    rng = np.random.default_rng(seed)
    turns: list[list[tuple[int, int, float, int]]] = []
    sizes = rng.integers(1, 5, 4)
    for size in sizes:
        values = rng.normal(size=size).round(1)
        states = rng.integers(0, 3, size)
        turns.append([(3 * t, 3 * t + 2, float(values[t]), int(states[t])) for t in range(size)])
    scores = rng.normal(size=4).round(1)
    masks = [np.arange(3 * size) % 3 < 2 for size in sizes]
    rewards = [np.append(np.zeros(m.size - 1), r) for m, r in zip(masks, scores, strict=True)]
    group = ScoredGroup(rewards=rewards, masks=masks, turns=turns)
    options = {"step_advantage_w": 0.5, "norm_adv_by_std_in_grpo": is_normed}
    advantages, _ = get_advantage_estimator("gigpo")(group, **options)

    def scale(values: list[float]) -> float:
        return float(np.std(values, ddof=1)) + 1e-6 if is_normed else 1.0

    returns: dict[int, list[float]] = {}
    for session in turns:
        for *_, value, state in session:
            returns.setdefault(state, []).append(value)
    for session, score, mask, actual in zip(turns, scores, masks, advantages, strict=True):
        expected = np.zeros(mask.size)
        for start, stop, value, state in session:
            expected[start:stop] = (score - scores.mean()) / scale(scores.tolist())
            alike = returns[state]
            if len(alike) > 1:
                expected[start:stop] += 0.5 * (value - np.mean(alike)) / scale(alike)
        np.testing.assert_allclose(actual[mask], expected[mask], rtol=1e-5, atol=1e-5)
