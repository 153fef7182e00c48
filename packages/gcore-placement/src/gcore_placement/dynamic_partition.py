"""Dynamic partition: devices follow the load from the role that is idle to the role that is busy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import check_amounts, check_positive, refusal
from gcore_placement.partition import Partition, PartitionSpace
from gcore_placement.role_load import RoleLoad, stage_seconds

NOISE_STEPS = 20
"""Changes from step to step from which noise is told."""
_MAX_CORRECTION = 16.0
_NORMAL_MEDIAN = 0.6745
"""Of the absolute value of a standard normal variable."""
_MEDIAN_DEVIATION = np.sqrt(np.pi / 2)
"""Of the median of many normal variables, over that of their mean."""
_NODES = np.array([-np.sqrt(3), 0.0, np.sqrt(3)])
_WEIGHTS = np.array([1, 4, 1]) / 6
"""Gauss and Hermite's rule, for the mean over a standard normal variable."""


@dataclass(frozen=True, kw_only=True)
class DynamicPartitionConfig:
    """How readily devices move.

    Raises:
        PlacementError: a field is out of its bounds.
    """

    move_s: float = 0.0
    """Seconds that a step lasts longer for a move, such as `SwapCosts.load_s`."""
    horizon_steps: int = 20
    """Steps over which a move must earn more than it takes."""
    min_gain: float = 0.01
    """Least share of generation and rewarding that the best partition must save, or nothing moves."""
    window: int = 3
    """Steps whose medians count as the load; odd. A jump is seen after `window // 2 + 1` steps, an outlier never."""
    noise_floor: float = 0.05
    """Least noise that is reckoned with, as a standard deviation of a load's logarithm."""
    near: float = 1.0
    """A step towards the best partition must pay even if both medians were off by so many of their deviations."""
    far: float = 3.0
    """Devices go all the way at once where that pays with both medians off by so many."""
    is_corrected: bool = True
    """Whether measurements correct the work that a model of costs gives."""

    def __post_init__(self) -> None:
        for name in ("move_s", "min_gain", "noise_floor", "near", "far"):
            check_amounts(name, getattr(self, name))
        check_positive("horizon_steps", self.horizon_steps)
        check_positive("window", self.window)
        if self.window % 2 == 0:
            raise refusal("window", self.window, "odd, so that the median is one of the loads")

    @property
    def jump_steps(self) -> int:
        """Steps at a new load after which it counts as the load."""
        return self.window // 2 + 1


class DynamicPartition:
    """Which devices generate and which judge, decided anew after every step from what it took.

    The scheme of G-Core (arXiv 2507.22789): generation and reward co-exist on disjoint devices, and devices move
    gradually from the role that idles to the one that is busy. Each role's time is `floor + work / devices`, corrected
    by what was measured; the load is the median of the last steps, with a noise that is told from their changes. The
    best partition is the one in which the slower role's time, over that noise, is shortest in the mean. Devices move
    where that time falls by more than a move takes, over a horizon, and would do so were the medians off by their
    noise: by one step of `space`, or all the way to the best partition where the load is far beyond noise.

    After a jump of the load, however large, `config.jump_steps` steps pass on the old partition. A load that stays,
    with its noise, moves devices to the best partition and seldom after that: loads that call for a step back lie
    beyond a band that is twice `near` deviations of both medians wide.

    Pure and deterministic, and alike for both roles: policy and reward exchanged, it decides the exchanged.

    Args:
        space: the partitions that the cluster allows.
        start: the first of them.
        config: how readily devices move.

    Raises:
        PlacementError: `start` is not in `space`.
    """

    def __init__(self, space: PartitionSpace, start: Partition, config: DynamicPartitionConfig | None = None) -> None:
        self.space = space
        self.config = config or DynamicPartitionConfig()
        self._index = space.index(start)
        self._history: list[list[float]] = []
        """Of the last steps: work of both roles, corrected, floors of both, and the policy's devices."""
        self._corrections = [1.0, 1.0]

    @property
    def partition(self) -> Partition:
        """The present one."""
        return self.space.partitions[self._index]

    @property
    def corrections(self) -> tuple[float, float]:
        """What the model's work was last found to be off by, of the policy and of the reward."""
        return self._corrections[0], self._corrections[1]

    def observe(self, policy: RoleLoad, reward: RoleLoad) -> Partition:
        """Takes in a step on the present partition; the partition of the next step.

        To move within a step, ask `best` with what is left of it.
        """
        devices = (self.partition.policy_devices, self.partition.reward_devices)
        for role, load in enumerate((policy, reward) if self.config.is_corrected else ()):
            found = load.correction(devices[role], self._corrections[role])
            self._corrections[role] = float(np.clip(found, 1 / _MAX_CORRECTION, _MAX_CORRECTION))
        work = [load.work_device_s * c for load, c in zip((policy, reward), self._corrections, strict=True)]
        self._history = [*self._history[-NOISE_STEPS:], [*work, policy.floor_s, reward.floor_s, devices[0]]]
        self._move()
        return self.partition

    def predicted_seconds(self) -> NDArray[np.float64]:
        """[num_partitions], mean seconds of generation and rewarding with the present load in each of `space`.

        Raises:
            PlacementError: no step has been observed.
        """
        if not self._history:
            raise refusal("observed steps", 0, "at least 1")
        load, noise = self._load(), self._noise()
        # [9, 1, 2] work of both roles at all pairs of nodes.
        nodes = np.stack(np.meshgrid(_NODES, _NODES), axis=-1).reshape(-1, 1, 2)
        seconds = stage_seconds(load[:2] * np.exp(noise * nodes), load[2:], self.space.role_devices)
        return np.outer(_WEIGHTS, _WEIGHTS).ravel() @ seconds

    def best(self, work_device_s: tuple[float, float], floor_s: tuple[float, float] = (0.0, 0.0)) -> Partition:
        """The partition in which policy and reward are done first with this much to do; of equals the nearest."""
        seconds = stage_seconds(work_device_s, floor_s, self.space.role_devices)
        return self.space.partitions[self._best(seconds)]

    def state(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "partition": asdict(self.partition),
            "history": [list(row) for row in self._history],
            "corrections": list(self._corrections),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave.

        Raises:
            PlacementError: its partition is none of the cluster's, as after a change of size: start anew.
        """
        self._index = self.space.index(Partition(**state["partition"]))
        self._history = [[float(value) for value in row] for row in state["history"]]
        self._corrections = [float(value) for value in state["corrections"]]

    def _load(self) -> NDArray[np.float64]:
        """[4] work of both roles and floors of both: medians of the last steps."""
        return np.median(np.array(self._history[-self.config.window :])[:, :4], axis=0)

    def _noise(self) -> NDArray[np.float64]:
        """[2] standard deviation of the logarithm of each role's work, from how it changes from step to step."""
        history = np.array(self._history)
        work, has_stayed = history[:, :2], np.diff(history[:, 4]) == 0
        # What a model of costs is off by differs between partitions, and is no noise.
        if not has_stayed.any() or not work.all():
            return np.full(2, self.config.noise_floor)
        changes = np.abs(np.diff(np.log(work), axis=0))[has_stayed]
        return np.maximum(self.config.noise_floor, np.median(changes, axis=0) / _NORMAL_MEDIAN / np.sqrt(2))

    def _best(self, seconds: NDArray[np.float64]) -> int:
        fastest = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-12))
        return int(fastest[np.abs(fastest - self._index).argmin()])

    def _move(self) -> None:
        config, now = self.config, self._index
        seconds = self.predicted_seconds()
        best = self._best(seconds)
        if seconds[now] - seconds[best] <= config.min_gain * seconds[now]:
            return
        if self._saves(best, deviations=config.far):
            target = best
        else:
            target = now + int(np.sign(best - now))
            if not self._saves(target, deviations=config.near):
                return
        if (seconds[now] - seconds[target]) * config.horizon_steps > config.move_s:
            self._index = target

    def _saves(self, target: int, *, deviations: float) -> bool:
        """Whether a move would save time, were both medians off by so many deviations, to its disadvantage."""
        load = self._load()
        off = _MEDIAN_DEVIATION * self._noise() / np.sqrt(min(len(self._history), self.config.window))
        # More devices for the policy are a mistake where its work is less, and the reward's more, than it seems.
        away = np.array([-1, 1]) * np.sign(target - self._index)
        devices = self.space.role_devices[[self._index, target]]
        now_s, target_s = stage_seconds(load[:2] * np.exp(deviations * off * away), load[2:], devices)
        return bool(target_s < now_s)
