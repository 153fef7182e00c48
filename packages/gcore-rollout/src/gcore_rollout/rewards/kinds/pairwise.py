"""A language model that compares the completions of a prompt with each other."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gcore_rollout.errors import NoScoreError, RewardConfigError
from gcore_rollout.rewards.kinds.judge import JudgeStats, check_pattern
from gcore_rollout.rewards.kinds.judge_model import JudgeModel, QuestionTemplate
from gcore_rollout.rewards.reward import Scored

Winner = Literal["A", "B", "tie"]

POINTS: dict[Winner, float] = {"A": 1.0, "B": 0.0, "tie": 0.5}
"""Of the completion shown first."""


@dataclass(frozen=True, kw_only=True)
class WinnerPattern:
    """Reads ``Winner: A``, ``B`` or ``tie``: the last match in an answer; brackets and case do not matter."""

    pattern: str = r"winner:\s*\W{0,2}(A|B|tie)\b"
    """Regular expression whose first group is A, B or tie; another match is no verdict."""

    def __post_init__(self) -> None:
        check_pattern(self.pattern, wanted="the winner")

    def __call__(self, text: str) -> Winner | None:
        matches = list(re.finditer(self.pattern, text, flags=re.IGNORECASE))
        found = (matches[-1][1] or "").lower() if matches else ""
        winners: dict[str, Winner] = {"a": "A", "b": "B", "tie": "tie"}
        return winners.get(found)


class PairwiseJudge:
    """Scores each completion of a group with the fraction of its comparisons that it wins; a tie is half a win.

    Every two completions are compared in both orders, so that a judge's liking for the first place cancels out
    (arXiv 2306.05685, sec. 3.3 and 3.4): N completions take N (N - 1) questions. A `GroupRewardFunction`.

    Parts: ``parsed``, the fraction of the completion's verdicts that could be read, and ``consistent``, the fraction of
    its opponents on whom both orders agree (absent if no two verdicts could be compared).

    Args:
        model: what is asked; with several verdicts on each question all of them count.
        template: the question, with ``{completion_a}`` and ``{completion_b}``, and ``{prompt}`` and columns of the row.
        parse: who wins by an answer, or None if it does not say.
        on_unparsable: "drop" leaves such verdicts out, and the group has no scores if one of its completions has none
            left; "tie" counts them as ties.
    """

    def __init__(
        self,
        *,
        model: JudgeModel,
        template: str,
        parse: Callable[[str], Winner | None] | None = None,
        on_unparsable: Literal["drop", "tie"] = "drop",
    ) -> None:
        if on_unparsable not in ("drop", "tie"):
            raise RewardConfigError(f"on_unparsable is {on_unparsable!r}; expected one of drop, tie")
        self._model = model
        self._template = QuestionTemplate(template, needed=["completion_a", "completion_b"])
        self._parse = parse or WinnerPattern()
        self._on_unparsable = on_unparsable
        self._num_verdicts = self._num_unparsable = 0

    async def __call__(self, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[Scored]:
        """
        Raises:
            NoScoreError: fewer than two completions, or one of them has no verdict that could be parsed.
            RewardError: the row lacks a column of the template.
        """
        if len(completions) < 2:
            raise NoScoreError(f"a group of {len(completions)} has nothing to compare")
        orders = list(itertools.permutations(range(len(completions)), 2))
        questions = [
            self._template.fill(row, prompt=prompt, completion_a=completions[a], completion_b=completions[b])
            for a, b in orders
        ]
        answers = await self._model.ask(questions)
        points = {order: self._points(texts) for order, texts in zip(orders, answers, strict=True)}
        return [self._scored(one, points, len(completions)) for one in range(len(completions))]

    def stats(self) -> JudgeStats:
        return JudgeStats(num_verdicts=self._num_verdicts, num_unparsable=self._num_unparsable)

    def _points(self, texts: Sequence[str]) -> list[float | None]:
        """What each verdict gives the completion shown first."""
        winners: list[Winner | None] = [self._parse(text) for text in texts]
        self._num_verdicts += len(winners)
        self._num_unparsable += winners.count(None)
        return [POINTS[winner] if winner else None for winner in winners]

    def _scored(self, one: int, points: Mapping[tuple[int, int], list[float | None]], num_completions: int) -> Scored:
        counted: list[float] = []
        agreements: list[bool] = []
        num_verdicts = num_parsed = 0
        for other in range(num_completions):
            if other == one:
                continue
            first = points[one, other]
            second = [None if p is None else 1.0 - p for p in points[other, one]]
            agreements += [a == b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
            verdicts = [*first, *second]
            num_verdicts += len(verdicts)
            read = [p for p in verdicts if p is not None]
            num_parsed += len(read)
            counted += read
            if self._on_unparsable == "tie":
                counted += [POINTS["tie"]] * (len(verdicts) - len(read))
        if not counted:
            raise NoScoreError(f"none of {num_verdicts} verdicts on completion {one} could be parsed")
        parts = {"parsed": num_parsed / num_verdicts}
        if agreements:
            parts["consistent"] = sum(agreements) / len(agreements)
        return Scored(score=sum(counted) / len(counted), parts=parts)
