"""The placements of a job that fit into memory, each with its predicted step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import SwapCosts, times
from gcore_placement.forecast import added_by_reward, num_swaps
from gcore_placement.planning.memory import weight_sync_bytes
from gcore_placement.planning.options import (
    EngineOptions,
    Engines,
    Setting,
    TrainingChoice,
    TrainingOptions,
)
from gcore_placement.strategies import STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A placement that fits into memory."""

    step_s: float
    num_devices: int
    strategy: Strategy
    training: TrainingChoice
    policy: Engines
    policy_replicas: int
    judge: Engines | None
    judge_replicas: int


class Candidates:
    """The placements among which `plan` chooses."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.policy = EngineOptions(setting, "generation")
        self.judge = EngineOptions(setting, "reward") if setting.job.judge is not None else None
        self.training = cache(partial(TrainingOptions, setting))

    def of(self, num_devices: int, strategy: Strategy | None) -> Iterator[Candidate]:
        """Yield the placements that fit on `num_devices`, each with its best partition; None: all strategies."""
        # Of strategies with the same prediction the one that follows the load comes first.
        strategies: list[Strategy] = [strategy] if strategy else []
        for name, traits in reversed(STRATEGIES.items()):
            serves = traits.is_time_shared or (self.judge is not None and traits.follows_load)
            if strategy is None and traits.is_planned and serves:
                strategies.append(name)
        for choice in self.training(num_devices).choices():
            if self.setting.runnable and not choice.offload:
                continue
            free_bytes = self.setting.usable_bytes
            if not choice.offload:
                free_bytes -= choice.state_bytes
            policies = self.policy.of(num_devices, free_bytes)
            judges = [None] if self.judge is None else self.judge.of(num_devices, free_bytes)
            for policy, judge in product(policies, judges):
                in_host = policy.weights_bytes
                if judge:
                    in_host += judge.weights_bytes
                in_host += choice.host_bytes
                if choice.offload:
                    in_host += choice.state_bytes
                if judge and self.setting.runnable and judge.tp != policy.tp:
                    continue
                if self.sync_bytes(policy, choice, num_devices) > self.setting.usable_bytes:
                    continue
                if in_host > self.setting.cluster.host_memory_bytes:
                    continue
                swap = self.swap_costs(policy, judge)
                for name in strategies:
                    split = self._fastest_split(num_devices, name, policy, judge)
                    if split is None:
                        continue
                    sampling_s, policy_replicas, judge_replicas = split
                    swap_s = num_swaps(self.setting.job, strategy=name) * (
                        swap.sleep_s + swap.wake_s
                    )
                    yield Candidate(
                        step_s=sampling_s
                        + (choice.seconds + swap_s + self.sync_s(policy, num_devices)),
                        num_devices=num_devices,
                        strategy=name,
                        training=choice,
                        policy=policy,
                        policy_replicas=policy_replicas,
                        judge=judge,
                        judge_replicas=judge_replicas,
                    )

    def _fastest_split(
        self, num_devices: int, strategy: Strategy, policy: Engines, judge: Engines | None
    ) -> tuple[float, int, int] | None:
        """Return the least seconds of sampling, and the replicas of policy and judge; None if both do not fit."""
        policy_replicas = np.array([num_devices // policy.tp])
        judge_replicas = np.array([0])
        if judge is not None and STRATEGIES[strategy].is_time_shared:
            judge_replicas = np.array([num_devices // judge.tp])
        elif judge is not None:
            policy_replicas = np.arange(1, (num_devices - judge.tp) // policy.tp + 1)
            judge_replicas = (num_devices - policy_replicas * policy.tp) // judge.tp
        if not policy_replicas.size:
            return None
        waves_s = policy.waves_s[:, policy_replicas - 1]
        if judge is not None:
            judging = judge.waves_s[:, judge_replicas - 1]
            last_s = judge.last_s[judge_replicas - 1]
            waves_s = waves_s + added_by_reward(waves_s, judging, strategy=strategy, last_s=last_s)
        sampling_s = self.setting.job.wave_chances @ waves_s
        best = int(sampling_s.argmin())
        return float(sampling_s[best]), int(policy_replicas[best]), int(judge_replicas[best])

    def sync_bytes(self, policy: Engines, choice: TrainingChoice, num_devices: int) -> float:
        """Return the bytes of a device while weights pass from its rank to its engine, in the runs of gcore-llm.

        They pass a tensor at a time, of which the embedding is the largest; from a single rank all at once, as the
        engine is in a process of its own. 0 for plans that need not be runnable.
        """
        if not self.setting.runnable:
            return 0.0
        return weight_sync_bytes(
            self.setting.job, choice.state_bytes, policy.weights_bytes, at_once=num_devices == 1
        )

    def swap_costs(self, policy: Engines, judge: Engines | None) -> SwapCosts:
        """Return the costs of moving the larger of the two models' weights."""
        size_bytes = policy.weights_bytes
        if judge:
            size_bytes = max(size_bytes, judge.weights_bytes)
        costs = swap_costs(self.setting.cluster, self.setting.efficiency, size_bytes)
        return times(costs, self.setting.correction.factor("swap"))

    def sync_s(self, policy: Engines, num_devices: int) -> float:
        """Return the seconds of `Efficiency.weight_sync_seconds`, with ranks and engines on all devices."""
        seconds = self.setting.efficiency.weight_sync_seconds(
            self.setting.cluster,
            policy.weights_bytes * policy.tp,
            num_ranks=num_devices,
            engine_devices=num_devices,
            devices_per_engine=policy.tp,
            colocated=True,
        )
        return self.setting.correction.factor("weight_sync") * seconds


def swap_costs(cluster: Cluster, efficiency: Efficiency, size_bytes: float) -> SwapCosts:
    """Return the costs of moving `size_bytes` of weights of each device.

    The host memory holds the engines of all roles of a device, so one that gets another role wakes.
    """
    seconds = efficiency.swap_s + size_bytes / (cluster.device.host_bytes_per_s * efficiency.host)
    return SwapCosts(sleep_s=seconds, wake_s=seconds, load_s=seconds)
