"""Scores of completions by a language model."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gcore_rollout.engines.protocol import SamplingParams
from gcore_rollout.errors import NoScoreError, RewardConfigError
from gcore_rollout.rewards.kinds.judge_model import Judge, JudgeModel
from gcore_rollout.rewards.reward import Scored

Reduce = Literal["mean", "median", "majority"]
"""How several verdicts become one. The majority is the most frequent score, and the lowest of those on a tie."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One answer of a judge."""

    score: float | None
    """None: the verdict could not be parsed."""
    text: str


@dataclass(frozen=True, kw_only=True)
class ScorePattern:
    """Reads ``Score: 7``: the last match in an answer, scaled from [low, high] to [0, 1].

    A number outside of the range is no score.
    """

    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number."""
    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        check_pattern(self.pattern, wanted="the number")
        if not -math.inf < self.low < self.high < math.inf:
            raise RewardConfigError(
                f"low and high are {self.low} and {self.high}; expected finite numbers, low below high"
            )

    def __call__(self, text: str) -> float | None:
        matches = list(re.finditer(self.pattern, text))
        try:
            number = float(matches[-1][1] or "") if matches else math.nan
        except ValueError:
            return None
        return (number - self.low) / (self.high - self.low) if self.low <= number <= self.high else None


def check_pattern(pattern: str, *, wanted: str) -> None:
    """Check a regular expression whose first group is to hold what is ``wanted``.

    Raises:
        RewardConfigError: it is no regular expression, or has no group.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise RewardConfigError(f"pattern is {pattern!r}: {error}") from None
    if groups < 1:
        raise RewardConfigError(f"pattern is {pattern!r}; expected a group around {wanted}")


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Settings of the questions to a generative reward model and of the reading of its verdicts; a base of settings."""

    template: str = ""
    """File with the question, with fields in braces; empty: a question of the application."""
    n: int = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: float = 1.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: int = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    low: float = 0.0
    """The score that is scaled to 0."""
    high: float = 10.0
    """The score that is scaled to 1."""

    def check(self, prefix: str) -> None:
        """Check the settings; ``prefix`` is their place, for errors.

        Raises:
            RewardConfigError: a setting is out of its range.
        """
        for name, least in (("n", 1), ("max_response_length", 1), ("temperature", 0)):
            if not getattr(self, name) >= least:
                raise RewardConfigError(f"{prefix}.{name} is {getattr(self, name)}; expected at least {least}")
        if self.low == self.high:
            raise RewardConfigError(f"{prefix}.low and {prefix}.high are both {self.low}; expected two scores")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_response_length, temperature=self.temperature)

    @property
    def score_pattern(self) -> ScorePattern:
        return ScorePattern(pattern=self.pattern or ScorePattern.pattern, low=self.low, high=self.high)

    def question(self, default: str, *, setting: str) -> str:
        """Read the template.

        Args:
            default: the question if no file is set.
            setting: the name of the setting, for errors.

        Raises:
            RewardConfigError: the file cannot be read.
        """
        if not self.template:
            return default
        try:
            return Path(self.template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RewardConfigError(f"{setting} is {self.template!r}: {error}") from None


class JudgeReward(Judge[float]):
    """The score that a language model gives (a generative reward model, "LLM as a judge", arXiv 2306.05685, sec. 3.1).

    Its feedback is the text of the verdict nearest to the score. Parts: ``parsed``, the fraction of verdicts that could
    be read, and ``spread``, the largest score less the smallest.

    Args:
        model: the model, and how often it is asked.
        template: the question, with ``{prompt}``, ``{completion}`` and columns of the row as ``{column}``.
        parse: reads the score of a verdict; None: it has none.
        reduce: how several verdicts become one score.
        on_unparsable: "drop" leaves such verdicts out, and gives no score if none is left; a number counts as their
            score.
    """

    def __init__(
        self,
        *,
        model: JudgeModel,
        template: str,
        parse: Callable[[str], float | None] | None = None,
        reduce: Reduce = "mean",
        on_unparsable: Literal["drop"] | float = "drop",
    ) -> None:
        check_reduce(reduce)
        self._substitute: float | None = None if isinstance(on_unparsable, str) else float(on_unparsable)
        is_known = on_unparsable == "drop" if self._substitute is None else math.isfinite(self._substitute)
        if not is_known:
            raise RewardConfigError(f"on_unparsable is {on_unparsable!r}; expected 'drop' or a finite number")
        super().__init__(model, template, needed=["completion"], parse=parse or ScorePattern())
        self._reduce: Reduce = reduce

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion.

        Raises:
            NoScoreError: no verdict could be parsed, and ``on_unparsable`` is "drop".
            RewardError: the row lacks a column of the template.
        """
        verdicts = await self.verdicts(prompt, completion, row)
        num_parsed = sum(v.score is not None for v in verdicts)
        counted = [(self._substitute if v.score is None else v.score, v.text) for v in verdicts]
        scores = [(number, text) for number, text in counted if number is not None]
        if not scores:
            raise NoScoreError(
                f"none of {len(verdicts)} verdicts could be parsed, the first is {verdicts[0].text!r:.300}"
            )
        numbers = [number for number, _ in scores]
        reduced = reduced_score(numbers, self._reduce)
        return Scored(
            score=reduced,
            parts={"parsed": num_parsed / len(verdicts), "spread": max(numbers) - min(numbers)},
            feedback=min(scores, key=lambda pair: abs(pair[0] - reduced))[1],
        )

    async def verdicts(self, prompt: str, completion: str, row: Mapping[str, Any]) -> list[Verdict]:
        """Return every verdict on a completion, with its text."""
        question = self._template.fill(row, prompt=prompt, completion=completion)
        [texts] = await self._model.ask([question])
        return [Verdict(score=score, text=text) for score, text in zip(self._read(texts), texts, strict=True)]


def check_reduce(reduce: str) -> None:
    """Check the name of a reduction.

    Raises:
        RewardConfigError: it is none of `Reduce`.
    """
    if reduce not in get_args(Reduce):
        raise RewardConfigError(f"reduce is {reduce!r}; expected one of {', '.join(get_args(Reduce))}")


def reduced_score(scores: Sequence[float], reduce: Reduce) -> float:
    """Reduce the scores of one or more verdicts to one score."""
    match reduce:
        case "mean":
            return statistics.fmean(scores)
        case "median":
            return float(statistics.median(scores))
        case "majority":
            counts = Counter(scores)
            return min(counts, key=lambda score: (-counts[score], score))
