"""Strategies of placement on one trace: what every step takes, and where all device-seconds go."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.dynamic_partition import DynamicPartition, DynamicPartitionConfig
from gcore_placement.errors import refusal
from gcore_placement.partition import Partition, PartitionSpace
from gcore_placement.simulation.step_account import IDLE, SimulatedStep, step_loads, whole_step
from gcore_placement.simulation.traces import Trace, Wave
from gcore_placement.simulation.wave_requests import context_tokens, policy_requests
from gcore_placement.simulation.waves import Moved, WaveOutcome, in_turns, side_by_side


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """All steps under a strategy."""

    strategy: str
    num_devices: int
    steps: tuple[SimulatedStep, ...]

    @cached_property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / len(self.steps)

    @property
    def num_moves(self) -> int:
        """Steps before which devices moved."""
        return sum(step.num_moved_devices > 0 for step in self.steps)

    def share(self, column: str) -> float:
        """Of all device-seconds, for one of WORK and IDLE."""
        return sum(step.device_s[column] for step in self.steps) / (self.num_devices * self.seconds)

    @property
    def idle_share(self) -> float:
        return sum(self.share(column) for column in IDLE)


class Simulator:
    """Runs one trace under any strategy; what strategies have in common is simulated once.

    Args:
        trace: what the steps ask for.
        costs: what everything takes. A generative reward is needed: without one there is nothing to partition.
        space: the partitions that the cluster allows.
        progress: called with the number of steps just simulated.

    Raises:
        PlacementError: `costs` has no reward, decoding takes no time, or the engines of `costs` and `space` differ.
    """

    def __init__(
        self, trace: Trace, costs: JobCosts, space: PartitionSpace, *, progress: Callable[[int], None] | None = None
    ) -> None:
        if costs.reward is None:
            raise refusal("costs.reward", None, "the costs of a generative reward, to which devices can be given")
        for name, engine, limits in (("policy", costs.policy, space.policy), ("reward", costs.reward, space.reward)):
            if not engine.decode_base_s + engine.decode_per_sequence_s:
                raise refusal(f"costs.{name}.decode_base_s", 0.0, "above 0: a token takes time")
            if engine.devices_per_replica != limits.devices_per_replica:
                raise refusal(
                    f"space.{name}.devices_per_replica",
                    limits.devices_per_replica,
                    f"{engine.devices_per_replica}, as the costs have it",
                )
        self.trace = trace
        self.costs = costs
        self.space = space
        self._reward: EngineCosts = costs.reward
        self._progress = progress or (lambda _: None)
        self._waves = [list(trace.waves(step)) for step in range(trace.num_steps)]
        self._known: dict[tuple[int, int], list[WaveOutcome]] = {}
        """Waves of a step on a partition to which nothing has just moved."""

    def colocated(self) -> StrategyRun:
        """All devices generate, then all judge, wave after wave, with swaps between."""
        outcomes = in_turns(self.costs, [wave for waves in self._waves for wave in waves], self.space.num_devices)
        self._progress(self.trace.num_steps)
        return self._run("colocated", [self._whole_step(*part, None) for part in self._by_step(outcomes)])

    def split(self, partition: Partition) -> StrategyRun:
        """The same partition in every step."""
        index = self.space.index(partition)
        self._simulate(range(self.trace.num_steps), index)
        return self._run("split", [self._known_step(step, index) for step in range(self.trace.num_steps)])

    def best_split(self) -> StrategyRun:
        """The partition that takes least over the whole trace, as only hindsight knows it.

        Exact: a partition is left out only where a bound shows it to be slower.
        """
        while True:
            index = int(self._least_s.sum(axis=0).argmin())
            if all((step, index) in self._known for step in range(self.trace.num_steps)):
                return self.split(self.space.partitions[index])
            self._simulate(range(self.trace.num_steps), index)

    def clairvoyant(self) -> StrategyRun:
        """In every step the partition that takes least, known in advance, and moves for nothing.

        No strategy that keeps to the space's partitions takes less in any step. Exact, as `best_split`.
        """
        while True:
            chosen = self._least_s.argmin(axis=1)
            unknown = [step for step, index in enumerate(chosen) if (step, int(index)) not in self._known]
            if not unknown:
                return self._run(
                    "clairvoyant", [self._known_step(step, int(index)) for step, index in enumerate(chosen)]
                )
            for index in np.unique(chosen[unknown]):
                self._simulate([step for step in unknown if chosen[step] == index], int(index))

    def dynamic(
        self,
        start: Partition | None = None,
        *,
        config: DynamicPartitionConfig | None = None,
        believed: JobCosts | None = None,
    ) -> StrategyRun:
        """`DynamicPartition` decides after every step.

        Devices that move load the weights of their new role, which takes longer than to wake, and begin late.

        Args:
            start: what the believed costs say of the first step, as a plan would, if None.
            config: how readily devices move; its `move_s` is what a move takes here.
            believed: what the policy takes the costs to be; as they are, if None.
        """
        load_s = max(0.0, self.costs.swap.load_s - self.costs.swap.wake_s)
        config = replace(config or DynamicPartitionConfig(), move_s=load_s)
        policy = DynamicPartition(self.space, start or self._planned_start(believed or self.costs), config)
        steps: list[SimulatedStep] = []
        before = policy.partition
        for step, waves in enumerate(self._waves):
            partition, index = policy.partition, self.space.index(policy.partition)
            if partition == before:
                self._simulate([step], index)
                outcomes = self._known[step, index]
            else:
                outcomes = side_by_side(self.costs, waves, partition, _moved(before, partition, load_s))
                self._progress(1)
            num_moved = abs(partition.policy_devices - before.policy_devices)
            steps.append(self._whole_step(step, outcomes, partition, num_moved))
            policy.observe(*step_loads(believed or self.costs, outcomes))
            before = partition
        return self._run("dynamic", steps)

    def _planned_start(self, believed: JobCosts) -> Partition:
        middle = self.space.nearest(self.space.num_devices / 2)
        index = self.space.index(middle)
        self._simulate([0], index)
        policy, reward = step_loads(believed, self._known[0, index])
        works, floors = (policy.work_device_s, reward.work_device_s), (policy.floor_s, reward.floor_s)
        return DynamicPartition(self.space, middle).best(works, floors)

    def _run(self, strategy: str, steps: Sequence[SimulatedStep]) -> StrategyRun:
        return StrategyRun(strategy=strategy, num_devices=self.space.num_devices, steps=tuple(steps))

    def _simulate(self, steps: Iterable[int], index: int) -> None:
        """Makes steps on a partition known, all at once."""
        unknown = [step for step in steps if (step, index) not in self._known]
        if not unknown:
            return
        outcomes = side_by_side(
            self.costs, [wave for step in unknown for wave in self._waves[step]], self.space.partitions[index]
        )
        first = 0
        for step in unknown:
            end = first + len(self._waves[step])
            self._known[step, index] = outcomes[first:end]
            self._least_s[step, index] = self._known_step(step, index).seconds
            first = end
        self._progress(len(unknown))

    def _by_step(self, outcomes: Sequence[WaveOutcome]) -> Iterable[tuple[int, Sequence[WaveOutcome]]]:
        first = 0
        for step, waves in enumerate(self._waves):
            yield step, outcomes[first : first + len(waves)]
            first += len(waves)

    def _known_step(self, step: int, index: int) -> SimulatedStep:
        return self._whole_step(step, self._known[step, index], self.space.partitions[index])

    def _whole_step(
        self, step: int, waves: Sequence[WaveOutcome], partition: Partition | None, num_moved_devices: int = 0
    ) -> SimulatedStep:
        return whole_step(
            self.costs,
            waves,
            num_devices=self.space.num_devices,
            tokens_and_pairs=self.trace.training_tokens(step),
            partition=partition,
            num_moved_devices=num_moved_devices,
        )

    @cached_property
    def _least_s(self) -> NDArray[np.float64]:
        """[num_steps, num_partitions], seconds that a step takes at least; what it does take, once that is known."""
        policy_P = [p.policy_replicas for p in self.space.partitions]
        reward_P = np.array([p.reward_replicas for p in self.space.partitions], dtype=np.float64)
        rows: list[NDArray[np.float64]] = []
        for step, waves in enumerate(self._waves):
            least_P = np.full(len(policy_P), self._whole_step(step, [], self.space.partitions[0]).seconds)
            for wave in waves:
                held_GN = wave.prompt_length[:, None] + wave.response_length
                judging = _least_judging_s(self._reward, reward_P, held_GN, wave.judge_length)
                least_P += np.maximum(_least_generating_s(self.costs.policy, policy_P, wave), judging)
            # Rounding must not let a bound exceed what it bounds.
            rows.append(least_P * (1 - 1e-9))
        return np.array(rows)


def _least_generating_s(costs: EngineCosts, policy_replicas: Sequence[int], wave: Wave) -> NDArray[np.float64]:
    """[num_partitions], seconds below which the policy's replicas cannot be done with a wave.

    A replica decodes `max_num_seqs` tokens a step at most, and a step for each token of its longest response; every
    token adds what it adds.
    """
    least: list[float] = []
    for num_replicas in policy_replicas:
        requests = policy_requests([wave], num_replicas)
        starts = np.flatnonzero(np.diff(requests.replica, prepend=-1))
        tokens = np.add.reduceat(requests.length, starts)
        steps = np.maximum(np.maximum.reduceat(requests.length, starts), tokens / costs.max_num_seqs)
        context = np.add.reduceat(context_tokens(requests), starts)
        seconds = costs.decode_base_s * steps + costs.decode_per_sequence_s * tokens
        least.append(float((seconds + costs.decode_per_context_token_s * context).max()))
    return np.array(least)


def _least_judging_s(
    costs: EngineCosts, replicas_P: NDArray[np.float64], held_GN: NDArray[np.float64], length_GN: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[num_partitions], seconds below which judges cannot be done, however responses are divided among them."""
    context = (held_GN * length_GN + length_GN**2 / 2).sum()
    per_token_s = costs.decode_per_sequence_s + costs.decode_base_s / costs.max_num_seqs
    shared_s = (
        per_token_s * length_GN.sum()
        + costs.decode_per_context_token_s * context
        + costs.prefill_per_token_s * held_GN.sum()
    )
    return shared_s / replicas_P


def _moved(before: Partition, after: Partition, load_s: float) -> Moved:
    return Moved(
        policy_replicas=max(0, after.policy_replicas - before.policy_replicas),
        reward_replicas=max(0, after.reward_replicas - before.reward_replicas),
        load_s=load_s,
    )
