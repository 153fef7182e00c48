"""Estimators of a model's quality from n responses to each prompt, and their standard errors."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k responses is right, from ``num`` responses.

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
    """Return the score of the most frequent answer among k responses, on average over all subsets of k of them.

    Tied answers count in equal parts, which is the mean of their scores. A response without an answer (None) has no
    vote, and a subset without any vote has the score 0. The score of an answer is the mean over all responses with it,
    not only those in the subset. `ValueError` unless ``1 <= k <= len(answers)``.

    Each response is drawn with the probability k / n, and the subsets are those draws that have k responses. For each
    number m of votes of the winners the answers are added one after the other: they have fewer votes, or are one of the
    winners.
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
    share = k / len(answers)
    silent = _binomial(answers.count(None), share)
    answers_drawn = [(count, score, _binomial(count, share)) for count, score in votes_and_scores]
    total = 0.0
    for m in range(1, min(most_votes, k) + 1):
        # Probabilities, and the sums of winners' scores times these: [which, winners, responses drawn]. At most k are
        # drawn, so at most k // m answers have m votes.
        draws = np.zeros((2, k // m + 1, k + 1))
        draws[0, 0, : len(silent)] = silent[: k + 1]
        for count, score, chances in answers_drawn:
            new_draws = np.zeros_like(draws)
            for votes in range(min(m, count + 1)):
                new_draws[:, :, votes:] += chances[votes] * draws[:, :, : k + 1 - votes]
            if count >= m:
                won = draws[:, :-1, : k + 1 - m].copy()
                won[1] += score * won[0]
                new_draws[:, 1:, m:] += chances[m] * won
            draws = new_draws
        scores_of_winners = draws[1, 1:, k]
        total += float((scores_of_winners / np.arange(1, len(scores_of_winners) + 1)).sum())
    return total / float(_binomial(len(answers), share)[k])


def _binomial(num: int, share: float) -> NDArray[np.float64]:
    """Return the probabilities that 0 to ``num`` responses are drawn, [num + 1], if each is with that of ``share``."""
    counts = np.arange(num + 1)
    logs_of_factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    logs = logs_of_factorials[-1] - logs_of_factorials - logs_of_factorials[::-1]
    return np.exp(logs + counts * math.log(share) + counts[::-1] * math.log1p(-share))


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
    """Number of prompts."""

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
    """Return estimates by name, over prompts that all have the same number n of responses; none without prompts.

    ``avg@n`` is the mean score. With two responses a prompt or more, ``pass@k`` is the probability that at least one
    of k responses scores ``right_from`` or more, and ``maj@k``, if the reward found an answer in any response, the
    score of the most frequent answer among k responses.
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
