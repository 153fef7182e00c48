"""Corrections find the truth under noise, shrug off what is wild, and stay in bounds."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gcore_placement import (
    Correction,
    EngineCosts,
    JobCosts,
    PlacementError,
    SwapCosts,
    TrainingCosts,
)
from gcore_placement.forecast import STAGES

ENGINE = EngineCosts(
    devices_per_replica=2,
    max_num_seqs=8,
    decode_base_s=1.0,
    decode_per_sequence_s=2.0,
    decode_per_context_token_s=3.0,
    prefill_per_token_s=4.0,
)
COSTS = JobCosts(
    policy=ENGINE,
    reward=ENGINE,
    training=TrainingCosts(
        base_s=1.0, per_token_s=2.0, per_pair_s=3.0, forward_share=0.5, sync_s=4.0
    ),
    swap=SwapCosts(sleep_s=1.0, wake_s=2.0, load_s=3.0),
)
ratios = st.floats(1e-6, 1e6)


def observed(*values: float, **options: float) -> Correction:
    correction = Correction(**options)  # pyright: ignore[reportArgumentType]
    for value in values:
        correction.observe("training", predicted_s=10.0, measured_s=10.0 * value)
    return correction


@given(true=st.floats(0.1, 10), seed=st.integers(0, 1000))
def test_the_truth_is_found_under_noise(true: float, seed: int) -> None:
    noise = np.random.default_rng(seed).lognormal(0.0, 0.1, 200)
    assert observed(*(true * noise)).factor("training") == pytest.approx(true, rel=0.15)


@given(before=st.floats(0.2, 5), after=st.floats(0.2, 5))
def test_a_change_is_followed_in_a_half_life(before: float, after: float) -> None:
    correction = observed(*[before] * 100, *[after] * 9, half_life=8.0)
    assert correction.factor("training") == pytest.approx(after)
    assert observed(*[before] * 100, *[after] * 7, half_life=8.0).factor(
        "training"
    ) == pytest.approx(before)


@given(
    calm=st.lists(st.floats(0.9, 1.1), min_size=3, max_size=40),
    wild=ratios,
    place=st.integers(0, 40),
    scale=ratios,
)
def test_one_wild_outlier_is_ignored(
    calm: list[float], wild: float, place: int, scale: float
) -> None:
    """Wherever it comes, the factor stays among what else was seen."""
    del scale
    with_outlier = [*calm[:place], wild, *calm[place:]]
    factor = observed(*with_outlier).factor("training")
    assert min(calm) * (1 - 1e-9) <= factor <= max(calm) * (1 + 1e-9)


@given(seen=st.lists(ratios, max_size=100), most=st.floats(1, 100))
def test_factors_stay_in_bounds(seen: list[float], most: float) -> None:
    correction = observed(*seen, most=most)
    assert 1 / most <= correction.factor("training") <= most
    if len(seen) < 3:
        assert correction.factor("training") == 1
    assert all(correction.factor(stage) == 1 for stage in STAGES if stage != "training")


@settings(max_examples=20)
@given(seen=st.lists(ratios, max_size=100), later=st.lists(ratios, max_size=5))
def test_state_is_plain_and_continues_alike(seen: list[float], later: list[float]) -> None:
    correction, resumed = observed(*seen), Correction()
    resumed.load_state(json.loads(json.dumps(correction.state())))
    for value in later:
        for each in (correction, resumed):
            each.observe("training", predicted_s=1.0, measured_s=value)
    assert resumed.factor("training") == correction.factor("training")
    assert resumed.state() == correction.state()


def test_costs_are_corrected_by_stage() -> None:
    correction = Correction()
    for factor, stage in enumerate(STAGES, start=2):
        for _ in range(3):
            correction.observe(stage, predicted_s=1.0, measured_s=float(factor))
    corrected = correction.correct(COSTS)
    assert corrected.policy == EngineCosts(
        devices_per_replica=2,
        max_num_seqs=8,
        decode_base_s=2.0,
        decode_per_sequence_s=4.0,
        decode_per_context_token_s=6.0,
        prefill_per_token_s=8.0,
    )
    assert corrected.reward is not None
    assert corrected.reward.decode_base_s == 3.0
    training = corrected.training
    assert (training.base_s, training.per_token_s, training.per_pair_s, training.sync_s) == (
        5.0,
        10.0,
        15.0,
        24.0,
    )
    # Preparation takes 4 times what was predicted: 0.5 of 2 s a token.
    assert training.forward_share * training.per_token_s == pytest.approx(4 * 0.5 * 2.0)
    assert vars(corrected.swap) == {"sleep_s": 7.0, "wake_s": 14.0, "load_s": 21.0}
    assert Correction().correct(COSTS) == COSTS


def test_wrong_input_is_refused_and_changes_nothing() -> None:
    correction = observed(1.0, 2.0, 3.0)
    before = correction.state()
    with pytest.raises(
        PlacementError, match=r"stage is 'sleep'; expected one of generation, reward, .*"
    ):
        correction.observe("sleep", predicted_s=1.0, measured_s=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        PlacementError, match=r"predicted_s is 0.0; expected a finite number above 0"
    ):
        correction.observe("training", predicted_s=0.0, measured_s=1.0)
    with pytest.raises(PlacementError, match=r"state is .*; expected of Correction.state\(\)"):
        correction.load_state({"ratios": {"training": [1.0]}})
    with pytest.raises(PlacementError, match=r"ratios.swap is 1.0; expected a list"):
        correction.load_state({"ratios": {**before["ratios"], "swap": 1.0}})
    wrong = {"ratios": {**before["ratios"], "swap": [-1.0]}}
    with pytest.raises(
        PlacementError, match=r"ratios.swap is -1.0; expected a finite number above 0"
    ):
        correction.load_state(wrong)
    assert correction.state() == before
    with pytest.raises(PlacementError, match=r"min_count is 3; expected at most window \(2\)"):
        Correction(window=2)
    with pytest.raises(
        PlacementError, match=r"most is 0.5; expected a finite number of at least 1"
    ):
        Correction(most=0.5)
