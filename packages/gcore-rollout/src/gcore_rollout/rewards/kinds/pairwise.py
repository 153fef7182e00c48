"""Comparisons of the completions of a prompt by a language model."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gcore_rollout.errors import NoScoreError, RewardConfigError
from gcore_rollout.rewards.kinds.judge import Judge, LastMatch
from gcore_rollout.rewards.reward import Scored

Winner = Literal["A", "B", "tie"]

_WINNERS: dict[str, Winner] = {"a": "A", "b": "B", "tie": "tie"}
_POINTS: dict[Winner, float] = {"A": 1.0, "B": 0.0, "tie": 0.5}
"""Points of the completion shown first."""

_QUESTION = """Here are a request and two answers to it.

Request:
{prompt}

Answer A:
{completion_a}

Answer B:
{completion_b}

Which answer is better? Think about it briefly, then end with "Winner: A", "Winner: B" or "Winner: tie".
"""


@dataclass(frozen=True, kw_only=True)
class WinnerPattern(LastMatch):
    """Reads ``Winner: A``, ``B`` or ``tie``: the last match in an answer; brackets and case do not matter.

    A match whose first group is something else is no verdict.
    """

    wanted: ClassVar = "the winner"
    flags: ClassVar = re.IGNORECASE

    pattern: str = r"winner:\s*\W{0,2}(A|B|tie)\b"

    def __call__(self, text: str) -> Winner | None:
        return _WINNERS.get(self.read(text).lower())


@dataclass(kw_only=True, eq=False)
class PairwiseJudge(Judge[Winner]):
    """Scores each completion of a group with the fraction of its comparisons that it wins; a tie is half a win.

    Every two completions are compared in both orders, so that a judge's preference for the first place cancels out
    (arXiv 2306.05685, sec. 3.3 and 3.4): N completions take N (N - 1) questions. A `GroupRewardFunction`. With several
    verdicts on each question all of them count.

    The template has ``{completion_a}``, ``{completion_b}`` and ``{prompt}``; empty: which of the two answers is better.

    Parts: ``parsed``, the fraction of the completion's verdicts that could be read, and ``consistent``, the fraction of
    its opponents on whom both orders agree (absent if no two verdicts could be compared).
    """

    question: ClassVar = _QUESTION
    needed: ClassVar = ("completion_a", "completion_b")

    parse: Callable[[str], Winner | None] = WinnerPattern()
    on_unparsable: Literal["drop", "tie"] = "drop"
    """ "drop" leaves such verdicts out, and the group has no scores if one of its completions has none left; "tie"
    counts them as ties."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_unparsable not in ("drop", "tie"):
            raise RewardConfigError(f"on_unparsable is {self.on_unparsable!r}; expected one of drop, tie")

    async def __call__(self, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[Scored]:
        """Score the completions of one prompt; `RewardError` if the row lacks a column of the template.

        Raises:
            NoScoreError: fewer than two completions, or one of them has no verdict that could be parsed.
        """
        if len(completions) < 2:
            raise NoScoreError(f"a group of {len(completions)} has nothing to compare")
        orders = list(itertools.permutations(range(len(completions)), 2))
        shown = [{"completion_a": completions[a], "completion_b": completions[b]} for a, b in orders]
        questions = [self._filled(row, prompt=prompt, **texts) for texts in shown]
        points = {
            order: [_POINTS[winner] if winner else None for winner, _ in verdicts]
            for order, verdicts in zip(orders, await self.ask(questions), strict=True)
        }
        return [self._scored(one, points, len(completions)) for one in range(len(completions))]

    def _scored(self, one: int, points: Mapping[tuple[int, int], list[float | None]], num_completions: int) -> Scored:
        """Score a completion by the points of the first in each verdict."""
        others = [other for other in range(num_completions) if other != one]
        pairs = [(points[one, other], [None if p is None else 1.0 - p for p in points[other, one]]) for other in others]
        verdicts = [p for first, second in pairs for p in (*first, *second)]
        counted = [p for p in verdicts if p is not None]
        parts = {"parsed": len(counted) / len(verdicts)}
        both = [(a, b) for first, second in pairs for a, b in zip(first, second, strict=True)]
        if agreements := [a == b for a, b in both if a is not None and b is not None]:
            parts["consistent"] = sum(agreements) / len(agreements)
        if self.on_unparsable == "tie":
            counted = [_POINTS["tie"] if p is None else p for p in verdicts]
        if not counted:
            raise NoScoreError(f"none of {len(verdicts)} verdicts on completion {one} could be parsed")
        return Scored(score=sum(counted) / len(counted), parts=parts)
