"""Comparisons of the completions of a prompt by a language model."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gcore_rollout.errors import NoScoreError, require
from gcore_rollout.rewards.kinds.judge import Judge, check_pattern, read_last_match
from gcore_rollout.rewards.kinds.tournament import Pair, Scheme, draw_order, pair_round
from gcore_rollout.rewards.reward import Scored

Winner = Literal["A", "B", "tie"]

_WINNERS: dict[str, Winner] = {"a": "A", "b": "B", "tie": "tie"}
_POINTS: dict[Winner | None, float | None] = {"A": 1.0, "B": 0.0, "tie": 0.5, None: None}
"""Points of the completion shown first."""

_WINNER_PATTERN = r"winner:\s*\W{0,2}(A|B|tie)\b"

_PAIR_QUESTION = """Here are a request and two answers to it.

Request:
{prompt}

Answer A:
{completion_a}

Answer B:
{completion_b}

Which answer is better? Think about it briefly, then end with "Winner: A", "Winner: B" or "Winner: tie".
"""


def make_winner_parser(pattern: str = "") -> Callable[[str], Winner | None]:
    """Return a function that reads ``Winner: A``, ``B`` or ``tie``: the last match in a verdict.

    Brackets and case do not matter. A match whose first group is something else is no verdict. ``pattern`` is a regular
    expression whose first group is the winner; empty: ``Winner: A``. `RewardConfigError` if it has no group.

    Example:
        >>> parse = make_winner_parser()
        >>> parse("A is longer, but B is right. Winner: **b**")
        'B'
        >>> parse("Both are good.") is None
        True
    """
    pattern = pattern or _WINNER_PATTERN
    check_pattern(pattern, "the winner")

    def parse_winner(text: str) -> Winner | None:
        winner = read_last_match(pattern, text, flags=re.IGNORECASE)
        return _WINNERS.get(winner.lower())

    return parse_winner


@dataclass(kw_only=True, eq=False)
class PairwiseJudge(Judge[Winner]):
    """Scores each completion of a group with the fraction of its comparisons that it wins; a tie is half a win.

    Two completions are compared in both orders, so that a judge's preference for the first place cancels out
    (arXiv 2306.05685, sec. 3.3 and 3.4). N completions take N (N - 1) questions if all pairs are compared, 2 (N - 1) in
    a knock-out tournament, and at most N ceil(log2 N) in a Swiss one (both as in ArenaRL, arXiv 2601.06487, without
    seeds); see `Scheme`. The questions of a round are one call of the engine.

    ArenaRL scores by rank; the score here is the same with every scheme, because it agrees better with that of all
    pairs where the judge is noisy. With several verdicts on each question all of them count.

    A `GroupRewardFunction`. The template has ``{completion_a}``, ``{completion_b}`` and ``{prompt}``; empty: which of
    the two answers is better.

    Parts: ``parsed``, the fraction of the completion's verdicts that could be read, and ``consistent``, the fraction of
    its opponents on whom both orders agree (absent if no two verdicts could be compared).

    Example:
        >>> import asyncio
        >>> class Model:  # in place of a JudgeModel; the shorter answer wins
        ...     async def ask(self, questions, images=None):
        ...         pairs = [question.split("|") for question in questions]
        ...         return [["Winner: A" if len(a) < len(b) else "Winner: B"] for a, b in pairs]
        >>> judge = PairwiseJudge(model=Model(), template="{completion_a}|{completion_b}")
        >>> scored = asyncio.run(judge("Say hello.", ["Hi", "Hello", "Good morning"], {}))
        >>> [completion.score for completion in scored]
        [1.0, 0.5, 0.0]
    """

    question: ClassVar = _PAIR_QUESTION
    needed: ClassVar = ("completion_a", "completion_b")

    parse: Callable[[str], Winner | None] = field(default_factory=make_winner_parser)
    on_unparsable: Literal["drop", "tie"] = "drop"
    """ "drop" leaves such verdicts out, and the group has no scores if one of its completions has none left; "tie"
    counts them as ties."""
    scheme: Scheme = "all_pairs"
    """The pairs that are compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, accepted in {
            "on_unparsable": ("drop", "tie"),
            "scheme": get_args(Scheme),
        }.items():
            value = getattr(self, name)
            require(name, value, value in accepted, f"one of {', '.join(accepted)}")

    async def __call__(
        self, prompt: str, completions: Sequence[str], row: Mapping[str, Any]
    ) -> list[Scored]:
        """Score the completions of one prompt; `RewardError` if the row lacks a column of the template.

        `NoScoreError` for fewer than two completions, or one that has no verdict that could be parsed.
        """
        if len(completions) < 2:
            raise NoScoreError(f"a group of {len(completions)} has nothing to compare")
        order = draw_order(prompt, completions)
        points: dict[Pair, list[float | None]] = {}
        results: dict[Pair, float] = {}
        pairs = pair_round(self.scheme, order, results)
        while pairs:
            orders = pairs + [(b, a) for a, b in pairs]
            questions: list[str] = []
            for a, b in orders:
                texts = {"completion_a": completions[a], "completion_b": completions[b]}
                questions.append(self._fill_template(row, prompt=prompt, **texts))
            for pair, verdicts in zip(orders, await self.ask(questions), strict=True):
                points[pair] = [_POINTS[winner or None] for winner, _ in verdicts]
            for a, b in pairs:
                first, second = _points_of_both_orders(points, a, b)
                counted = [p for p in first + second if p is not None]
                results[a, b] = statistics.fmean(counted or [0.5])
            pairs = pair_round(self.scheme, order, results)
        return [self._score_completion(i, points) for i in range(len(completions))]

    def _score_completion(self, index: int, points: Mapping[Pair, list[float | None]]) -> Scored:
        """Score a completion by the points of the first in each verdict."""
        verdicts: list[float | None] = []
        num_comparable = 0
        num_equal = 0
        for opponent in [b for a, b in points if a == index]:
            first, second = _points_of_both_orders(points, index, opponent)
            verdicts += first + second
            for a, b in zip(first, second, strict=True):
                if a is not None and b is not None:
                    num_comparable += 1
                    num_equal += a == b
        counted = [p for p in verdicts if p is not None]
        parts = {"parsed": len(counted) / len(verdicts)}
        if num_comparable:
            parts["consistent"] = num_equal / num_comparable
        if self.on_unparsable == "tie":
            counted = [0.5 if p is None else p for p in verdicts]
        if not counted:
            raise NoScoreError(
                f"none of {len(verdicts)} verdicts on completion {index} could be parsed"
            )
        return Scored(score=statistics.fmean(counted), parts=parts)


def _points_of_both_orders(
    points: Mapping[Pair, list[float | None]], a: int, b: int
) -> tuple[list[float | None], list[float | None]]:
    """Return the points of a from the verdicts with a first, and from those with b first."""
    second = [None if p is None else 1.0 - p for p in points[b, a]]
    return points[a, b], second
