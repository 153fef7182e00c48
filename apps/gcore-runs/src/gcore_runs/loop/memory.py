"""The memory of a run's processes in each step, and which of them grow."""

import json
import time
from collections.abc import Iterator, Mapping
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
) -> Iterator[tuple[str, str]]:
    """Add readings to a history of each name; yield the names that grow, each with a sentence that says so.

    A name grows if the lowest of ten readings rises by over 1 % three times in a row.
    """
    for name, size in sizes.items():
        readings = history.setdefault(name, [])
        # Other processes write every few seconds: in a short step they have written nothing.
        if size not in readings[-1:]:
            readings.append(size)
        if len(readings) == _NUM_READINGS:
            starts = range(0, _NUM_READINGS, _WINDOW)
            lows = [round(min(readings[i : i + _WINDOW]), 3) for i in starts]
            if all(later > _MIN_RISE * low for low, later in pairwise(lows)):
                yield name, f"{name} grows: the lowest of each ten steps was {lows}"
            del readings[:_WINDOW]
