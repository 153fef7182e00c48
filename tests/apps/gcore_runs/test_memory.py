"""The memory of processes: what they write, what is read, and which growth is one."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from gcore_runs.logs import log_to, process_memory, read_memory
from gcore_runs.loop.recorder import find_growth


def test_memory_of_this_process() -> None:
    [(name, before)] = process_memory("main").items()
    assert name == "resident_gb/main"
    held = np.ones(30_000_000)
    [(_, after)] = process_memory("main").items()
    assert after - before == pytest.approx(held.nbytes / 1e9, rel=0.1)


def test_what_processes_wrote_lately_is_read(tmp_path: Path) -> None:
    with log_to(tmp_path, "engine", 3, redirect=True):
        end_s = time.monotonic() + 60
        while "resident_gb/engine-3" not in read_memory(tmp_path):
            assert time.monotonic() < end_s
            time.sleep(0.01)
    (tmp_path / "trainer-0.memory").write_text(json.dumps({"resident_gb/trainer-0": 0.5}))
    (tmp_path / "trainer-1.memory").touch()
    (tmp_path / "trainer-2.memory").write_text(json.dumps({"resident_gb/trainer-2": 0.5}))
    two_minutes_ago = time.time() - 120
    os.utime(tmp_path / "trainer-2.memory", (two_minutes_ago, two_minutes_ago))
    sizes = read_memory(tmp_path)
    assert {name.partition("/")[2] for name in sizes} == {"main", "engine-3", "trainer-0"}
    assert sizes["resident_gb/trainer-0"] == 0.5


def readings(kind: str) -> list[float]:
    """Forty of a process, whose garbage is collected at some steps."""
    rng = np.random.default_rng(7)
    garbage = rng.uniform(0.0, 0.2, 40)
    steps = np.arange(40)
    growth = {
        "steady": 0.0 * steps,
        "leak": 0.01 * steps,
        "settles": 0.05 * np.minimum(steps, 20),
        "slow": 0.0002 * steps,
    }[kind]
    return list(1.0 + growth + garbage)


@pytest.mark.parametrize("kind", ["steady", "leak", "settles", "slow"])
def test_lows_that_rise_three_times_are_growth(kind: str) -> None:
    history: dict[str, list[float]] = {}
    warnings: list[tuple[str, str]] = []
    values = readings(kind)
    for value in values:
        # Each process writes less often than steps end.
        for _ in range(3):
            warnings += find_growth(history, {"main": value, "engine-0": 2.0})
    if kind != "leak":
        assert not warnings
        return
    lows = [round(min(values[start : start + 10]), 3) for start in range(0, 40, 10)]
    assert warnings == [("main", f"main grows: the lowest of each ten steps was {lows}")]
