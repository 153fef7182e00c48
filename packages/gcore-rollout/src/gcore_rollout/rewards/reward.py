"""What a reward is, and the one place where it is called."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gcore_rollout.errors import RewardError

RewardFunction = Callable[[str, str, Mapping[str, Any]], float | Awaitable[float]]
"""``reward(prompt, completion, row)``: both texts, and the data set's row. May be async."""


async def score(reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Call a reward and check what it returns.

    Raises:
        RewardError: it raised, or did not return one finite number; the message holds the prompt and the completion.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    where = f"reward {name!r} on prompt {prompt[-80:]!r}, completion {completion[:80]!r}"
    try:
        value = reward(prompt, completion, row)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:
        raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
    try:
        # A string would pass through float(), but a reward returns one by mistake.
        number = float(value + 0.0)
    except (TypeError, ValueError):
        raise RewardError(f"{where}: returned {value!r}, one number is needed") from None
    if not math.isfinite(number):
        raise RewardError(f"{where}: returned {number}, a finite number is needed")
    return number
