"""A curriculum: prompts that are too easy or too hard at present are sampled less often."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

_LEAST = 0.125
"""Probability of a prompt whose responses all scored alike: the policy may have learned it, or forgotten it."""


@dataclass(eq=False)
class Curriculum:
    """Remembers the scores of each prompt's latest group, by row of the data set, and passes over some prompts.

    A prompt whose latest scores have the standard deviation s is sampled again with the probability

        max(1/8, min(1, s / mean of the s above 0)),

    and one that has not been sampled yet with 1. For scores of 0 and 1, of which a share p is 1, s is sqrt(p (1 - p)),
    the square root of the learnability of Foster and Foerster, "Learning to Reason at the Frontier of Learnability"
    (arXiv 2502.12272, section 3): largest for prompts that are solved half of the time. Which prompts are passed over
    depends on the seed and the scores alone, so all controllers agree on it.

    Example:
        >>> curriculum = Curriculum(seed=0)
        >>> curriculum.record([(0, [1.0, 1.0, 1.0, 1.0]), (1, [0.0, 1.0, 0.0, 1.0])])
        >>> curriculum.probability(0), curriculum.probability(1), curriculum.probability(2)
        (0.125, 1.0, 1.0)
    """

    seed: int
    _: KW_ONLY
    scores: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """Mean and standard deviation of the scores of each row's latest group."""
    num_passed_over: int = 0
    """Prompts that were passed over since the last `metrics`."""
    _typical: float = field(default=0.0, init=False)
    """Mean of the standard deviations above 0."""

    def record(self, groups: Iterable[tuple[int, list[float]]]) -> None:
        """Remember the scores of groups, each with the row of its prompt."""
        for row, scores in groups:
            self.scores[row] = float(np.mean(scores)), float(np.std(scores))
        deviations = [deviation for _, deviation in self.scores.values() if deviation > 0]
        self._typical = float(np.mean(deviations)) if deviations else 0.0

    def probability(self, row: int) -> float:
        """Return the probability with which the prompt of a row is sampled when its turn comes."""
        if row not in self.scores:
            return 1.0
        _, deviation = self.scores[row]
        if not deviation:
            return _LEAST
        return max(_LEAST, min(1.0, deviation / self._typical))

    def takes(self, prompt_index: int, row: int) -> bool:
        """Return whether the prompt of an index, which stands for a row, is sampled; count it if not."""
        draw = np.random.default_rng([self.seed, prompt_index]).random()
        is_taken = draw < self.probability(row)
        self.num_passed_over += not is_taken
        return is_taken

    def metrics(self) -> dict[str, float]:
        """Return how many prompts are known, how many of these had scores all alike, and their mean score."""
        means = [mean for mean, _ in self.scores.values()]
        alike = [deviation == 0 for _, deviation in self.scores.values()]
        num_passed_over = self.num_passed_over
        self.num_passed_over = 0
        return {
            "curriculum/passed_over": float(num_passed_over),
            "curriculum/known_prompts": float(len(means)),
            "curriculum/alike": float(np.mean(alike)) if alike else 0.0,
            "curriculum/score": float(np.mean(means)) if means else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Return the scores as arrays: rows int64 [n], and means and standard deviations float64 [n, 2]."""
        rows = np.array([*self.scores], np.int64)
        return {"rows": rows, "scores": np.array([*self.scores.values()]).reshape(-1, 2)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        scores = map(tuple, state["scores"].tolist())
        self.scores = dict(zip(state["rows"].tolist(), scores, strict=True))
        self.record([])
