"""What a reward is, and the one place where it is called."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gcore_rollout.errors import NoScoreError, RewardError, RewardExitError
from gcore_rollout.rewards.user_code import answer


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What a reward has to say of one completion, where a number is not enough."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that explain the score, by name, for metrics such as ``reward/format/mean``. They are not added to it."""
    feedback: str = ""
    """The reason in words, such as a judge's: a next turn can give it to the policy."""


RewardFunction = Callable[[str, str, Mapping[str, Any]], float | Scored | Awaitable[float | Scored]]
"""``reward(prompt, completion, row)``: both texts, and the data set's row. May be async."""


class GroupRewardFunction(Protocol):
    """Scores the completions of one prompt against each other."""

    async def __call__(self, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> Sequence[Scored]:
        """One `Scored` for each completion, in their order.

        Raises:
            NoScoreError: the group is to be dropped.
        """
        ...


async def score(reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The number alone of `evaluate`."""
    return (await evaluate(reward, prompt=prompt, completion=completion, row=row)).score


async def evaluate(reward: RewardFunction, *, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
    """Call a reward and check what it returns.

    Raises:
        NoScoreError: the reward raised it.
        RewardExitError: it tried to end the process.
        RewardError: it raised anything else, or did not return finite numbers; the message holds the prompt and the
            completion.
    """
    try:
        return checked(await answer(reward, prompt, completion, row))
    except Exception as error:
        raise _with_texts(error, reward, prompt, completion) from error


async def evaluate_group(
    reward: GroupRewardFunction, *, prompt: str, completions: Sequence[str], row: Mapping[str, Any]
) -> list[Scored]:
    """The same for a group of completions of one prompt."""
    try:
        values = await reward(prompt, completions, row)
        if len(values) != len(completions):
            raise RewardError(f"returned {len(values)} scores of {len(completions)} completions: one of each is needed")
        return [checked(value) for value in values]
    except Exception as error:
        raise _with_texts(error, reward, prompt, completions[0] if completions else "") from error


def checked(value: object) -> Scored:
    """What a reward returned, as finite numbers.

    Raises:
        RewardError: it is something else.
    """
    if not isinstance(value, Scored):
        return Scored(score=_finite("returned", value))
    parts = {name: _finite(f"returned a part {name!r} of", part) for name, part in value.parts.items()}
    return Scored(score=_finite("returned a score of", value.score), parts=parts, feedback=value.feedback)


def told(error: Exception, where: str) -> RewardError:
    """Return the same error with the place where it happened; a `NoScoreError` or `RewardExitError` stays one."""
    kind = type(error) if isinstance(error, NoScoreError | RewardExitError) else RewardError
    reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    return kind(f"{where}: {reason}")


def name_of(reward: object) -> str:
    """What errors call a reward."""
    return getattr(reward, "__name__", type(reward).__name__)


def _finite(what: str, value: Any) -> float:
    try:
        # A string would pass through float(), but a reward returns one by mistake.
        number = float(value + 0.0)
    except (TypeError, ValueError):
        raise RewardError(f"{what} {value!r}; expected one number") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; expected a finite number")
    return number


def _with_texts(error: Exception, reward: object, prompt: str, completion: str) -> RewardError:
    return told(error, f"reward {name_of(reward)!r} on prompt {prompt[-80:]!r}, completion {completion[:80]!r}")
