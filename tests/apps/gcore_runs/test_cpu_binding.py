"""Processes of a run are bound to the CPUs next to their GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcore_runs.loop.cpu_binding import find_nearest_cpus

FIRST, SECOND = "0-3,8-11\n", "4-7,12-15\n"
GPUS = {
    "0000:18:00.0": FIRST,
    "0000:3b:00.0": FIRST,
    "0000:9a:00.0": SECOND,
    "0001:d8:00.0": SECOND,
    "0000:aa:00.0": "\n",
    "0000:bb:00.0": "0-15\n",
}
"""CPUs of the node of each GPU: one is attached to memory alone, and of one the firmware does not say it."""
ALL = range(16)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """What Linux says of 16 CPUs in two nodes."""
    files = {"devices/system/cpu/online": "0-15\n"}
    for address, cpus in GPUS.items():
        files[f"bus/pci/devices/{address}/local_cpulist"] = cpus
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("addresses", "allowed", "expected"),
    [
        (["0000:18:00.0"], ALL, {0, 1, 2, 3, 8, 9, 10, 11}),
        (["0001:d8:00.0"], ALL, {4, 5, 6, 7, 12, 13, 14, 15}),
        (["0000:9a:00.0", "0001:d8:00.0"], ALL, {4, 5, 6, 7, 12, 13, 14, 15}),
        (["0000:3b:00.0", "0000:9a:00.0"], ALL, None),
        (["0000:aa:00.0"], ALL, None),
        (["0000:bb:00.0"], ALL, None),
        (["0000:18:00.0"], range(8), None),
        (["0000:18:00.0"], range(1, 16), None),
        ([], ALL, None),
    ],
    ids=[
        "first node",
        "second node",
        "two of a node",
        "both nodes",
        "no CPUs",
        "unknown node",
        "CPUs of a container",
        "all CPUs but one",
        "no GPU",
    ],
)
def test_cpus_are_those_of_the_nodes_of_the_gpus(
    addresses: list[str], allowed: range, expected: set[int] | None, machine: Path
) -> None:
    found = find_nearest_cpus(addresses, allowed=allowed, sys=machine)
    assert found == (expected or set()), "empty: nothing is bound"


BIND = """
import os, threading
from gcore_runs.loop.cpu_binding import bind_threads
ended = threading.Event()
before = threading.Thread(target=ended.wait)
before.start()
cpu = min(os.sched_getaffinity(0))
bind_threads({cpu})
after = threading.Thread(target=ended.wait)
after.start()
print(*[os.sched_getaffinity(t.native_id) == {cpu} for t in (threading.main_thread(), before, after)])
ended.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_all_threads_are_bound() -> None:
    """Those that are there, such as that of the log, and those that torch starts later."""
    output = subprocess.run(
        [sys.executable, "-c", BIND], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["True", "True", "True"]
