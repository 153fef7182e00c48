"""The memory of a run's processes in each step, and which of them grow."""

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from gcore_runs.host_memory import process_memory
from gcore_runs.logs import MEMORY

_FRESH_S = 60.0
"""Age of a file from which on its process has ended."""
_WINDOW = 10
"""Readings whose lowest is taken: what is held for a moment is no growth."""
_NUM_READINGS = 4 * _WINDOW
_MIN_RISE = 1.01


def read_memory(logs: Path) -> dict[str, float]:
    """Return the memory of all processes that log to a folder, and of this one; see `process_memory`."""
    sizes = process_memory("main")
    for file in logs.glob(f"*{MEMORY}"):
        if time.time() - file.stat().st_mtime < _FRESH_S:
            # Empty while it is written.
            sizes |= json.loads(file.read_text() or "{}")
    return sizes


def find_growth(
    history: dict[str, list[float]], sizes: Mapping[str, float]
) -> dict[str, list[float]]:
    """Add readings to a history of each name; return the lows of those that grow.

    A low is the lowest of ten readings. A name grows if three lows in a row are higher than the one before by over 1 %.
    """
    growing: dict[str, list[float]] = {}
    for name, size in sizes.items():
        readings = history.setdefault(name, [])
        # Other processes write every few seconds: in a short step they have written nothing.
        if size not in readings[-1:]:
            readings.append(size)
        if len(readings) == _NUM_READINGS:
            lows = [min(readings[i : i + _WINDOW]) for i in range(0, _NUM_READINGS, _WINDOW)]
            if all(later > _MIN_RISE * low for low, later in pairwise(lows)):
                growing[name] = lows
            del readings[:_WINDOW]
    return growing
