"""Whether policy and reward take turns on all devices, or each have a part of them: chosen from what steps take."""

from statistics import median
from typing import Literal

from gcore_placement.errors import check_amounts, check_positive
from gcore_placement.partition.role_load import RoleLoad, stage_seconds
from gcore_placement.partition.space import PartitionSpace

Strategy = Literal["colocated", "dynamic"]
"""colocated: all devices generate, then all judge. dynamic: side by side, on a partition that follows the load."""

_WINDOW = 3
"""Steps whose medians decide."""
_MIN_GAIN = 0.05
"""Least share of generation and rewarding that the other strategy must save."""


class StrategyChoice:
    """Chooses between the strategies after every step; made for runs in which nobody knows the costs beforehand.

    The strategy in force is judged by what its steps took, the other one by a law: in turns, both roles' work is shared
    by all devices and every turn is swapped in; side by side, the slower role of the best partition is waited for. What
    a strategy turns out to take when it is tried, over what the law said of it, corrects the law from then on, in both
    directions: so one that was thought better and is not is left again, and not tried once more for the same reason.

    Args:
        space: the partitions that the cluster allows.
        start: what the run begins with.
        horizon_steps: over which a change must save more than it takes.

    Attributes:
        strategy: The present one.
        switch_s: Seconds that a change takes, such as loading the models anew.

    Raises:
        PlacementError: `horizon_steps` is below 1.
    """

    def __init__(
        self, space: PartitionSpace, *, start: Strategy = "dynamic", horizon_steps: int = 20, switch_s: float = 0.0
    ) -> None:
        check_positive("horizon_steps", horizon_steps)
        check_amounts("switch_s", switch_s)
        self.strategy: Strategy = start
        self.switch_s = switch_s
        self._space = space
        self._horizon_steps = horizon_steps
        self._steps: list[tuple[float, float]] = []
        """Since the last change: what was measured of the present strategy, and the law of the other one."""
        self._corrections: dict[Strategy, float] = {"colocated": 1.0, "dynamic": 1.0}
        """Of a strategy's law, when it is the other one."""
        self._promised_s: float | None = None
        """By the law, uncorrected, of the present strategy before it was tried."""
        self._left_s = 0.0
        """Measured of the strategy that was left for it."""

    def observe(self, policy: RoleLoad, reward: RoleLoad, *, stage_s: float, swap_s: float) -> Strategy:
        """Takes in a step; the strategy of the next one.

        Args:
            policy: what the step asked of the policy, as the present strategy shows it.
            reward: what it asked of the reward.
            stage_s: seconds of its generation and rewarding together, as measured, swaps included.
            swap_s: that all swaps of a step take, or would take, in turns.

        Raises:
            PlacementError: a number is below 0 or not finite.
        """
        check_amounts("stage_s", stage_s)
        check_amounts("swap_s", swap_s)
        other: Strategy = "colocated" if self.strategy == "dynamic" else "dynamic"
        self._steps = [*self._steps, (stage_s, self._law(other, policy, reward, swap_s))][-_WINDOW:]
        if len(self._steps) < _WINDOW:
            return self.strategy
        measured_s, law_s = (median(values) for values in zip(*self._steps, strict=True))
        if self._promised_s is not None:
            self._corrections[self.strategy] = measured_s / self._promised_s if self._promised_s else 1.0
            self._corrections[other] = self._left_s / law_s if law_s else 1.0
            self._promised_s = None
        saved_s = measured_s - law_s * self._corrections[other]
        if saved_s > _MIN_GAIN * measured_s and saved_s * self._horizon_steps > self.switch_s:
            self.strategy, self._steps = other, []
            self._promised_s, self._left_s = law_s, measured_s
        return self.strategy

    def _law(self, strategy: Strategy, policy: RoleLoad, reward: RoleLoad, swap_s: float) -> float:
        work, floor = (policy.work_device_s, reward.work_device_s), (policy.floor_s, reward.floor_s)
        if strategy == "colocated":
            return sum(work) / self._space.num_devices + sum(floor) + swap_s
        return float(stage_seconds(work, floor, self._space.role_devices).min())
