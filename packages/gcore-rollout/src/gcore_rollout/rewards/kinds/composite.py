"""Weighted sums of rewards, of completions and of images."""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gcore_rollout.errors import NotApplicableError, RewardConfigError, require
from gcore_rollout.images.reward import (
    ImageRewardFunction,
    Images,
    Rows,
    check_images,
    check_prompts,
    evaluate_images,
)
from gcore_rollout.rewards.reward import RewardFunction, Scored, check_row, locate_errors
from gcore_rollout.rewards.runner import answer, check_score

T = TypeVar("T")

_PLUS = re.compile(r"\s+\+\s+|\s*\+(?=\s*[\d.]+\s*\*)")
_TERM = re.compile(r"(?:([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\*\s*)?(\S.*)")


class CompositeReward:
    """The weighted sum of named rewards, which run at the same time.

    Each reward's own score, before its weight, is the part of its name, and its parts are below that: ``judge`` and
    ``judge/parsed``. Their feedback is joined by blank lines. One that raises `NotApplicableError` adds nothing, unless
    all do. Of rewards that score steps, scores of steps that end together are added, and the scores of the others are
    added to that of the last step. A synchronous reward runs on the event loop, so wrap one that takes long in
    `ThreadedReward`. Weights need not sum to 1, and 0 measures a reward without using it.

    Example:
        >>> def is_right(prompt, completion, row):
        ...     return float(completion.split()[-1] == row["answer"])
        >>> def is_short(prompt, completion, row):
        ...     return float(len(completion) < 20)
        >>> reward = CompositeReward({"right": is_right, "short": is_short}, weights={"right": 1.0, "short": 0.2})
        >>> asyncio.run(reward("1 + 1 =", "It is 2", {"answer": "2"}))
        Scored(score=1.2, parts={'right': 1.0, 'short': 1.0}, feedback='', answer=None)
    """

    def __init__(
        self, rewards: Mapping[str, RewardFunction], *, weights: Mapping[str, float]
    ) -> None:
        _check(rewards, weights)
        self._rewards = dict(rewards)
        self._weights = dict(weights)

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        async def score_part(name: str, reward: RewardFunction) -> Scored | NotApplicableError:
            try:
                with locate_errors(f"part {name!r}"):
                    return check_score(await answer(reward, prompt, completion, row))
            except NotApplicableError as error:
                return error

        results = await _run_together(
            {name: score_part(name, reward) for name, reward in self._rewards.items()}
        )
        scored = {name: result for name, result in results.items() if isinstance(result, Scored)}
        if not scored:
            raise NotApplicableError("; ".join(map(str, results.values())))
        return _sum(scored, self._weights)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` for a row that one of the rewards cannot score."""
        for name, reward in self._rewards.items():
            with locate_errors(f"part {name!r}"):
                check_row(reward, row)


class ImageCompositeReward:
    """The weighted sum of named rewards of images, which run at the same time.

    As in `CompositeReward`, each reward's own score is the part of its name, and the parts that it returns are below.

    Example:
        >>> def red(images, prompts, rows):
        ...     return images[..., 0].mean((1, 2)) / 255
        >>> def dark(images, prompts, rows):
        ...     return 1 - images.mean((1, 2, 3)) / 255
        >>> reward = ImageCompositeReward({"red": red, "dark": dark}, weights={"red": 0.75, "dark": 0.25})
        >>> asyncio.run(reward(np.zeros((1, 8, 8, 3), np.uint8), ["a night"], [{}]))
        ([0.25], {'red': [0.0], 'dark': [1.0]})
    """

    def __init__(
        self, rewards: Mapping[str, ImageRewardFunction], *, weights: Mapping[str, float]
    ) -> None:
        _check(rewards, weights)
        self._rewards = dict(rewards)
        self._weights = dict(weights)
        self.uses_engine = all(getattr(reward, "uses_engine", False) for reward in rewards.values())

    def check(self, height: int, width: int) -> None:
        """Raise `RewardConfigError` for images of a size that one of the rewards cannot score."""
        check_images(self._rewards.values(), height, width)

    def check_prompts(self, prompts: Sequence[str], rows: Rows) -> None:
        """Raise `RewardConfigError` for prompts that one of the rewards cannot score."""
        check_prompts(self._rewards.values(), prompts, rows)

    async def __call__(
        self, images: Images, prompts: Sequence[str], rows: Rows
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return scores [B] and their parts [B]."""
        calls = {
            name: evaluate_images(reward, images, prompts, rows)
            for name, reward in self._rewards.items()
        }
        by_name = await _run_together(calls)
        scores: list[float] = []
        parts = defaultdict[str, list[float]](list)
        for i in range(len(images)):
            total = _sum({name: scored[i] for name, scored in by_name.items()}, self._weights)
            scores.append(total.score)
            for part, value in total.parts.items():
                parts[part].append(value)
        return scores, dict(parts)


def reward_terms(text: str, *, setting: str) -> dict[str, float]:
    """Return the weight of each reward of a sum such as ``0.8 * pick_score + 0.2 * ocr``, by the reward's text.

    A reward without a weight has 1. ``setting`` is the name of the setting, for errors: `RewardConfigError` if a reward
    is missing or there twice, or if all weights are 0.
    """
    terms: dict[str, float] = {}
    for term in _PLUS.split(text.strip()):
        match = _TERM.fullmatch(term.strip())
        if match is None or match[2] in terms:
            raise RewardConfigError(
                f"{setting} is {text!r}; expected WEIGHT * NAME + WEIGHT * OTHER NAME"
            )
        terms[match[2]] = float(match[1] or 1)
    require(setting, text, any(terms.values()), "a weight that is not 0")
    return terms


def _check(rewards: Mapping[str, object], weights: Mapping[str, float]) -> None:
    if not rewards:
        raise RewardConfigError("rewards is empty; expected at least one")
    if rewards.keys() != weights.keys():
        raise RewardConfigError(
            f"weights has {sorted(weights)}; expected the names of rewards, {sorted(rewards)}"
        )
    for name, weight in weights.items():
        require(f"weights[{name!r}]", weight, math.isfinite(weight), "a finite number")
    if not any(weights.values()):
        raise RewardConfigError(
            f"weights are all 0 ({sorted(weights)}); expected at least one that is not"
        )


async def _run_together(calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Return the results by name; the first error cancels the other calls, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(call) for name, call in calls.items()}
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return {name: task.result() for name, task in tasks.items()}


def _sum(scored: Mapping[str, Scored], weights: Mapping[str, float]) -> Scored:
    parts: dict[str, float] = {}
    feedback: list[str] = []
    answer: str | None = None
    steps = defaultdict[int, float](float)
    outcome = 0.0
    for name, term in scored.items():
        parts |= term.as_parts(name)
        for end, step in term.steps.items():
            steps[end] += weights[name] * step
        if not term.steps:
            outcome += weights[name] * term.score
        if term.feedback:
            feedback.append(term.feedback)
        if answer is None:
            answer = term.answer
    if steps:
        steps[max(steps)] += outcome
    score = math.fsum(weights[name] * term.score for name, term in scored.items())
    return Scored(
        score=score, parts=parts, feedback="\n\n".join(feedback), answer=answer, steps=dict(steps)
    )
