"""Mathematical equality of the final answer with the row's, as a reward."""

import logging
from collections.abc import Mapping
from typing import Any

from gcore_rollout.errors import MissingExtraError, RewardError


class MathVerifyReward:
    """1 if math-verify finds the completion's answer equal to the row's, else 0.

    Args:
        answer_key: the row's column that holds the right answer (LaTeX or a plain expression).
    """

    def __init__(self, *, answer_key: str = "answer") -> None:
        try:
            import math_verify
        except ImportError as error:
            raise MissingExtraError("math_verify", "math-verify") from error
        # It warns at every call that its time-out is off.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._library = math_verify
        self._answer_key = answer_key

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt
        if self._answer_key not in row:
            raise RewardError(
                f"the row has no {self._answer_key!r} for math-verify to compare with: it has {sorted(row)}"
            )
        # Its own time-outs use SIGALRM, which works in the main thread alone and would break the event loop's timers.
        gold = self._library.parse(f"${row[self._answer_key]}$", parsing_timeout=0)
        answer = self._library.parse(completion, parsing_timeout=0)
        return float(self._library.verify(gold, answer, timeout_seconds=0))
