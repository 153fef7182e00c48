"""Counts of reward calls that failed and were dropped, over all controllers; too many of them end the run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from gcore_controller.errors import RewardFailuresError

_MIN_CALLS = 32
"""Fewest calls that a fraction is computed over: one failure in a small batch means little."""

RewardCalls = tuple[int, list[Any]]
"""The number of reward calls in some period, and the failures: dataclasses with ``kind``, ``message`` and ``count``."""


class FailureLog(Protocol):
    """Counts the calls of one reward."""

    def drain(self) -> RewardCalls:
        """Return the calls since this method was called last."""
        ...


class RewardFailures:
    """Tracks the fraction of reward calls that failed over the last steps.

    Args:
        logs: of the rewards that this controller calls.
        max_share: largest fraction of failed calls that is tolerated.
    """

    def __init__(self, logs: Sequence[FailureLog], *, max_share: float) -> None:
        self._logs = logs
        self._max_share = max_share
        self._recent: deque[tuple[int, int]] = deque()
        self._last: list[Any] = []

    def drain(self) -> RewardCalls:
        """Return the calls since the last time, of every controller that shares the rewards with this one."""
        drained = [log.drain() for log in self._logs]
        return sum(calls for calls, _ in drained), [failure for _, failures in drained for failure in failures]

    def merge(self, calls_by_rank: Sequence[RewardCalls]) -> tuple[list[Any], dict[str, float]]:
        """Return all controllers' failures by kind, and metrics of them."""
        found: dict[str, Any] = {}
        for failure in (failure for _, failures in calls_by_rank for failure in failures):
            before = found.get(failure.kind)
            found[failure.kind] = failure if before is None else replace(before, count=before.count + failure.count)
        num_calls, num_failed = sum(calls for calls, _ in calls_by_rank), sum(f.count for f in found.values())
        self._recent.append((num_calls, num_failed))
        while sum(calls for calls, _ in self._recent) - self._recent[0][0] >= _MIN_CALLS:
            self._recent.popleft()
        self._last = sorted(found.values(), key=lambda failure: -failure.count) or self._last
        return list(found.values()), {"reward/failed_fraction": num_failed / num_calls} if num_calls else {}

    def check(self) -> None:
        """Raise if too many of the last calls failed.

        Raises:
            RewardFailuresError: more than the tolerated fraction failed.
        """
        num_calls, num_failed = (sum(column) for column in zip(*self._recent, strict=True))
        if num_calls < _MIN_CALLS or num_failed <= self._max_share * num_calls:
            return
        worst = self._last[0]
        raise RewardFailuresError(
            f"{num_failed} of the last {num_calls} rewards failed; expected at most a share of "
            f"reward_calls.max_failed_share = {self._max_share:g}. The most frequent error: {worst.kind}: "
            f"{worst.message or 'no message'}"
        )
