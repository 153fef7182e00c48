"""Tournaments of a judge: who meets whom in groups of any size, and their agreement with comparisons of all pairs."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import kendalltau
from scripted_judge import compared, decode, pairwise

from gcore_rollout import NoScoreError, RewardConfigError

TOURNAMENTS = ["knockout", "swiss"]


def noisy_judge(strengths: Sequence[float], noise: float) -> Callable[[str, str], str]:
    """A Bradley-Terry judge that prefers the first place; it always answers a question in the same way."""

    def say(a: str, b: str) -> str:
        lead = strengths[int(a)] - strengths[int(b)] + 0.2
        chance = 1 / (1 + math.exp(-lead / noise))
        is_better = random.Random(f"{strengths} {a} {b}").random() < chance
        return "Winner: A" if is_better else "Winner: B"

    return say


def meetings(judge: Any) -> list[tuple[str, str]]:
    """The completions of every question that the judge's engine was asked."""
    questions = [decode(request.prompt_token_ids) for request in judge.model.engine.requests]
    pairs = [question.split("|")[1:] for question in questions]
    return [(a, b) for a, b in pairs]


@pytest.mark.parametrize("scheme", ["all_pairs", *TOURNAMENTS])
@settings(max_examples=25)
@given(size=st.integers(2, 24), seed=st.integers(0, 2**32), noise=st.sampled_from([0.01, 0.5, 5]))
def test_groups_of_any_size(scheme: Any, size: int, seed: int, noise: float) -> None:
    """Every response plays, no pair meets twice but for the other order, and the order of the group is the same."""
    rng = random.Random(seed)
    say = noisy_judge([rng.gauss(0, 1) for _ in range(size)], noise)
    judge = pairwise(say, scheme=scheme)
    texts = [str(i) for i in range(size)]
    scores = [result.score for result in asyncio.run(compared(judge, *texts))]
    pairs = meetings(judge)
    assert {a for a, _ in pairs} == set(texts)
    assert len(pairs) == len(set(pairs))
    assert {(b, a) for a, b in pairs} == set(pairs)
    num_rounds = math.ceil(math.log2(size))
    num_pairs = {
        "all_pairs": size * (size - 1) // 2,
        "knockout": size - 1,
        "swiss": size // 2 * num_rounds,
    }
    assert len(pairs) == 2 * num_pairs[scheme]
    engine: Any = judge.model.engine
    assert engine.calls == (1 if scheme == "all_pairs" else num_rounds)
    for text, score in zip(texts, scores, strict=True):
        wins = [say(text, b) == "Winner: A" for a, b in pairs if a == text]
        wins += [say(a, text) == "Winner: B" for a, b in pairs if b == text]
        assert score == pytest.approx(np.mean(wins))
    order = rng.sample(range(size), size)
    again = asyncio.run(compared(pairwise(say, scheme=scheme), *(texts[i] for i in order)))
    assert [result.score for result in again] == [scores[i] for i in order]


@pytest.mark.parametrize("scheme", TOURNAMENTS)
@settings(max_examples=25)
@given(size=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_a_judge_without_noise_finds_the_best(scheme: Any, size: int, seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.sample(range(size), size)
    judge = pairwise(
        lambda a, b: f"Winner: {'A' if ranks[int(a)] > ranks[int(b)] else 'B'}", scheme=scheme
    )
    scores = [result.score for result in asyncio.run(compared(judge, *map(str, range(size))))]
    [best] = [i for i, score in enumerate(scores) if score == 1.0]
    assert ranks[best] == size - 1


@pytest.mark.parametrize("scheme", TOURNAMENTS)
async def test_the_draw_is_fair(scheme: Any) -> None:
    """Of three responses, one does not play in the first round: each of them in a third of 300 groups."""
    left_out = Counter[str]()
    for number in range(300):
        judge = pairwise(lambda *_: "Winner: tie", scheme=scheme)
        texts = {f"{number}a": "a", f"{number}b": "b", f"{number}c": "c"}
        results = await compared(judge, *texts)
        assert [result.score for result in results] == [0.5, 0.5, 0.5]
        first_round = {text for pair in meetings(judge)[:2] for text in pair}
        [idle] = texts.keys() - first_round
        left_out[texts[idle]] += 1
    assert min(left_out[letter] for letter in "abc") > 70  # 100 expected, standard deviation 8


async def test_matches_that_cannot_be_read() -> None:
    """Such a match is a tie, of which one goes on; a response with no verdict at all ends the comparison."""

    def say(a: str, b: str) -> str:
        return "hm" if "x" in a + b else f"Winner: {'A' if a > b else 'B'}"

    results = await compared(pairwise(say, scheme="swiss", on_unparsable="tie"), "a", "b", "c", "x")
    assert results[3].score == 0.5
    assert results[3].parts == {"parsed": 0.0}
    with pytest.raises(NoScoreError, match="none of 2 verdicts on completion 0 could be parsed"):
        await compared(pairwise(say, scheme="knockout"), "a", "x")
    with pytest.raises(
        RewardConfigError, match="scheme is 'cup'; expected one of all_pairs, knock"
    ):
        pairwise(say, scheme="cup")


def test_agreement_with_all_pairs() -> None:
    """Of 8 responses, a Swiss tournament agrees better than a knock-out, and takes fewer than half of the questions."""
    taus: dict[str, list[float]] = {scheme: [] for scheme in TOURNAMENTS}
    num_equal = Counter[str]()
    num_groups = 60
    for seed in range(num_groups):
        rng = random.Random(seed)
        say = noisy_judge([rng.gauss(0, 1) for _ in range(8)], noise=0.5)
        texts = [str(i) for i in range(8)]
        reference = [r.score for r in asyncio.run(compared(pairwise(say), *texts))]
        for scheme in taus:
            judge = pairwise(say, scheme=scheme)
            scores = [r.score for r in asyncio.run(compared(judge, *texts))]
            assert len(meetings(judge)) == {"knockout": 14, "swiss": 24}[scheme]
            result: Any = kendalltau(reference, scores)
            taus[scheme].append(result.statistic)
            num_equal[scheme] += reference[int(np.argmax(scores))] == max(reference)
    tau = {scheme: float(np.mean(values)) for scheme, values in taus.items()}
    for scheme in TOURNAMENTS:
        share = num_equal[scheme] / num_groups
        print(f"{scheme}: Kendall's tau {tau[scheme]:.2f}, same best {share:.2f}")
        assert share > 0.7
    assert 0.5 < tau["knockout"] < tau["swiss"]
    assert tau["swiss"] > 0.7
