"""pass@k and maj@k against every subset of the responses, and against verl."""

import math
import random
from collections import Counter
from importlib import import_module
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gcore_llm.evaluation.estimators import (
    Answered,
    Estimate,
    estimates,
    group_sizes,
    maj_at_k,
    pass_at_k,
)

ANSWERS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(
    right: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_is_stable() -> None:
    """Where the complement is so close to 1 that a difference of floats would be 0, or the numbers overflow a float."""
    assert pass_at_k(10**9, 1, 1) == 1e-9
    assert pass_at_k(4000, 1, 2000) == 0.5
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == 1.0
    # The product of the paper's own code, in floats.
    assert pass_at_k(200, 3, 100) == pytest.approx(
        1 - math.prod(1 - 100 / i for i in range(198, 201))
    )
    for num, right, k in ((3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)):
        with pytest.raises(ValueError, match="expected 1 to num=3, and 0 to num=3"):
            pass_at_k(num, right, k)


def voted(answers: tuple[str | None, ...], score_of: dict[str, float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    return (
        fmean(score_of[a] for a, count in votes.items() if count == max(votes.values()))
        if votes
        else 0.0
    )


@settings(max_examples=150)
@given(ANSWERS, st.data())
def test_maj_at_k_is_the_mean_over_subsets(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    score_of = {answer: data.draw(st.floats(-1, 1)) for answer in "abcd"}
    scores = [0.0 if answer is None else score_of[answer] for answer in answers]
    expected = fmean(voted(subset, score_of) for subset in combinations(answers, k))
    assert maj_at_k(answers, scores, k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_with_ties_and_without_answers() -> None:
    assert maj_at_k(["a", "b"], [1.0, 0.0], 2) == 0.5
    assert maj_at_k(["a", "b", "b", "c", "c"], [1.0, 1.0, 1.0, 0.0, 0.0], 5) == 0.5
    assert maj_at_k([None, None], [0.0, 0.0], 1) == maj_at_k([None, None], [0.0, 0.0], 2) == 0.0
    assert maj_at_k([None, None, "a"], [0.0, 0.0, 1.0], 3) == 1.0, (
        "one vote is a majority of the votes"
    )
    rng = random.Random(0)
    answers = [rng.choice("abcdefgh") for _ in range(64)]
    assert maj_at_k(answers, [float(answer == "a") for answer in answers], 1) == pytest.approx(
        answers.count("a") / 64
    )
    with pytest.raises(ValueError, match="k is 3; expected 1 to 2"):
        maj_at_k(["a", "b"], [1.0, 0.0], 3)


@pytest.mark.slow
def test_against_verl() -> None:
    """verl draws subsets with replacement; at k of a large n, its means come close to those without."""
    metrics: Any = import_module("verl.trainer.ppo.metric_utils")
    rng = np.random.default_rng(0)
    answers = rng.choice(["7", "8", "9"], p=[0.45, 0.3, 0.25], size=64).tolist()
    scores = [float(answer == "7") for answer in answers]
    found = metrics.process_validation_metrics(
        ["sums"] * 64, ["prompt"] * 64, {"acc": scores, "pred": answers}, seed=1
    )
    own = estimates([Answered(scores=tuple(scores), answers=tuple(answers))], right_from=1.0)
    theirs = found["sums"]["acc"]
    assert own["avg@64"].mean == pytest.approx(theirs["mean@64"])
    for k in (2, 4, 8):
        assert own[f"pass@{k}"].mean == pytest.approx(theirs[f"best@{k}/mean"], abs=0.05)
        assert own[f"maj@{k}"].mean == pytest.approx(theirs[f"maj@{k}/mean"], abs=0.1)


def test_estimates() -> None:
    answered = [
        Answered(scores=(1.0, 0.0, 0.0), answers=("1", "2", "2")),
        Answered(scores=(1.0, 1.0, 0.5), answers=("5", "5", None)),
    ]
    found = estimates(answered, right_from=1.0)
    assert list(found) == ["avg@3", "pass@2", "maj@2", "pass@3", "maj@3"]
    assert found["avg@3"] == Estimate(
        mean=fmean([1 / 3, 2.5 / 3]), stderr=stdev([1 / 3, 2.5 / 3]) / 2**0.5, num=2
    )
    assert str(found["avg@3"]) == "0.583 ± 0.250"
    assert (found["pass@3"].mean, found["maj@3"].mean, found["pass@2"].mean) == (
        1.0,
        0.5,
        fmean([2 / 3, 1.0]),
    )
    assert "maj@2" not in estimates(
        [Answered(scores=(1.0, 1.0), answers=(None, None))], right_from=1.0
    )
    assert list(estimates([Answered(scores=(1.0,), answers=("1",))], right_from=1.0)) == ["avg@1"]
    assert str(Estimate.of([0.25])) == "0.250"
    assert estimates([], right_from=1.0) == {}
    assert [group_sizes(n) for n in (0, 1, 2, 6, 8)] == [[], [], [2], [2, 4, 6], [2, 4, 8]]


def test_majorities_of_thousands_of_responses() -> None:
    """C(1200, 512) is no number of double precision. The answers win as often as each other."""
    answers = ["a", "b", "c", None] * 300
    assert maj_at_k(answers, [1.0, 0.0, 0.5, 0.0] * 300, 512) == pytest.approx(0.5, rel=1e-9)
