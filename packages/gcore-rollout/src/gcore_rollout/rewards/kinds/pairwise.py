"""Comparisons of the completions of a prompt by a language model."""

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from gcore_rollout.errors import NoScoreError, require_one_of
from gcore_rollout.rewards.kinds.judge import Judge, check_pattern, read_last_match
from gcore_rollout.rewards.kinds.tournament import Pair, Scheme, draw_order, pair_round
from gcore_rollout.rewards.reward import Scored

_POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Points of the completion shown first, by the winner."""
_Points = tuple[float | None, float | None]
"""Points of a completion by a verdict with it in the first place, and by one with it in the second; None: unread."""
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


def make_winner_parser(pattern: str = "") -> Callable[[str], float | None]:
    """Return a function that reads the points of the first from ``Winner: A`` (1), ``B`` (0) or ``tie`` (0.5).

    The last match in a verdict counts. Brackets and case do not matter. A match whose first group is something else is
    no verdict. ``pattern`` is a regular expression whose first group is the winner; empty: ``Winner: A``.
    `RewardConfigError` if it has no group.

    Example:
        >>> parse = make_winner_parser()
        >>> parse("A is longer, but B is right. Winner: **b**")
        0.0
        >>> parse("Both are good.") is None
        True
    """
    pattern = pattern or _WINNER_PATTERN
    check_pattern(pattern, "the winner")

    def parse_winner(text: str) -> float | None:
        winner = read_last_match(pattern, text, flags=re.IGNORECASE)
        return _POINTS.get(winner.lower())

    return parse_winner


@dataclass(kw_only=True, eq=False)
class PairwiseJudge(Judge):
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

    parse: Callable[[str], float | None] = field(default_factory=make_winner_parser)
    on_unparsable: Literal["drop", "tie"] = "drop"
    """ "drop" leaves such verdicts out, and the group has no scores if one of its completions has none left; "tie"
    counts them as ties."""
    scheme: Scheme = "all_pairs"
    """The pairs that are compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("on_unparsable", self.on_unparsable, ("drop", "tie"))
        require_one_of("scheme", self.scheme, get_args(Scheme))

    async def __call__(
        self, prompt: str, completions: Sequence[str], row: Mapping[str, Any]
    ) -> list[Scored]:
        """Score the completions of one prompt; `RewardError` if the row lacks a column of the template.

        `NoScoreError` for fewer than two completions, or one that has no verdict that could be parsed.
        """
        if len(completions) < 2:
            raise NoScoreError(f"a group of {len(completions)} has nothing to compare")
        order = draw_order(prompt, completions)
        points: dict[int, list[_Points]] = {response: [] for response in order}
        results: dict[Pair, float] = {}
        pairs = pair_round(self.scheme, order, results)
        while pairs:
            questions: list[str] = []
            for a, b in pairs + [(b, a) for a, b in pairs]:
                texts = {"completion_a": completions[a], "completion_b": completions[b]}
                questions.append(self._fill_template(row, prompt=prompt, **texts))
            verdicts = await self.ask(questions)
            for i, (a, b) in enumerate(pairs):
                both_orders = zip(verdicts[i], verdicts[i + len(pairs)], strict=True)
                match = [(first, _invert(second)) for (first, _), (second, _) in both_orders]
                points[a] += match
                points[b] += [(_invert(second), _invert(first)) for first, second in match]
                results[a, b] = statistics.fmean(_read(match) or [0.5])
            pairs = pair_round(self.scheme, order, results)
        return [self._score_completion(i, points[i]) for i in range(len(completions))]

    def _score_completion(self, index: int, points: Sequence[_Points]) -> Scored:
        counted = _read(points)
        num_verdicts = 2 * len(points)
        parts = {"parsed": len(counted) / num_verdicts}
        agreements = [first == second for first, second in points if None not in (first, second)]
        if agreements:
            parts["consistent"] = statistics.fmean(agreements)
        if self.on_unparsable == "tie":
            counted += [0.5] * (num_verdicts - len(counted))
        if not counted:
            raise NoScoreError(
                f"none of {num_verdicts} verdicts on completion {index} could be parsed"
            )
        return Scored(score=statistics.fmean(counted), parts=parts)


def _invert(points: float | None) -> float | None:
    """Return the points of the other one of a pair."""
    return None if points is None else 1.0 - points


def _read(points: Sequence[_Points]) -> list[float]:
    """Return the points of the verdicts that could be read."""
    return [p for p in itertools.chain.from_iterable(points) if p is not None]
