"""Decisions during a run: devices move from the idle role to the busy one, or both take turns on all of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gcore_placement.errors import refusal
from gcore_placement.partition.safeguard import Safeguard
from gcore_placement.partition.space import Partition, PartitionSpace, RoleLoad, stage_seconds
from gcore_placement.quantities import (
    Amount,
    Checked,
    Floats,
    Positive,
    check_above_0,
)

NUM_ROUNDS = 21
"""Rounds to remember; noise is estimated from the changes between them."""
_MAX_CORRECTION = 16.0
_NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""
_WORK, _FLOOR, _CORRECTION, _DEVICES, _SIZE = slice(0, 2), slice(2, 4), slice(4, 6), 6, 7
"""Columns of a row: work for a size of 1, as a model has it; floors; corrections; the policy's devices; the size."""

Load = tuple[Floats, Floats]
"""[R] device-seconds of work, and [R] seconds that devices do not shorten."""


class LoadHistory:
    """The last rounds of R = 2 roles. A round counts by its size: a handful of prompts decides nothing."""

    def __init__(self, config: "DynamicPartitionConfig") -> None:
        self._config = config
        self.rows: list[list[float]] = []

    def add(self, loads: tuple[RoleLoad, RoleLoad], devices: tuple[int, int], size: float) -> None:
        """Add a round, with the devices of each role."""
        found = self.corrections.tolist()
        if self._config.is_corrected:
            found = [load.correction(d, last) for load, d, last in zip(loads, devices, found, strict=True)]
        corrections = np.clip(found, 1 / _MAX_CORRECTION, _MAX_CORRECTION).tolist()
        work, floors = [load.work_device_s / size for load in loads], [load.floor_s for load in loads]
        self.rows = [*self.rows[1 - NUM_ROUNDS :], [*work, *floors, *corrections, float(devices[0]), size]]

    @property
    def corrections(self) -> Floats:
        """[R], median corrections of the model's work."""
        return self._medians(_CORRECTION) if self.rows else np.ones(2)

    def settled(self) -> Load:
        """Return the load of a round of usual size, by medians of the last ones."""
        return self._medians(_WORK) * self.corrections * self._usual_size(), self._medians(_FLOOR)

    def latest(self, size: float | None = None) -> Load:
        """Return the last round's load, scaled to a size; None: the usual one."""
        last = np.array(self.rows[-1])
        return last[_WORK] * self.corrections * (size or self._usual_size()), last[_FLOOR]

    def noise(self) -> Floats:
        """Return the standard deviation of the logarithm of each role's work, from its changes between rounds: [R]."""
        rows = np.array(self.rows)
        work, size = rows[:, _WORK], rows[:, _SIZE]
        # The error of a model may differ between partitions, and is not noise.
        has_stayed = np.diff(rows[:, _DEVICES]) == 0
        if not has_stayed.any() or not work.all():
            return np.full(2, self._config.noise_floor)
        changes = np.abs(np.diff(np.log(work), axis=0))[has_stayed]
        weights = np.minimum(size[1:], size[:-1])[has_stayed]
        found = [weighted_median(change, weights) for change in changes.T]
        return np.maximum(self._config.noise_floor, np.array(found) / _NORMAL_MEDIAN / np.sqrt(2))

    def deviation(self) -> float:
        """Return how far the last round's work is off the settled one, in standard deviations; the larger role."""
        last, settled = np.array(self.rows[-1]), self._medians(_WORK)
        if not (last[_WORK].all() and settled.all()):
            return float("inf") if (last[_WORK] != settled).any() else 0.0
        noise = self.noise() * np.sqrt(max(1.0, self._usual_size() / last[_SIZE]))
        off = np.abs(np.log(last[_WORK] / settled))
        return float(np.divide(off, noise, out=np.where(off > 0, np.inf, 0.0), where=noise > 0).max())

    def _usual_size(self) -> float:
        """Return the mean size of rounds, weighted by size."""
        size = np.array(self.rows)[:, _SIZE]
        return float(size @ size / size.sum())

    def _medians(self, columns: slice) -> Floats:
        """Return medians over as much of the last rounds as `window` rounds of usual size: [R]."""
        rows = np.array(self.rows[::-1])
        before = np.cumsum(rows[:, _SIZE]) - rows[:, _SIZE]
        weights = np.clip(self._config.window * self._usual_size() - before, 0.0, rows[:, _SIZE])
        return np.array([weighted_median(values, weights) for values in rows[:, columns].T])


def weighted_median(values: Floats, weights: Floats) -> float:
    """Return the value below and above which half of the weight lies; the mean of two where it lies between them."""
    order = np.argsort(values, kind="stable")
    values, total = values[order], np.cumsum(weights[order])
    half = total[-1] / 2
    low, high = np.searchsorted(total, half * (1 - 1e-9)), np.searchsorted(total, half * (1 + 1e-9), side="right")
    return float(values[low] + values[min(high, len(values) - 1)]) / 2


_MEDIAN_DEVIATION = np.sqrt(np.pi / 2)
"""Standard deviation of the median of many normal variables, over that of their mean."""
_NODES = np.array([-np.sqrt(3), 0.0, np.sqrt(3)])
_WEIGHTS = np.array([1, 4, 1]) / 6
"""Gauss-Hermite quadrature for the mean over a standard normal variable."""


@dataclass(frozen=True, kw_only=True)
class DynamicPartitionConfig(Checked):
    """The conditions under which devices move."""

    move_s: Amount = 0.0
    """Seconds that a step lasts longer for a move before it."""
    move_within_s: Amount = 0.0
    """Seconds that a step lasts longer for a move within it, which must be earned in the next round."""
    horizon_steps: Positive = 20
    """Rounds over which a move between steps must earn more than it takes."""
    min_gain: Amount = 0.01
    """Least share of generation and rewarding that the best partition must save, or nothing moves."""
    window: Positive = 3
    """Rounds whose medians count as the load; odd. A new load does after `window // 2 + 1` rounds, an outlier never."""
    noise_floor: Amount = 0.05
    """Least noise to assume, as a standard deviation of a load's logarithm."""
    law_error: Amount = 0.1
    """Error of a role's time by its law, as a standard deviation of its logarithm; added to the noise."""
    near: Amount = 1.0
    """Devices move as far as pays even if both medians are off by this many of their deviations."""
    far: Amount = 3.0
    """A round whose load is off the medians by this many deviations is an outlier, or the first after a jump."""
    tolerance: Amount = 0.02
    """Share of each round that following the load may lose to the best fixed partition so far; see `Safeguard`.
    A large number: whatever it loses."""
    is_corrected: bool = True
    """Measurements correct the work that a cost model predicts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window % 2 == 0:
            raise refusal("window", self.window, "odd, so that the median is one of the loads")

    @property
    def jump_rounds(self) -> int:
        """Rounds of usual size at a new load after which it counts as the load."""
        return self.window // 2 + 1


class DynamicPartition:
    """Decides after each round which devices generate and which judge, from the measured load.

    The scheme of G-Core (arXiv 2507.22789): generation and reward co-exist on disjoint devices, and devices move from
    the role that idles to the one that is busy. A round is a step, or a wave of dynamic sampling. Each role's time is
    `floor + work / devices`, corrected by what was measured; the load is the median of the last rounds, with a noise
    estimated from their changes. The best partition is the one in which the slower role's time, over that noise and
    what the law may be off by, is shortest in the mean. Devices move where that time falls by more than a move takes,
    over a horizon, and only as far as it would were the medians off by their noise.

    A last round far off the medians is an outlier or the first after a jump; the next one decides. Until then devices
    go where the time for either load, over the shortest for that load, is least in the worse case. After a jump,
    however large, the best partition is reached in `config.jump_rounds` rounds.

    Where the load swings faster than that, the best fixed partition so far is kept instead (`Safeguard`).

    Pure, deterministic, and symmetric in policy and reward. Raises PlacementError where `start` is not in `space`.
    """

    def __init__(self, space: PartitionSpace, start: Partition, config: DynamicPartitionConfig | None = None) -> None:
        self.space = space
        self.config = config or DynamicPartitionConfig()
        self._index = self._followed = space.index(start)
        self._history = LoadHistory(self.config)
        self._safeguard = Safeguard(space.role_devices, self._index, self.config.tolerance)

    @property
    def partition(self) -> Partition:
        """The present partition."""
        return self.space.partitions[self._index]

    @property
    def corrections(self) -> tuple[float, float]:
        """The present corrections of the model's work, of the policy and of the reward."""
        policy, reward = self._history.corrections.tolist()
        return policy, reward

    def observe(
        self, policy: RoleLoad, reward: RoleLoad, *, size: float = 1.0, is_within_step: bool = False
    ) -> Partition:
        """Observe a round on the present partition; return the partition of the next.

        Args:
            size: of the round in any unit, such as prompts, where rounds differ: work grows with it, floors do not.
            is_within_step: whether the next round belongs to the same step.
        """
        check_above_0("size", size)
        self._history.add((policy, reward), (self.partition.policy_devices, self.partition.reward_devices), size)
        before, move_s = self._followed, self.config.move_within_s if is_within_step else self.config.move_s
        self._follow(move_s, is_within_step=is_within_step)
        self._index = self._safeguard.choose(
            self._mean_seconds(self._history.latest(size), self.config.law_error),
            before=before,
            after=self._followed,
            move_s=move_s,
            is_within_step=is_within_step,
        )
        return self.partition

    def predicted_seconds(self) -> Floats:
        """Return the mean seconds of a round of usual size, once one was observed, by partition: [num_partitions]."""
        if not self._history.rows:
            raise refusal("observed rounds", 0, "at least 1")
        return self._seconds(self._history.settled())

    def best(self, work_device_s: tuple[float, float], floor_s: tuple[float, float] = (0.0, 0.0)) -> Partition:
        """Return the partition in which both roles finish this work first; the nearest of equal ones."""
        seconds = stage_seconds(work_device_s, floor_s, self.space.role_devices)
        return self.space.partitions[_nearest_best(seconds, self._index)]

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, for JSON."""
        return {
            "partition": asdict(self.partition),
            "followed": asdict(self.space.partitions[self._followed]),
            "history": [list(row) for row in self._history.rows],
            "safeguard": self._safeguard.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`; PlacementError where a cluster that has changed has no such partition."""
        index, followed = (self.space.index(Partition(**state[name])) for name in ("partition", "followed"))
        self._safeguard.load_state(state["safeguard"])
        self._index, self._followed = index, followed
        self._history.rows = [[float(value) for value in row] for row in state["history"]]

    def _seconds(self, load: Load) -> Floats:
        """Return mean seconds over the noise and the error of the law: [num_partitions]."""
        return self._mean_seconds(load, np.hypot(self._history.noise(), self.config.law_error))

    def _mean_seconds(self, load: Load, deviation: float | Floats) -> Floats:
        """Return mean seconds, where the logarithms of work deviate by so much, for each role: [num_partitions]."""
        work, floor = load
        # [9, 1, 2] work of both roles at all pairs of nodes.
        nodes = np.stack(np.meshgrid(_NODES, _NODES), axis=-1).reshape(-1, 1, 2)
        seconds = stage_seconds(work * np.exp(deviation * nodes), floor, self.space.role_devices)
        return np.outer(_WEIGHTS, _WEIGHTS).ravel() @ seconds

    def _follow(self, move_s: float, *, is_within_step: bool) -> None:
        config, now = self.config, self._followed
        is_far = self._history.deviation() > config.far
        target = self._least_regret() if is_far else self._towards_best()
        seconds = self._seconds(self._history.latest() if is_far else self._history.settled())
        rounds = 1 if is_far or is_within_step else config.horizon_steps
        if (seconds[now] - seconds[target]) * rounds > move_s:
            self._followed = target

    def _towards_best(self) -> int:
        """Return the partition on the way to the best one that pays even if the settled load is off by noise."""
        config, now, (work, floor) = self.config, self._followed, self._history.settled()
        seconds = self._seconds((work, floor))
        best = _nearest_best(seconds, now)
        if seconds[now] - seconds[best] <= config.min_gain * seconds[now]:
            return now
        direction = np.sign(best - now)
        num_rounds = min(len(self._history.rows), config.window)
        off = config.near * _MEDIAN_DEVIATION * self._history.noise() / np.sqrt(num_rounds)
        # More devices for the policy are a mistake where its work is less, and the reward's more, than it seems.
        against = work * np.exp(off * np.array([-1, 1]) * direction)
        least = _nearest_best(self._seconds((against, floor)), now)
        return least if np.sign(least - now) == direction else now

    def _least_regret(self) -> int:
        """Return the partition of least regret under two cases: the settled load, and that of the last round."""
        config, now = self.config, self._followed
        seconds = np.stack([self._seconds(load) for load in (self._history.settled(), self._history.latest())])
        least = seconds.min(axis=1, keepdims=True)
        regret = np.divide(seconds, least, out=np.ones_like(seconds), where=least > 0).max(axis=0)
        target = _nearest_best(regret, now)
        return target if regret[now] - regret[target] > config.min_gain * regret[now] else now


def _nearest_best(seconds: Floats, now: int) -> int:
    """Return the index of the least seconds, the nearest to ``now`` of equal ones."""
    fastest = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-12))
    return int(fastest[np.abs(fastest - now).argmin()])
