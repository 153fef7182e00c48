"""The load of both roles in the last rounds: its median, its noise, and its jumps.

Shapes: R = 2 roles, policy and reward; H remembered rounds.
"""

import numpy as np
from numpy.typing import NDArray

from gcore_placement.partition.role_load import RoleLoad

NUM_ROUNDS = 21
"""Rounds to remember; noise is estimated from the changes between them."""
_MAX_CORRECTION = 16.0
_NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""
_WORK, _FLOOR, _CORRECTION, _DEVICES, _SIZE = slice(0, 2), slice(2, 4), slice(4, 6), 6, 7
"""Columns of a row: work for a size of 1, as a model has it; floors; corrections; the policy's devices; the size."""

Load = tuple[NDArray[np.float64], NDArray[np.float64]]
"""[R] device-seconds of work, and [R] seconds that devices do not shorten."""


class LoadHistory:
    """The last rounds, mutable. A round counts by its size, so that a handful of prompts decides nothing.

    Args:
        window: usual rounds of which the median counts.
        noise_floor: least standard deviation of a load's logarithm.
        is_corrected: whether measurements correct the work that a model has.
    """

    def __init__(self, *, window: int, noise_floor: float, is_corrected: bool) -> None:
        self._window = window
        self._noise_floor = noise_floor
        self._is_corrected = is_corrected
        self.rows: list[list[float]] = []

    def add(self, loads: tuple[RoleLoad, RoleLoad], devices: tuple[int, int], size: float) -> None:
        """Add a round, with the devices of each role."""
        found = self.corrections.tolist()
        if self._is_corrected:
            found = [load.correction(d, last) for load, d, last in zip(loads, devices, found, strict=True)]
        corrections = np.clip(found, 1 / _MAX_CORRECTION, _MAX_CORRECTION).tolist()
        work = [load.work_device_s / size for load in loads]
        row = [*work, *(load.floor_s for load in loads), *corrections, float(devices[0]), size]
        self.rows = [*self.rows[1 - NUM_ROUNDS :], row]

    @property
    def corrections(self) -> NDArray[np.float64]:
        """[R], median corrections of the model's work."""
        return self._medians(_CORRECTION) if self.rows else np.ones(2)

    def settled(self) -> Load:
        """Return the load of a round of usual size, by medians of the last ones."""
        return self._load(self._medians(_WORK), self._medians(_FLOOR))

    def latest(self) -> Load:
        """Return the last round's load, scaled to the usual size."""
        last = np.array(self.rows[-1])
        return self._load(last[_WORK], last[_FLOOR])

    def noise(self) -> NDArray[np.float64]:
        """Return the standard deviation of the logarithm of each role's work, from its changes between rounds: [R]."""
        rows = np.array(self.rows)
        work, size = rows[:, _WORK], rows[:, _SIZE]
        # The error of a model may differ between partitions, and is not noise.
        has_stayed = np.diff(rows[:, _DEVICES]) == 0
        if not has_stayed.any() or not work.all():
            return np.full(2, self._noise_floor)
        changes = np.abs(np.diff(np.log(work), axis=0))[has_stayed]
        weights = np.minimum(size[1:], size[:-1])[has_stayed]
        found = [weighted_median(change, weights) for change in changes.T]
        return np.maximum(self._noise_floor, np.array(found) / _NORMAL_MEDIAN / np.sqrt(2))

    def deviation(self) -> float:
        """Return how far the last round's work is off the settled one, in standard deviations; the larger role."""
        last, settled = np.array(self.rows[-1]), self._medians(_WORK)
        if not (last[_WORK].all() and settled.all()):
            return float("inf") if (last[_WORK] != settled).any() else 0.0
        noise = self.noise() * np.sqrt(max(1.0, self._usual_size() / last[_SIZE]))
        off = np.abs(np.log(last[_WORK] / settled))
        return float(np.divide(off, noise, out=np.where(off > 0, np.inf, 0.0), where=noise > 0).max())

    def _load(self, work: NDArray[np.float64], floor: NDArray[np.float64]) -> Load:
        return work * self.corrections * self._usual_size(), floor

    def _usual_size(self) -> float:
        """Return the mean size of rounds, weighted by size."""
        size = np.array(self.rows)[:, _SIZE]
        return float(size @ size / size.sum())

    def _medians(self, columns: slice) -> NDArray[np.float64]:
        """Return medians over as much of the last rounds as `window` rounds of usual size: [R]."""
        rows = np.array(self.rows[::-1])
        before = np.cumsum(rows[:, _SIZE]) - rows[:, _SIZE]
        weights = np.clip(self._window * self._usual_size() - before, 0.0, rows[:, _SIZE])
        return np.array([weighted_median(values, weights) for values in rows[:, columns].T])


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the value below and above which half of the weight lies; the mean of two where it lies between them."""
    order = np.argsort(values, kind="stable")
    values, total = values[order], np.cumsum(weights[order])
    half = total[-1] / 2
    low, high = np.searchsorted(total, half * (1 - 1e-9)), np.searchsorted(total, half * (1 + 1e-9), side="right")
    return float(values[low] + values[min(high, len(values) - 1)]) / 2
