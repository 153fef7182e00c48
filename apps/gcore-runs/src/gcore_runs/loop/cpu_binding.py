"""The CPUs next to the GPUs of a process, on machines with several NUMA nodes."""

import logging
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)


def bind_to_gpus(rank: int | None = None) -> None:
    """Run this process on the CPUs next to the GPUs that it sees, or to that of this rank; see `find_nearest_cpus`.

    What it copies to and from a GPU is then in the memory next to it, where Linux places the pages that a CPU touches.
    """
    import torch

    addresses: list[str] = []
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        if rank is None or rank % num_gpus == index:
            device: Any = torch.cuda.get_device_properties(index)
            address = device.pci_domain_id, device.pci_bus_id, device.pci_device_id
            addresses.append("{:04x}:{:02x}:{:02x}.0".format(*address))
    cpus = find_nearest_cpus(addresses, allowed=os.sched_getaffinity(0))
    if cpus:
        bind_threads(cpus)
        _logger.info("runs on the CPUs next to its GPUs: %s", sorted(cpus))


def find_nearest_cpus(
    addresses: Iterable[str], *, allowed: Collection[int], sys: Path = Path("/sys")
) -> set[int]:
    """Return the CPUs of the NUMA nodes that PCI devices are attached to; empty: nothing is to be bound.

    That is so where all CPUs are as near, and where the process may not run on all: a container, or the user, has
    chosen them.

    Args:
        addresses: of the devices, such as 0000:18:00.0.
        allowed: the CPUs that the process may run on.
        sys: where Linux describes the machine.
    """
    cpus = _read_cpus(sys / "devices/system/cpu/online")
    nearest: set[int] = set()
    for address in addresses:
        # All CPUs, if the firmware does not say to which node the device is attached.
        nearest |= _read_cpus(sys / "bus/pci/devices" / address / "local_cpulist")
    if nearest == cpus or not cpus.issubset(allowed):
        return set()
    return nearest


def bind_threads(cpus: Collection[int]) -> None:
    """Run all threads of this process, and those that they start from now on, on these CPUs."""
    for thread in Path("/proc/self/task").iterdir():
        # One may have ended.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def _read_cpus(file: Path) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``, which may be empty."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", file.read_text()):
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
