"""Processes of a run are bound to the CPUs next to their GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcore_runs.loop.cpu_binding import find_nearest_cpus

GPUS = {"0000:18:00.0": 0, "0000:3b:00.0": 0, "0000:9a:00.0": 1, "0001:d8:00.0": 1}
NODES = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}
ALL = range(16)


def write_machine(sys: Path, nodes: dict[int, str], gpus: dict[str, int]) -> Path:
    for node, cpus in nodes.items():
        folder = sys / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for address, node in gpus.items():
        folder = sys / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return sys


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["0000:18:00.0"], {0, 1, 2, 3, 8, 9, 10, 11}),
        (["0001:d8:00.0"], {4, 5, 6, 7, 12, 13, 14, 15}),
        (["0000:9a:00.0", "0001:d8:00.0"], {4, 5, 6, 7, 12, 13, 14, 15}),
        (["0000:3b:00.0", "0000:9a:00.0"], set(ALL)),
        (["0000:18:00.0", "0000:ff:00.0"], set[int]()),
        ([], set[int]()),
    ],
    ids=["first node", "second node", "one node", "both nodes", "unknown device", "no GPU"],
)
def test_cpus_are_those_of_the_nodes_of_the_gpus(
    addresses: list[str], expected: set[int], tmp_path: Path
) -> None:
    machine = write_machine(tmp_path, NODES, GPUS)
    assert find_nearest_cpus(addresses, allowed=ALL, sys=machine) == expected


@pytest.mark.parametrize(
    ("nodes", "node", "allowed"),
    [
        ({0: "0-15"}, 0, ALL),
        # Node 1 is the memory of a GPU.
        ({0: "0-15", 1: "\n"}, 0, ALL),
        (NODES, -1, ALL),
        (NODES, 0, range(8)),
        (NODES, 0, range(1, 16)),
    ],
    ids=["one node", "memory alone", "unknown node", "CPUs of a container", "all but one CPU"],
)
def test_nothing_is_bound(nodes: dict[int, str], node: int, allowed: range, tmp_path: Path) -> None:
    machine = write_machine(tmp_path, nodes, {"0000:18:00.0": node})
    assert find_nearest_cpus(["0000:18:00.0"], allowed=allowed, sys=machine) == set()


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
