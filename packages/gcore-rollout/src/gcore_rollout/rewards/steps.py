"""Steps of a completion: their texts, one score of theirs, and the tokens of each."""

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from gcore_rollout.engines.protocol import Completion
from gcore_rollout.rewards.reward import Scored

StepReduction = Literal["min", "product", "last", "mean"]
"""How the scores of steps become one. min: the lowest (Math-Shepherd, arXiv 2312.08935); product: of probabilities that
each step is right ("Let's Verify Step by Step", arXiv 2305.20050); last: that of the last step."""
STEP_REDUCTIONS: Mapping[StepReduction, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "mean": statistics.fmean,
}
_MAX_TOKENS_PER_CHARACTER = 4
"""A character that has no token of its own is as many tokens as it has bytes."""


def split_steps(completion: str, separator: str) -> list[str]:
    """Return the steps of a completion, each with the separator and the blanks after it."""
    step = rf"\s*.*?(?:{re.escape(separator)}\s*|\Z)"
    return [text for text in re.findall(step, completion, re.DOTALL) if text] or [""]


def score_steps(steps: Sequence[str], scores: Sequence[float], reduction: StepReduction) -> Scored:
    """Return the scores of steps as one, with their number as the part ``steps``."""
    by_end = dict(zip(accumulate(map(len, steps)), scores, strict=True))
    score = STEP_REDUCTIONS[reduction](scores)
    return Scored(score=score, parts={"steps": float(len(steps))}, steps=by_end)


def credit_steps(completion: Completion, steps: Mapping[int, float], tokenizer: Any) -> Completion:
    """Return a completion with the scores of its steps (see `Scored.steps`) as the credit of turns.

    A token that two steps share is of the first one. A step that has no other is left out.
    """
    token_ids = completion.token_ids.tolist()

    def count_characters(start: int, stop: int) -> int:
        return len(tokenizer.decode(token_ids[start:stop], skip_special_tokens=True))

    size = len(token_ids)
    credit = np.zeros(size, np.float32)
    starts: list[int] = []
    start = num_characters = 0
    for end in sorted(steps):
        starts.append(start)
        credit[start:] = steps[end]
        longest = start + _MAX_TOKENS_PER_CHARACTER * (end - num_characters)
        # The text of a token may depend on whether it is the first one.
        count = partial(count_characters, max(start - 1, 0))
        num_characters -= count(start)
        start = bisect_left(range(min(size, longest)), end - num_characters, lo=start, key=count)
        num_characters += count(start)
    stops = [*starts[1:], size]
    spans = [span for span in zip(starts, stops, strict=True) if span[0] < span[1]]
    agents = {"": np.array(spans, np.int64).reshape(-1, 2)}
    return replace(
        completion, credit=credit, agents=agents, states={"": np.zeros(len(spans), np.int64)}
    )
