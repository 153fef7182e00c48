"""The last rounds of a run: the load that they predict, its noise and trend, and the error of the law."""

from collections.abc import Sequence

import numpy as np

from gcore_placement.partition.config import DynamicPartitionConfig
from gcore_placement.partition.space import RoleLoad
from gcore_placement.partition.statistics import (
    NORMAL_MEDIAN,
    NORMAL_NODES,
    NORMAL_WEIGHTS,
    expected_max,
    median_line,
    weighted_median,
)
from gcore_placement.quantities import Floats

NUM_ROUNDS = 21
"""Rounds to remember; noise is estimated from the changes between them."""
_MAX_CORRECTION = 16.0
_TREND_ROUNDS = 9
"""Fewest rounds of a trend."""
_STRAIGHT = 1.5
_EVIDENT = 4.0
"""A trend is evident where rounds are off its line by fewer deviations of the noise than the first, in the median, and
the line rises by more than the second, from the first round to the last."""
_ERROR_ROUNDS = 3
"""Last rounds whose errors decide the error of the law."""
_ERRORS = np.linspace(0.0, 0.5, 51)
_FACTORS_EK = np.exp(np.multiply.outer(_ERRORS, NORMAL_NODES))
"""Possible errors of the law, and the factors of a role's time under each."""
_SENSITIVE = 0.03
"""A round shows the error if the largest possible error makes it longer by more than this share."""
_ROUNDING = 1e-9
_WORK, _FLOOR, _CORRECTION, _DEVICES, _SIZE, _ERROR = range(6)
"""Entries of a row, each with a number of every role: work for a size of 1, as a model has it; floors; corrections;
devices; and what all roles have in common: the size, and the error of the law, below 0 where the round says nothing."""

Load = tuple[Floats, Floats]
"""[R] device-seconds of work, and [R] seconds that devices do not shorten."""


class LoadHistory:
    """The last rounds of R roles. A round counts by its size: a handful of prompts decides nothing."""

    def __init__(self, config: DynamicPartitionConfig, num_roles: int) -> None:
        self._config = config
        self._num_roles = num_roles
        self.rows: list[list[list[float]]] = []
        """As they are saved; replaced with each round, never changed."""
        self._array_of: tuple[list[list[list[float]]], Floats] = self.rows, np.empty(0)

    def add(self, loads: Sequence[RoleLoad], devices: Sequence[int], size: float) -> None:
        """Add a round, with the devices of each role."""
        corrections = self.corrections
        if self._config.is_corrected:
            rows = zip(loads, devices, corrections.tolist(), strict=True)
            corrections = np.array(
                [load.correction(num_devices, last) for load, num_devices, last in rows]
            )
        corrections = np.clip(corrections, 1 / _MAX_CORRECTION, _MAX_CORRECTION)
        work_s = np.array([load.work_device_s for load in loads])
        floors = [load.floor_s for load in loads]
        error = -1.0
        if not any(load.lent_devices for load in loads):
            seconds = (floors + work_s / np.array(devices)) * corrections
            error = measured_error(seconds, max(load.finish_s for load in loads))
        row = [
            (work_s / size).tolist(),
            floors,
            corrections.tolist(),
            list(map(float, devices)),
            [size] * self._num_roles,
            [error] * self._num_roles,
        ]
        self.rows = [*self.rows[1 - NUM_ROUNDS :], row]

    @property
    def corrections(self) -> Floats:
        """[R], median corrections of the law of seconds."""
        return self._medians(_CORRECTION) if self.rows else np.ones(self._num_roles)

    def settled_load(self) -> Load:
        """Return the predicted load of a next round of usual size, by medians of the last rounds and their trend."""
        work = self._medians(_WORK, growth=self.trend())
        return work * self.corrections * self._usual_size(), self._medians(
            _FLOOR
        ) * self.corrections

    def latest_load(self, size: float | None = None) -> Load:
        """Return the last round's load, scaled to a size; None: the usual one."""
        last = self._array()[-1]
        return last[_WORK] * self.corrections * (size or self._usual_size()), last[
            _FLOOR
        ] * self.corrections

    def trend(self) -> Floats:
        """Return the growth of the logarithm of each role's work in a round of usual size; 0 if it is not evident.

        It is evident if a line through the rounds rises by much more than noise, and misses them by no more than noise:
        not after a jump, nor if the load swings within the last rounds.
        """
        work = self._array()[:, _WORK]
        size = self._sizes()
        if len(work) < _TREND_ROUNDS or not work.all():
            return np.zeros(self._num_roles)
        at = (np.cumsum(size) - size / 2) / self._usual_size()
        noise = self.noise()
        slope, off = np.array([median_line(at, logs, size) for logs in np.log(work).T]).T
        is_line = off / NORMAL_MEDIAN < _STRAIGHT * noise
        return np.where(is_line & (np.abs(slope) * (at[-1] - at[0]) > _EVIDENT * noise), slope, 0.0)

    def noise(self) -> Floats:
        """Return the standard deviation of the logarithm of each role's work, from its changes between rounds: [R]."""
        rows = self._array()
        work = rows[:, _WORK]
        size = self._sizes()
        # The error of a model may differ between partitions, and is not noise.
        has_stayed = (np.diff(rows[:, _DEVICES], axis=0) == 0).all(axis=1)
        if not has_stayed.any() or not work.all():
            return np.full(self._num_roles, self._config.noise_floor)
        changes = np.abs(np.diff(np.log(work), axis=0))[has_stayed]
        # And one more, of the least noise: a jump in the first rounds of a run is none.
        weights = np.append(np.minimum(size[1:], size[:-1])[has_stayed], self._usual_size())
        least = self._config.noise_floor * NORMAL_MEDIAN * np.sqrt(2)
        medians = [weighted_median(np.append(change, least), weights) for change in changes.T]
        return np.maximum(self._config.noise_floor, np.array(medians) / NORMAL_MEDIAN / np.sqrt(2))

    def error(self) -> float:
        """Return the error of the law in the last rounds that show it; at least the configured one."""
        errors = self._array()[:, _ERROR, 0]
        size = self._sizes()
        seen = np.flatnonzero(errors >= 0)[-_ERROR_ROUNDS:]
        least = self._config.law_error
        if not seen.size:
            return least
        return max(least, weighted_median(errors[seen], size[seen]))

    def deviation(self) -> float:
        """Return the deviation of the last round's work from the medians, in standard deviations; of the worst role."""
        last = self._array()[-1, _WORK]
        settled = self._medians(_WORK)
        if (last == settled).all():
            return 0.0
        if not (last.all() and settled.all()):
            return float("inf")
        noise = self.noise() * np.sqrt(max(1.0, self._usual_size() / self._sizes()[-1]))
        off = np.abs(np.log(last / settled))
        return float(
            np.divide(off, noise, out=np.where(off > 0, np.inf, 0.0), where=noise > 0).max()
        )

    def _array(self) -> Floats:
        """Return the rows as an array, made once: [num_rounds, num_entries, R]."""
        if self._array_of[0] is not self.rows:
            self._array_of = self.rows, np.array(self.rows)
        return self._array_of[1]

    def _sizes(self) -> Floats:
        """Return the rounds' sizes: [num_rounds]."""
        return self._array()[:, _SIZE, 0]

    def _usual_size(self) -> float:
        """Return the mean size of rounds, weighted by size."""
        size = self._sizes()
        return float(size @ size / size.sum())

    def _medians(self, entry: int, growth: Floats | float = 0.0) -> Floats:
        """Return medians over `window` rounds of usual size, each grown to the next round: [R]."""
        rows = self._array()[::-1]
        size = self._sizes()[::-1]
        usual = self._usual_size()
        after = np.cumsum(size) - size
        weights = np.clip(self._config.window * usual - after, 0.0, size)
        until_next = (after + size / 2) / usual + 0.5
        values = rows[:, entry] * np.exp(
            np.multiply.outer(until_next, np.broadcast_to(growth, self._num_roles))
        )
        return np.array([weighted_median(role_values, weights) for role_values in values.T])


def measured_error(seconds_R: Floats, finish_s: float) -> float:
    """Return the error of the law that explains why a round took longer than its slowest role by the law.

    Roles that take about as long are in each other's way, and the round is longer than either: as much as the mean of
    the longest of them is, if each is off by this error, a standard deviation of its logarithm. Below 0: one role alone
    decides how long the round is, and nothing can be said.
    """
    slowest_s = float(seconds_R.max())
    if not slowest_s:
        return -1.0
    # One role alone would be longer in the mean, too, by its own error.
    longer_E = expected_max(seconds_R[:, None] / slowest_s * _FACTORS_EK[:, None], NORMAL_WEIGHTS)
    longer_E = np.maximum.accumulate(longer_E / (_FACTORS_EK @ NORMAL_WEIGHTS))
    if longer_E[-1] < 1 + _SENSITIVE:
        return -1.0
    longer = finish_s / slowest_s
    if longer <= 1 + _ROUNDING:
        # Several errors may not make the round longer; 0 is the least.
        return 0.0
    return float(np.interp(longer, longer_E, _ERRORS))
