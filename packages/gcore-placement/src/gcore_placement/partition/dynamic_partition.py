"""Decisions during a run: devices move from idle roles to busy ones."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gcore_placement.errors import refusal
from gcore_placement.partition.config import DynamicPartitionConfig
from gcore_placement.partition.load_history import Load, LoadHistory
from gcore_placement.partition.safeguard import Safeguard
from gcore_placement.partition.space import Partition, PartitionSpace, RoleLoad, stage_seconds
from gcore_placement.partition.statistics import NORMAL_NODES, NORMAL_WEIGHTS, expected_max
from gcore_placement.quantities import Floats, check_above_0

_OTHERS = 1e-9
"""Weight of the seconds of roles that are not waited for."""
_MEDIAN_DEVIATION = np.sqrt(np.pi / 2)
"""Standard deviation of the median of many normal variables, over that of their mean."""


class DynamicPartition:
    """Decides after each round which devices generate and which judge, from the measured load.

    The scheme of G-Core (arXiv 2507.22789), for any number of roles: generation and rewards co-exist on disjoint
    devices, and devices move from roles that idle to those that are busy. A round is a step, or a wave of dynamic
    sampling. Each role's time is `floor + work / devices`, corrected by what was measured; the load is the median of
    the last rounds, with a noise estimated from their changes, and a trend where one is evident. The best partition is
    the one in which the slowest role's time, over that noise and the error of the law, is shortest in the mean. The
    error is measured: roles that take about as long are in each other's way, in some jobs hardly and in others by a
    tenth of a round. Devices move where that time falls by more than a move takes, over a horizon, and only as far as
    it would were the medians off by their noise.

    A last round far off the medians is an outlier or the first after a jump; the next one decides. Until then devices
    go where the time for either load, over the shortest for that load, is least in the worse case. After a jump,
    however large, the best partition is reached in ``config.window // 2 + 1`` rounds.

    Where the load swings faster than that, the best fixed partition so far is kept instead (`Safeguard`).

    Pure, deterministic, and symmetric in the roles. Raises PlacementError where `start` is not in `space`.

    Example:
        >>> space = PartitionSpace(num_devices=8, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> dynamic = DynamicPartition(space, start=space.nearest(4))
        >>> policy = RoleLoad(work_device_s=60, busy_device_s=60, finish_s=15, was_waiting=False)
        >>> reward = RoleLoad(work_device_s=20, busy_device_s=20, finish_s=5, was_waiting=False)
        >>> dynamic.observe(policy, reward).devices
        (6, 2)
    """

    def __init__(
        self, space: PartitionSpace, start: Partition, config: DynamicPartitionConfig | None = None
    ) -> None:
        self.space = space
        self.config = config or DynamicPartitionConfig()
        self._index = self._followed = space.index(start)
        self._history = LoadHistory(self.config, len(space.roles))
        self._safeguard = Safeguard(space.role_devices, self._index, self.config.tolerance)

    @property
    def partition(self) -> Partition:
        """The present partition."""
        return self.space.partitions[self._index]

    @property
    def corrections(self) -> tuple[float, ...]:
        """The present corrections of the law of seconds, of each role."""
        return tuple(self._history.corrections.tolist())

    def observe(
        self, *loads: RoleLoad, size: float = 1.0, is_within_step: bool = False
    ) -> Partition:
        """Observe a round on the present partition; return the partition of the next.

        Args:
            loads: of each role, in the order of the space's roles.
            size: of the round in any unit, such as prompts, where rounds differ: work grows with it, floors do not.
            is_within_step: whether the next round belongs to the same step.
        """
        check_above_0("size", size)
        num_roles = len(self.space.roles)
        for index, load in enumerate(loads):
            if not isinstance(load, RoleLoad):  # pyright: ignore[reportUnnecessaryIsInstance]  # of an untyped caller
                raise refusal(f"loads[{index}]", load, "a RoleLoad")
        if len(loads) != num_roles:
            raise refusal(
                "number of loads", len(loads), f"{num_roles}, one for each role of the space"
            )
        self._history.add(loads, self.partition.devices, size)
        before = self._followed
        move_s = self.config.move_within_s if is_within_step else self.config.move_s
        latest = self._history.latest_load(size)
        # Where the slowest role is as fast, others count.
        seconds = self._mean_seconds(latest, self._history.error()) + _OTHERS * self._sum_of_roles(
            latest[0]
        )
        self._follow(move_s, is_within_step=is_within_step)
        self._index = self._safeguard.choose(
            seconds,
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
        return self._seconds(self._history.settled_load())

    def best(
        self, work_device_s: Sequence[float], floor_s: Sequence[float] | float = 0.0
    ) -> Partition:
        """Return the partition in which all roles finish this work first; the nearest of equal ones."""
        seconds = stage_seconds(work_device_s, floor_s, self.space.role_devices)
        return self.space.partitions[self._nearest_best(seconds, self._index, work_device_s)]

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, for JSON."""
        return {
            "partition": asdict(self.partition),
            "followed": asdict(self.space.partitions[self._followed]),
            "history": [[list(entry) for entry in row] for row in self._history.rows],
            "safeguard": self._safeguard.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`; PlacementError if the cluster no longer has that partition."""
        index = self.space.index(_partition(state["partition"]))
        followed = self.space.index(_partition(state["followed"]))
        self._safeguard.load_state(state["safeguard"])
        self._index = index
        self._followed = followed
        self._history.rows = [
            [list(map(float, entry)) for entry in row] for row in state["history"]
        ]

    def _seconds(self, load: Load) -> Floats:
        """Return mean seconds over the noise and the error of the law: [num_partitions]."""
        return self._mean_seconds(load, np.hypot(self._history.noise(), self._history.error()))

    def _mean_seconds(self, load: Load, deviation: float | Floats) -> Floats:
        """Return mean seconds, where the logarithms of work deviate by so much, for each role: [num_partitions]."""
        work, floor = load
        nodes_RK = (
            work * np.exp(np.multiply.outer(NORMAL_NODES, np.broadcast_to(deviation, work.shape)))
        ).T
        seconds_PRK = floor[:, None] + nodes_RK / self.space.role_devices[:, :, None]
        return expected_max(seconds_PRK, NORMAL_WEIGHTS)

    def _follow(self, move_s: float, *, is_within_step: bool) -> None:
        config = self.config
        now = self._followed
        is_far = self._history.deviation() > config.far
        rounds = 1 if is_far or is_within_step else config.horizon_steps
        if is_far:
            target = self._least_regret()
            seconds = self._seconds(self._history.latest_load())
        else:
            target = self._towards_best()
            seconds = self._seconds(self._history.settled_load())
        if (seconds[now] - seconds[target]) * rounds > move_s:
            self._followed = target

    def _towards_best(self) -> int:
        """Return the partition on the way to the best one that pays even if the settled load is off by noise."""
        config = self.config
        now = self._followed
        work, floor = self._history.settled_load()
        seconds = self._seconds((work, floor))
        best = self._nearest_best(seconds, now, work)
        if seconds[now] - seconds[best] <= config.min_gain * seconds[now]:
            return now
        num_rounds = min(len(self._history.rows), config.window)
        off = config.near * _MEDIAN_DEVIATION * self._history.noise() / np.sqrt(num_rounds)
        # More devices for a role are a mistake where its work is less, and that of roles that lose some more, than it
        # seems.
        devices_PR = self.space.role_devices
        had, has = devices_PR[[now, best]]
        against = work * np.exp(-off * np.sign(has - had))
        is_between = (devices_PR >= np.minimum(had, has)) & (devices_PR <= np.maximum(had, has))
        against_s = np.where(is_between.all(axis=1), self._seconds((against, floor)), np.inf)
        return self._nearest_best(against_s, now, against)

    def _least_regret(self) -> int:
        """Return the partition of least regret under two cases: the settled load, and that of the last round."""
        config = self.config
        now = self._followed
        settled = self._history.settled_load()
        seconds = np.stack([self._seconds(settled), self._seconds(self._history.latest_load())])
        least = seconds.min(axis=1, keepdims=True)
        regret = np.divide(seconds, least, out=np.ones_like(seconds), where=least > 0).max(axis=0)
        target = self._nearest_best(regret, now, settled[0])
        if regret[now] - regret[target] > config.min_gain * regret[now]:
            return target
        return now

    def _nearest_best(self, seconds: Floats, now: int, work: ArrayLike) -> int:
        """Return the index of the least seconds; of equal ones, that with fewest moves, then the least sum of roles."""
        fastest = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-12))
        moved = np.abs(self.space.role_devices[fastest] - self.space.role_devices[now]).sum(axis=1)
        return int(fastest[np.lexsort((self._sum_of_roles(work)[fastest], moved))[0]])

    def _sum_of_roles(self, work: ArrayLike) -> Floats:
        """Return the seconds that all roles' work takes, one after the other: [num_partitions]."""
        return (np.asarray(work) / self.space.role_devices).sum(axis=1)


def _partition(state: Mapping[str, Any]) -> Partition:
    """Return a partition of a `state()`; JSON has turned its tuples into lists."""
    replicas = tuple(state["replicas"])
    devices = tuple(state["devices"])
    return Partition(
        replicas=replicas, devices=devices, unassigned_devices=state["unassigned_devices"]
    )
