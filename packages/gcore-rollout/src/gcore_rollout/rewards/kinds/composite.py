"""Weighted sums of rewards."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from gcore_rollout.errors import RewardConfigError, require
from gcore_rollout.rewards.reward import RewardFunction, Scored, located
from gcore_rollout.rewards.runner import answer, checked


class CompositeReward:
    """The weighted sum of named rewards, which run at the same time.

    Each reward's own score, before its weight, is the part of its name, and its parts are below that: ``judge`` and
    ``judge/parsed``. Their feedback is joined by blank lines. A synchronous reward runs on the event loop, so wrap one
    that takes long in `ThreadedReward`. Weights need not sum to 1, and 0 measures a reward without using it.
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], *, weights: Mapping[str, float]) -> None:
        if not rewards:
            raise RewardConfigError("rewards is empty; expected at least one")
        if rewards.keys() != weights.keys():
            raise RewardConfigError(f"weights has {sorted(weights)}; expected the names of rewards, {sorted(rewards)}")
        for name, weight in weights.items():
            require(f"weights[{name!r}]", weight, math.isfinite(weight), "a finite number")
        if not any(weights.values()):
            raise RewardConfigError(f"weights are all 0 ({sorted(weights)}); expected at least one that is not")
        self._rewards, self._weights = dict(rewards), dict(weights)

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        async def part(name: str, reward: RewardFunction) -> Scored:
            with located(f"part {name!r}"):
                return checked(await answer(reward, prompt, completion, row))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(part(name, reward)) for name, reward in self._rewards.items()}
        except BaseExceptionGroup as errors:
            # The others were cancelled.
            first = errors.exceptions[0]
            raise first from first.__cause__
        scored = {name: task.result() for name, task in tasks.items()}
        return Scored(
            score=math.fsum(self._weights[name] * one.score for name, one in scored.items()),
            parts={part: value for name, one in scored.items() for part, value in one.as_parts(name).items()},
            feedback="\n\n".join(one.feedback for one in scored.values() if one.feedback),
        )
