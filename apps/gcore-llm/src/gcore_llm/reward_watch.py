"""Rewards that fail while failures are dropped: they are counted on all controllers, and too many end the run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from gcore_llm.reward_config import RewardCallsConfig
from gcore_llm.roles import Sampler
from gcore_rollout import Failure, RewardError

_MIN_CALLS = 32
"""Fewest calls of which a share is taken: a single failure in a small batch says little."""


RewardCalls = tuple[int, list[Failure]]
"""The number of calls of rewards in some time, and those that failed."""


class RewardWatch:
    """Follows the share of rewards that failed over the last steps."""

    def __init__(self, sampler: Sampler, config: RewardCallsConfig) -> None:
        self._sampler = sampler
        self._max_share = config.max_failed_share
        self._recent: deque[tuple[int, int]] = deque()
        self._last: list[Failure] = []

    def drain(self) -> RewardCalls:
        """Return the calls since the last time, by any controller that shares the rewards with this one."""
        callers = (
            self._sampler.reward,
            self._sampler.comparison and self._sampler.comparison.runner,
            self._sampler.world,
        )
        drained = [caller.failures.drain() for caller in callers if caller is not None]
        return sum(calls for calls, _ in drained), [failure for _, failures in drained for failure in failures]

    def merged(self, everyones: Sequence[RewardCalls]) -> tuple[list[Failure], dict[str, float]]:
        """Return all controllers' failures by kind, and metrics of them."""
        found: dict[str, Failure] = {}
        for failure in (failure for _, failures in everyones for failure in failures):
            before = found.get(failure.kind)
            found[failure.kind] = failure if before is None else replace(before, count=before.count + failure.count)
        num_calls, num_failed = sum(calls for calls, _ in everyones), sum(f.count for f in found.values())
        self._recent.append((num_calls, num_failed))
        while sum(calls for calls, _ in self._recent) - self._recent[0][0] >= _MIN_CALLS:
            self._recent.popleft()
        self._last = sorted(found.values(), key=lambda failure: -failure.count) or self._last
        return list(found.values()), {"reward/failed_fraction": num_failed / num_calls} if num_calls else {}

    def check(self) -> None:
        """
        Raises:
            RewardError: more than the permitted share of the last rewards failed.
        """
        num_calls, num_failed = (sum(column) for column in zip(*self._recent, strict=True))
        if num_calls < _MIN_CALLS or num_failed <= self._max_share * num_calls:
            return
        worst = self._last[0]
        raise RewardError(
            f"{num_failed} of the last {num_calls} rewards failed; expected at most a share of "
            f"reward_calls.max_failed_share = {self._max_share:g}. The most frequent error: {worst.kind}: "
            f"{worst.message or 'no message'}"
        )
