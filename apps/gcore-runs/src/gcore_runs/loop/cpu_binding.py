"""The CPUs next to the GPUs of a process, on machines with several NUMA nodes."""

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)


def bind_to_gpus(gpu: int | None = None) -> None:
    """Run this process on the CPUs next to the GPUs that it sees, or to the one of this index; see `find_nearest_cpus`.

    What it copies to and from a GPU is then in the memory next to it, where Linux places the pages that a CPU touches.
    """
    import torch

    addresses: list[str] = []
    for index in range(torch.cuda.device_count()):
        if gpu in (None, index):
            device: Any = torch.cuda.get_device_properties(index)
            slot = f"{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
            addresses.append(f"{device.pci_domain_id:04x}:{slot}")
    cpus = find_nearest_cpus(addresses, allowed=os.sched_getaffinity(0))
    if cpus:
        bind_threads(cpus)
        _logger.info("runs on %d CPUs next to the GPUs at %s", len(cpus), ", ".join(addresses))


def find_nearest_cpus(
    addresses: Iterable[str], *, allowed: Collection[int], sys: Path = Path("/sys")
) -> set[int]:
    """Return the CPUs of the NUMA nodes that PCI devices are attached to; empty: nothing is to be bound.

    That is so where there is one node, where a device's node is unknown, and where the process may not run on all CPUs:
    then a container, or the user, has chosen them.

    Args:
        addresses: of the devices, such as 0000:18:00.0.
        allowed: the CPUs that the process may run on.
        sys: where Linux describes the machine.
    """
    cpus_by_node: dict[int, set[int]] = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cpus = _parse_cpus((folder / "cpulist").read_text())
        # Some nodes have memory alone.
        if cpus:
            cpus_by_node[int(folder.name.removeprefix("node"))] = cpus
    if len(cpus_by_node) < 2 or not set().union(*cpus_by_node.values()).issubset(allowed):
        return set()
    nearest: set[int] = set()
    for address in addresses:
        file = sys / "bus/pci/devices" / address / "numa_node"
        # Linux writes -1 if the firmware does not say it.
        node = int(file.read_text()) if file.is_file() else -1
        if node not in cpus_by_node:
            return set()
        nearest |= cpus_by_node[node]
    return nearest


def bind_threads(cpus: Collection[int]) -> None:
    """Run all threads of this process, and those that they start from now on, on these CPUs."""
    for thread in Path("/proc/self/task").iterdir():
        # One may have ended.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def _parse_cpus(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
