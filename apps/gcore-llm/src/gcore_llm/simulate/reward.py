"""A simulated reward: a rule that answers at once, or a judge with replicas of its own."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from gcore_llm.simulate.config import RewardModel, SimulateConfig
from gcore_llm.simulate.load import LoadMeter
from gcore_llm.simulate.replay import Replay
from gcore_llm.simulate.work import group_and_index
from gcore_placement import LeastLoaded, RunningLedger, log_normal, uniform
from gcore_rollout import RewardRunner, RewardRunnerConfig

_GROUP_STREAM = 3
_SAMPLE_STREAM = 4
_LATENCY_STREAM = 5


class ModelledReward:
    """Scores of 0 and 1: a share ``acceptance`` of groups, or those of the replay, has both, the others one of them.

    Score and latency depend on the seed and the sample alone. Completions are samples' names (see `sample_name`).
    """

    def __init__(
        self, config: SimulateConfig, *, ledger: RunningLedger, meter: LoadMeter, replay: Replay | None = None
    ) -> None:
        self._seed = config.seed
        self._n = config.n
        self._model: RewardModel = config.reward
        self._ledger = ledger
        self._meter = meter
        self._replay = replay
        self._choice = LeastLoaded(max(1, self._model.num_replicas))

    def runner(self) -> RewardRunner:
        """Return the service that makes the calls, as many at once as the replicas take."""
        places = max(1, self._model.num_replicas) * self._model.max_concurrency
        if not self._model.latency_s:
            return RewardRunner(self.rule, RewardRunnerConfig(max_concurrency=places, sync_in_threads=False))
        return RewardRunner(self.judge, RewardRunnerConfig(max_concurrency=places, timeout_s=math.inf))

    def rule(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score at once."""
        del prompt, row
        with self._meter.paused():
            return self._score(*group_and_index(int(completion)))

    async def judge(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score after the latency."""
        with self._meter.paused():
            u = uniform(self._seed, _LATENCY_STREAM, int(completion))
            latency_s = log_normal(u, median=self._model.latency_s, sigma=self._model.latency_sigma)
            replica = self._begin()
        try:
            await asyncio.sleep(latency_s)
        finally:
            self._end(replica)
        return self.rule(prompt, completion, row)

    def _begin(self) -> int:
        """Assign a call to the replica with the fewest calls."""
        replica, load = self._choice.take(1)
        if load == 1 and self._model.devices:
            self._ledger.reward(self._model.devices_per_replica)
        return replica

    def _end(self, replica: int) -> None:
        if not self._choice.add(replica, -1) and self._model.devices:
            self._ledger.reward(-self._model.devices_per_replica)

    def _score(self, group: int, index: int) -> float:
        u = uniform(self._seed, _GROUP_STREAM, group)
        differs = u < self._model.acceptance if self._replay is None else self._replay.has_signal(group)
        if not differs:
            return float(u >= (1 + self._model.acceptance) / 2)
        right = int(uniform(self._seed, _SAMPLE_STREAM, group) * self._n)
        if index in (right, (right + 1) % self._n):
            return float(index == right)
        return float(uniform(self._seed, _SAMPLE_STREAM, group, index) < 0.5)
