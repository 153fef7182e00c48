"""Times of an engine's steps and of its last update, in a file that several processes map."""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CAPACITY = 4096
_PASSES, _START, _END, _TIMES = 0, 1, 2, 3


class StepClock:
    """Times of an engine's forward passes since `reset`, and of the last update, in a file that processes map.

    `time.perf_counter` is the same clock in all processes of a Linux machine.

    Args:
        path: created if it does not exist; clocks with the same path share their times.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (_TIMES + _CAPACITY)))
        self._values = np.memmap(path, np.float64, "r+", shape=(_TIMES + _CAPACITY,))

    def reset(self) -> None:
        """Delete the recorded passes."""
        self._values[_PASSES] = 0

    def note_pass(self) -> None:
        number = int(self._values[_PASSES])
        if number < _CAPACITY:
            self._values[_TIMES + number] = time.perf_counter()
            self._values[_PASSES] = number + 1

    def note_update_start(self) -> None:
        self._values[_START] = time.perf_counter()

    def note_update_end(self) -> None:
        self._values[_END] = time.perf_counter()

    @property
    def num_passes(self) -> int:
        return int(self._values[_PASSES])

    @property
    def passes_s(self) -> NDArray[np.float64]:
        """End times of the passes, [P]."""
        return self._values[_TIMES : _TIMES + self.num_passes].copy()

    @property
    def update_start_s(self) -> float:
        return float(self._values[_START])

    @property
    def update_end_s(self) -> float:
        return float(self._values[_END])
