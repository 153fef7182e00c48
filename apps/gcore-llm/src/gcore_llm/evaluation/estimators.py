"""Estimators of a model's quality from n responses to each prompt, and their standard errors."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return the probability that one of k responses is right, unbiased, from ``num`` responses, some of them right.

    It is ``1 - C(n - c, k) / C(n, k)`` of Chen et al., "Evaluating Large Language Models Trained on Code"
    (arXiv 2107.03374, equation 1): the share of the subsets of k responses that hold a right one. The quotient is of
    exact integers, rounded once. `ValueError` unless ``1 <= k <= num`` and ``0 <= num_right <= num``.
    """
    if not 1 <= k <= num or not 0 <= num_right <= num:
        raise ValueError(
            f"k is {k} and num_right is {num_right}; expected 1 to num={num}, and 0 to num={num}"
        )
    subsets = math.comb(num, k)
    return (subsets - math.comb(num - num_right, k)) / subsets


def maj_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Return the score of the answer that most of k responses give, on average over all subsets of k of them.

    Answers that are most frequent together count in equal parts, which is their mean if one of them is drawn. A
    response without an answer (None) has no vote, and a subset without any vote has the score 0. The score of an answer
    is the mean of its responses' scores. `ValueError` unless ``1 <= k <= len(answers)``.

    For each number m of votes of the winners, the polynomial in x whose coefficient of x**j counts the ways to take j
    responses is multiplied up over the answers, next to the same one weighted by the winners' scores.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"k is {k}; expected 1 to {len(answers)}, the number of responses")
    scores_of: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            scores_of[answer].append(score)
    votes_and_scores = [(len(values), _mean(values)) for values in scores_of.values()]
    most_votes = max(map(len, scores_of.values()), default=0)
    if k == len(answers):
        winners = [score for count, score in votes_and_scores if count == most_votes]
        return _mean(winners) if winners else 0.0
    num_silent = answers.count(None)
    total = 0.0
    for m in range(1, min(most_votes, k) + 1):
        # [winners, responses drawn] of both polynomials; above k responses, or k // m winners, nothing is needed.
        ways = np.zeros((2, k // m + 1, k + 1))
        ways[0, 0] = [math.comb(num_silent, num_drawn) for num_drawn in range(k + 1)]
        for count, score in votes_and_scores:
            new_ways = np.zeros_like(ways)
            for votes in range(min(m, count + 1)):
                new_ways[:, :, votes:] += math.comb(count, votes) * ways[:, :, : k + 1 - votes]
            if count >= m:
                won = ways[:, :-1, : k + 1 - m].copy()
                won[1] += score * won[0]
                new_ways[:, 1:, m:] += math.comb(count, m) * won
            ways = new_ways
        scores_of_winners = ways[1, 1:, k]
        total += float((scores_of_winners / np.arange(1, len(scores_of_winners) + 1)).sum())
    return total / math.comb(len(answers), k)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts, with its standard error."""

    mean: float
    stderr: float | None
    """Standard error of the mean: the sample's standard deviation over the square root of the number of prompts, whose
    responses may depend on each other (Miller, arXiv 2411.00640). None with one prompt."""
    num: int
    """Prompts."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Return the estimate from one number of each prompt, at least one."""
        num = len(values)
        mean = _mean(values)
        if num < 2:
            return cls(mean=mean, stderr=None, num=num)
        variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
        return cls(mean=mean, stderr=math.sqrt(variance / num), num=num)

    def __str__(self) -> str:
        if self.stderr is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.stderr:.3f}"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The scored responses to one prompt."""

    scores: tuple[float, ...]
    answers: tuple[str | None, ...]
    """The answers that the reward found; see `gcore_rollout.Scored`."""


def group_sizes(n: int) -> list[int]:
    """Return the numbers k of responses that are reported with n: the powers of two from 2 on, and n."""
    powers = [2**power for power in range(1, n.bit_length())]
    if n > 1 and n not in powers:
        powers.append(n)
    return powers


def estimates(answered: Sequence[Answered], *, right_from: float) -> dict[str, Estimate]:
    """Return ``avg@n``, and with two responses a prompt or more ``pass@k`` and ``maj@k``, over prompts of the same n.

    ``maj@k`` is only there if the reward found an answer in any response. A response is right from the score
    ``right_from`` on. No prompts have no estimates.
    """
    if not answered:
        return {}
    n = len(answered[0].scores)
    by_name = {f"avg@{n}": Estimate.of([math.fsum(prompt.scores) / n for prompt in answered])}
    has_answers = any(set(prompt.answers) != {None} for prompt in answered)
    for k in group_sizes(n):
        shares: list[float] = []
        for prompt in answered:
            num_right = sum(score >= right_from for score in prompt.scores)
            shares.append(pass_at_k(n, num_right, k))
        by_name[f"pass@{k}"] = Estimate.of(shares)
        if has_answers:
            by_name[f"maj@{k}"] = Estimate.of(
                [maj_at_k(prompt.answers, prompt.scores, k) for prompt in answered]
            )
    return by_name
