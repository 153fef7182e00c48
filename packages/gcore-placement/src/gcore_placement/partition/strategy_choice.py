"""The choice during a run between turns of generation and reward on all devices, and a partition of the devices."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gcore_placement.partition.space import PartitionSpace, RoleLoad, stage_seconds
from gcore_placement.quantities import check_amounts, check_positive
from gcore_placement.strategies import STRATEGIES, Strategy

_WINDOW = 3
"""Steps whose medians decide."""
_MIN_GAIN = 0.05
"""Least share of generation and rewarding that the other strategy must save."""


class StrategyChoice:
    """Chooses between colocated and dynamic after each step, for runs whose costs are not known in advance.

    The present strategy is judged by the measured seconds of its steps, the other one by a law: colocated, all roles'
    work is shared by all devices, and each turn adds a swap; dynamic, the slowest role of the best partition decides.
    When a strategy is tried, its measured seconds over those of the law correct the law from then on, in both
    directions, so that one that was better by the law alone is left, and not tried again for the same reason.

    Args:
        start: the first strategy; `strategy` is the present one.
        horizon_steps: over which a change must save more than it takes.
        switch_s: seconds that a change takes, such as loading the models again; may be set later.

    Example:
        >>> space = PartitionSpace(num_devices=8, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> choice = StrategyChoice(space, start="dynamic", switch_s=60.0)
        >>> policy = RoleLoad(work_device_s=320, busy_device_s=320, finish_s=80, was_waiting=False)
        >>> reward = RoleLoad(work_device_s=8, busy_device_s=8, finish_s=2, was_waiting=False)
        >>> for _ in range(3):
        ...     strategy = choice.observe(policy, reward, stage_s=80.0, swap_s=2.0)
        >>> strategy
        'colocated'
    """

    def __init__(
        self,
        space: PartitionSpace,
        *,
        start: Strategy = "dynamic",
        horizon_steps: int = 20,
        switch_s: float = 0.0,
    ) -> None:
        check_positive("horizon_steps", horizon_steps)
        check_amounts("switch_s", switch_s)
        self.strategy: Strategy = start
        self.switch_s = switch_s
        self._space = space
        self._horizon_steps = horizon_steps
        self._steps: list[tuple[float, float]] = []
        """Seconds since the last change: measured of the present strategy, and by the law of the other one."""
        self._corrections: dict[Strategy, float] = {
            name: 1.0 for name, traits in STRATEGIES.items() if traits.is_live
        }
        """Correction of a strategy's law, used when it is the other one."""
        self._promised_s: float | None = None
        """Seconds of the present strategy by the uncorrected law, before it was tried."""
        self._left_s = 0.0
        """Measured seconds of the strategy that was left for it."""

    def observe(self, *loads: RoleLoad, stage_s: float, swap_s: float) -> Strategy:
        """Observe a step under the present strategy; return the strategy of the next one.

        Args:
            loads: of each role, in the order of the space's roles.
            stage_s: measured seconds of generation and rewarding together, swaps included.
            swap_s: seconds of all swaps of a step, under colocated.
        """
        check_amounts("stage_s", stage_s)
        check_amounts("swap_s", swap_s)
        [alternative] = self._corrections.keys() - {self.strategy}
        self._steps = [*self._steps, (stage_s, self._law(alternative, loads, swap_s))][-_WINDOW:]
        if len(self._steps) < _WINDOW:
            return self.strategy
        measured_s = median(step[0] for step in self._steps)
        law_s = median(step[1] for step in self._steps)
        if self._promised_s is not None:
            self._corrections[self.strategy] = (
                measured_s / self._promised_s if self._promised_s else 1.0
            )
            self._corrections[alternative] = self._left_s / law_s if law_s else 1.0
            self._promised_s = None
        saved_s = measured_s - law_s * self._corrections[alternative]
        if saved_s > _MIN_GAIN * measured_s and saved_s * self._horizon_steps > self.switch_s:
            self.strategy = alternative
            self._steps = []
            self._promised_s = law_s
            self._left_s = measured_s
        return self.strategy

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, for JSON."""
        return {
            "strategy": self.strategy,
            "steps": [list(step) for step in self._steps],
            "corrections": dict(self._corrections),
            "promised_s": self._promised_s,
            "left_s": self._left_s,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""
        self.strategy = state["strategy"]
        self._steps = [(measured_s, law_s) for measured_s, law_s in state["steps"]]
        self._corrections = dict(state["corrections"])
        self._promised_s = state["promised_s"]
        self._left_s = state["left_s"]

    def _law(self, strategy: Strategy, loads: Sequence[RoleLoad], swap_s: float) -> float:
        work = [load.work_device_s for load in loads]
        floor = [load.floor_s for load in loads]
        if STRATEGIES[strategy].is_time_shared:
            return sum(work) / self._space.num_devices + sum(floor) + swap_s
        return float(stage_seconds(work, floor, self._space.role_devices).min())
