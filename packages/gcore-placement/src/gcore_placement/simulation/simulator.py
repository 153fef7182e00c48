"""The simulator of placement strategies on one trace: seconds of each step, and where all device-seconds go."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gcore_placement.costs import JobCosts
from gcore_placement.errors import refusal
from gcore_placement.forecast import training_seconds
from gcore_placement.ledger import WORK as _WORK_OF_STAGE
from gcore_placement.partition.config import DynamicPartitionConfig
from gcore_placement.partition.dynamic_partition import DynamicPartition
from gcore_placement.partition.space import Partition, PartitionSpace, RoleLoad
from gcore_placement.quantities import Floats
from gcore_placement.simulation.waves import (
    WaveOutcome,
    engine_loads,
    least_seconds,
    simulate_wave,
)
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy
from gcore_placement.workload.traces import Trace, TraceWave

WORK = tuple(_WORK_OF_STAGE.values())
"""Columns of work, as in the ledger of a run."""
IDLE = ("long_tail", "waiting_for_reward", "waiting_for_weights", "swap", "imbalance", "unassigned")
"""Causes of idleness that a simulation distinguishes, by the ledger's names."""

_HELD_UP = 0.3
"""A reward that is done later than without any contention, by more than this share, held up the wave itself. The last
judgements of a wave meet engines that are full, and take longer than alone: up to this share that is the law's error.
"""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """The account of one step under a strategy.

    Example:
        >>> lengths = ((0.5, 1000),)
        >>> recorded = RecordedStep(num_prompts=16, num_accepted=16,
        ...     prompt_quantiles=lengths, response_quantiles=lengths, judge_quantiles=lengths)
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=engine, training=TrainingCosts(per_token_s=1e-4))
        >>> space = PartitionSpace(num_devices=4, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> simulator = Simulator(recorded_trace("run", [recorded], n=8), costs, space)
        >>> step = simulator.run("colocated").steps[0]
        >>> round(step.stage_s["generation"], 2), round(step.seconds, 2)
        (26.4, 32.8)
    """

    seconds: float
    stage_s: dict[str, float]
    """Seconds by stage: swap, generation (with reward), preparation, training and weight_sync."""
    device_s: dict[str, float]
    """Device-seconds of each of WORK and IDLE; they add up to devices * seconds."""
    partitions: tuple[Partition, ...] = ()
    """The partitions of its waves; empty: the roles take turns on all devices."""
    moved_devices: tuple[int, ...] = ()
    """Devices that changed their role before each wave."""
    lent_devices: tuple[float, ...] = ()
    """Devices of the policy that judged within each wave, on average over it."""


def wave_loads(
    believed: JobCosts, sampled: TraceWave, wave: WaveOutcome
) -> tuple[RoleLoad, RoleLoad]:
    """Return the loads of policy and reward that a live run would observe, with `believed` as its costs."""
    (policy_work, policy_floor_s), (reward_work, reward_floor_s) = engine_loads(believed, sampled)
    # Replicas that start late end late, whatever their work.
    was_late = wave.late_s > 0
    return (
        RoleLoad(
            work_device_s=policy_work,
            # The last response has yet to be judged.
            floor_s=policy_floor_s + wave.uncontended_s - wave.generation_s,
            busy_device_s=wave.device_s["generation"],
            finish_s=max(0.0, wave.uncontended_s - wave.late_s),
            was_waiting=was_late,
        ),
        RoleLoad(
            work_device_s=reward_work,
            floor_s=reward_floor_s + wave.first_response_s,
            busy_device_s=wave.device_s["reward"],
            finish_s=max(0.0, wave.seconds - wave.late_s),
            was_waiting=was_late or wave.seconds <= wave.uncontended_s * (1 + _HELD_UP),
            lent_devices=wave.lent_devices,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """The steps of a trace under one strategy.

    Example:
        >>> lengths = ((0.5, 1000),)
        >>> recorded = RecordedStep(num_prompts=16, num_accepted=16,
        ...     prompt_quantiles=lengths, response_quantiles=lengths, judge_quantiles=lengths)
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=engine, training=TrainingCosts(per_token_s=1e-4))
        >>> space = PartitionSpace(num_devices=4, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> simulator = Simulator(recorded_trace("run", [recorded], n=8), costs, space)
        >>> run = simulator.run("split")
        >>> round(run.step_s, 2), round(run.idle_share, 3)
        (39.2, 0.418)
    """

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
        """Waves before which devices moved."""
        return sum(_count_positive(step.moved_devices) for step in self.steps)

    @property
    def num_loans(self) -> int:
        """Waves within which devices were lent."""
        return sum(_count_positive(step.lent_devices) for step in self.steps)

    def share(self, column: str) -> float:
        """Return the share of one of WORK and IDLE in all device-seconds."""
        return sum(step.device_s[column] for step in self.steps) / (self.num_devices * self.seconds)

    @property
    def idle_share(self) -> float:
        return sum(self.share(column) for column in IDLE)


def _count_positive(numbers: Iterable[float]) -> int:
    return sum(number > 0 for number in numbers)


class Simulator:
    """Simulates one trace under any strategy; work that strategies have in common is simulated once.

    Args:
        costs: costs of all roles, with a generative reward: without one there is nothing to partition.
        space: the partitions that the cluster allows, of replicas as large as those of the costs.
        progress: called with the number of waves just simulated.

    Example:
        >>> lengths = ((0.5, 1000),)
        >>> recorded = RecordedStep(num_prompts=16, num_accepted=16,
        ...     prompt_quantiles=lengths, response_quantiles=lengths, judge_quantiles=lengths)
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=engine, training=TrainingCosts(per_token_s=1e-4))
        >>> space = PartitionSpace(num_devices=4, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> simulator = Simulator(recorded_trace("run", [recorded], n=8), costs, space)
        >>> round(simulator.colocated().step_s, 2)
        32.8
        >>> round(simulator.split(space.nearest(2)).step_s, 2)
        39.2
    """

    def __init__(
        self,
        trace: Trace,
        costs: JobCosts,
        space: PartitionSpace,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if costs.reward is None:
            raise refusal(
                "costs.reward",
                None,
                "the costs of a generative reward, to which devices can be given",
            )
        if len(space.roles) != 2:
            raise refusal(
                "space.roles",
                space.roles,
                "2 roles, the policy and the reward, which are simulated",
            )
        engines = {"policy": costs.policy, "reward": costs.reward}
        for (name, engine), limits in zip(engines.items(), space.roles, strict=True):
            if not engine.decode_base_s + engine.decode_per_sequence_s:
                raise refusal(f"costs.{name}.decode_base_s", 0.0, "above 0: a token takes time")
            if engine.devices_per_replica != limits.devices_per_replica:
                accepted = f"{engine.devices_per_replica}, as the costs have it"
                raise refusal(
                    f"space.{name}.devices_per_replica", limits.devices_per_replica, accepted
                )
        self.trace = trace
        self.costs = costs
        self.space = space
        self._progress = progress or (lambda _: None)
        self._waves: list[TraceWave] = []
        self._end: list[int] = []
        """For each step, the index after its last wave."""
        for step in range(trace.num_steps):
            self._waves.extend(trace.waves(step))
            self._end.append(len(self._waves))
        self._known: dict[tuple[int, int], WaveOutcome] = {}
        """Outcomes of a wave on a partition without moves."""

    def run(self, strategy: Strategy) -> StrategyRun:
        """Simulate a planned strategy; split is the best split."""
        traits = STRATEGIES[strategy]
        if traits.is_time_shared:
            return self.colocated()
        return self.dynamic() if traits.follows_load else self.best_split()

    def colocated(self) -> StrategyRun:
        """Simulate colocated: all devices generate, then all judge, wave after wave, with swaps between."""
        outcomes = [self._simulate(wave, self.space.num_devices) for wave in self._waves]
        return self._run("colocated", outcomes)

    def split(self, partition: Partition) -> StrategyRun:
        """Simulate split: the same partition in each wave."""
        return self._run_partitions("split", [self.space.index(partition)] * len(self._waves))

    def best_split(self) -> StrategyRun:
        """Simulate the split that is fastest over the whole trace, chosen with hindsight."""
        return self._run_fastest("split", [range(len(self._waves))])

    def clairvoyant(self) -> StrategyRun:
        """Simulate the fastest partition of each wave, known in advance, with moves that take no time.

        No strategy that keeps to the space's partitions is faster in any wave. Loans within a wave do not keep to them.
        """
        return self._run_fastest("clairvoyant", [[wave] for wave in range(len(self._waves))])

    def dynamic(
        self,
        start: Partition | None = None,
        *,
        config: DynamicPartitionConfig | None = None,
        believed: JobCosts | None = None,
        lends: bool = True,
    ) -> StrategyRun:
        """Simulate dynamic: `DynamicPartition` decides after each wave.

        Devices that move load the weights of their new role and start late: before a step by the time that loading
        takes longer than waking, within a step by all of it, after the sleep of their old role. Engines of the policy
        that `LendingRule` lends to the judge within a wave return after it, as moves.

        Args:
            start: None: half of the devices for each role.
            config: conditions of moves; their seconds are those of the costs.
            believed: the costs that `DynamicPartition` assumes; None: the true ones.
            lends: whether engines help the other role within a wave.
        """
        swap = self.costs.swap
        config = replace(
            config or DynamicPartitionConfig(),
            move_s=max(0.0, swap.load_s - swap.wake_s),
            move_within_s=swap.sleep_s + swap.load_s,
        )
        policy = DynamicPartition(
            self.space, start or self.space.nearest(self.space.num_devices / 2), config
        )
        outcomes: list[WaveOutcome] = []
        partitions: list[Partition] = []
        is_within_step = False
        for number, wave in enumerate(self._waves):
            partition = policy.partition
            if outcomes and outcomes[-1].replicas != partition.replicas:
                outcome = self._simulate(
                    wave,
                    partition,
                    before=outcomes[-1].replicas,
                    late_s=config.move_within_s if is_within_step else config.move_s,
                    lends=lends,
                )
            else:
                outcome = self._outcome(number, self.space.index(partition))
                if lends and outcome.queued_until_s > outcome.spare_s:
                    outcome = simulate_wave(self.costs, wave, partition, lends=True)
            outcomes.append(outcome)
            partitions.append(partition)
            is_within_step = number + 1 not in self._end
            loads = wave_loads(believed or self.costs, wave, outcome)
            policy.observe(*loads, size=len(wave.prompt_length), is_within_step=is_within_step)
        return self._run("dynamic", outcomes, partitions)

    def _run_fastest(self, strategy: str, groups: Sequence[Sequence[int]]) -> StrategyRun:
        """Run each group of waves, given by their numbers, on the partition that is fastest for the group."""
        chosen: list[int] = []
        for waves in groups:
            fastest = 0
            fastest_s = np.inf
            for index in self._least_s[waves].sum(axis=0).argsort().tolist():
                seconds = self._seconds_below(fastest_s, waves, index)
                if seconds < fastest_s:
                    fastest = index
                    fastest_s = seconds
            chosen.extend([fastest] * len(waves))
        return self._run_partitions(strategy, chosen)

    def _seconds_below(self, limit_s: float, waves: Sequence[int], index: int) -> float:
        """Return the seconds of waves on a partition, or infinity as soon as they cannot be below a limit."""
        for wave in waves:
            if self._least_s[waves, index].sum() >= limit_s:
                return np.inf
            self._outcome(wave, index)
        return sum(self._outcome(wave, index).seconds for wave in waves)

    def _run_partitions(self, strategy: str, chosen: Sequence[int]) -> StrategyRun:
        """Combine the waves, each on the partition with the index that is chosen for it."""
        outcomes = [self._outcome(wave, index) for wave, index in enumerate(chosen)]
        return self._run(strategy, outcomes, [self.space.partitions[index] for index in chosen])

    def _run(
        self, strategy: str, outcomes: Sequence[WaveOutcome], partitions: Sequence[Partition] = ()
    ) -> StrategyRun:
        """Combine the outcomes of all waves, and the partitions they ran on; no partitions: colocated."""
        devices = [partition.devices[0] for partition in partitions]
        moved = np.abs(np.diff(devices, prepend=devices[:1])).tolist()
        steps: list[SimulatedStep] = []
        first = 0
        for step, end in enumerate(self._end):
            steps.append(
                self._step(step, outcomes[first:end], partitions[first:end], moved[first:end])
            )
            first = end
        return StrategyRun(
            strategy=strategy, num_devices=self.space.num_devices, steps=tuple(steps)
        )

    def _step(
        self,
        step: int,
        waves: Sequence[WaveOutcome],
        partitions: Sequence[Partition],
        moved: Sequence[int],
    ) -> SimulatedStep:
        """Combine waves into a step, with the preparation, training and weight sync of all devices after them.

        Engines wake before the waves and sleep after them; where roles take turns, also between waves.
        """
        num_devices = self.space.num_devices
        swap = self.costs.swap
        sync_s = self.costs.training.sync_s
        num_swaps = len(waves)
        policy_devices = num_devices
        if partitions:
            num_swaps = 1
            policy_devices = partitions[-1].devices[0]
        tokens, pairs = self.trace.training_tokens(step)
        prepare_s, train_s = training_seconds(self.costs.training, tokens, pairs, num_devices)
        stage_s = {
            "swap": (swap.sleep_s + swap.wake_s) * num_swaps,
            "generation": sum(wave.seconds for wave in waves),
            "preparation": float(prepare_s),
            "training": float(train_s),
            "weight_sync": sync_s,
        }
        device_s = {
            name: sum(wave.device_s.get(name, 0.0) for wave in waves) for name in WORK + IDLE
        }
        for name in ("swap", "preparation", "training"):
            device_s[name] += num_devices * stage_s[name]
        device_s["weight_sync"] += policy_devices * sync_s
        device_s["waiting_for_weights"] += (num_devices - policy_devices) * sync_s
        return SimulatedStep(
            seconds=sum(stage_s.values()),
            stage_s=stage_s,
            device_s=device_s,
            partitions=tuple(partitions),
            moved_devices=tuple(moved),
            lent_devices=tuple(wave.lent_devices for wave in waves),
        )

    def _simulate(self, wave: TraceWave, layout: Partition | int, **options: Any) -> WaveOutcome:
        outcome = simulate_wave(self.costs, wave, layout, **options)
        self._progress(1)
        return outcome

    def _outcome(self, wave: int, index: int) -> WaveOutcome:
        """Return the outcome of a wave on a partition without moves, which is simulated once."""
        if (wave, index) not in self._known:
            outcome = self._simulate(self._waves[wave], self.space.partitions[index])
            self._known[wave, index] = outcome
            self._least_s[wave, index] = outcome.seconds
        return self._known[wave, index]

    @cached_property
    def _least_s(self) -> Floats:
        """[num_waves, num_partitions] lower bounds of each wave's seconds on each partition; exact once simulated."""
        partitions = self.space.partitions
        return np.stack([least_seconds(self.costs, wave, partitions) for wave in self._waves])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of all planned strategies on one trace, by name, and of the clairvoyant one.

    Example:
        >>> lengths = ((0.5, 1000),)
        >>> recorded = RecordedStep(num_prompts=16, num_accepted=16,
        ...     prompt_quantiles=lengths, response_quantiles=lengths, judge_quantiles=lengths)
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=engine, training=TrainingCosts(per_token_s=1e-4))
        >>> space = PartitionSpace(num_devices=4, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> simulator = Simulator(recorded_trace("run", [recorded], n=8), costs, space)
        >>> comparison = compare("run", simulator)
        >>> round(comparison["colocated"].step_s, 2), round(comparison["clairvoyant"].step_s, 2)
        (32.8, 39.2)
    """

    name: str
    num_devices: int
    runs: tuple[StrategyRun, ...]

    def __getitem__(self, strategy: str) -> StrategyRun:
        return next(run for run in self.runs if run.strategy == strategy)


def compare(name: str, simulator: Simulator) -> Comparison:
    """Simulate the trace of a simulator under all strategies."""
    # The clairvoyant one goes first over most partitions that others need.
    clairvoyant = simulator.clairvoyant()
    runs = (*map(simulator.run, PLANNED), clairvoyant)
    return Comparison(name=name, num_devices=simulator.space.num_devices, runs=runs)
