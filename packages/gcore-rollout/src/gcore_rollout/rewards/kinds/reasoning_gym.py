"""The verifiers of reasoning-gym's tasks, as a reward."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from gcore_rollout.errors import MissingExtraError, RewardError


def import_reasoning_gym() -> Any:
    """The reasoning_gym module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # A package it imports has two literals compared with `is`; Python says so whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise MissingExtraError("reasoning_gym", "reasoning-gym") from error
    return reasoning_gym


class ReasoningGymReward:
    """1 if the task's verifier gives full marks, else 0.

    Partial marks are not used: the library's default gives some to any answer that contains the right one, and a
    policy soon learns to write long answers.

    Args:
        answer_after: the answer is what follows the last occurrence of this string; empty: the whole completion.
    """

    def __init__(self, *, answer_after: str = "") -> None:
        self._answer_after = answer_after
        self._gym = import_reasoning_gym()
        self._verifiers: dict[str, Callable[[str, Mapping[str, Any]], float]] = {}

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Score one completion of a row whose ``entry`` is the task's own, as reasoning_gym made it."""
        del prompt
        try:
            entry: Mapping[str, Any] = row["entry"]
            name: str = entry["metadata"]["source_dataset"]
        except KeyError as error:
            raise RewardError(f"the row has no {error}: reasoning-gym's own entry is needed under 'entry'") from None
        if name not in self._verifiers:
            self._verifiers[name] = self._gym.get_score_answer_fn(name)
        answer = completion.rpartition(self._answer_after)[2] if self._answer_after else completion
        return float(self._verifiers[name](answer.strip(), entry) >= 1.0)
