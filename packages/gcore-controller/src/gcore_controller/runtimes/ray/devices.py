"""The device map of a Ray cluster: which engines, judges and training ranks share a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_controller.context import rank_name
from gcore_controller.runtimes.backend import LENT, Sizes


@dataclass(frozen=True)
class ReservedDevice:
    """A device that an actor has reserved: GPUs of a node, or just a share of its CPUs."""

    node: str
    """Ray's id of the node."""
    gpus: Sequence[str] = ()
    """Ray's ids of the GPUs on the node."""

    @classmethod
    def of_actor(cls, actor: Any) -> Self:
        """Return what the actor that this is called in has reserved."""
        del actor
        return cls(ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()])

    @property
    def sort_key(self) -> tuple[str, list[tuple[int, str]]]:
        """Orders devices such that those of one node are next to each other, by their number there."""
        return self.node, [(len(gpu), gpu) for gpu in self.gpus]

    @property
    def options(self) -> dict[str, Any]:
        """Options of a further actor there, which reserves nothing and is to set CUDA_VISIBLE_DEVICES itself."""
        # Without `soft`: Ray places an actor that reserves nothing on any node, unless it must not.
        strategy = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def split(self, count: int) -> list["ReservedDevice"]:
        """Return the devices, so many, that an engine's ranks are on."""
        return [ReservedDevice(self.node, self.gpus[first::count]) for first in range(count)]


def share_devices(
    sizes: Sizes, devices: Sequence[ReservedDevice]
) -> tuple[list[ReservedDevice], dict[str, str]]:
    """Assign the roles of these sizes to devices that several of them share.

    Ranks are sorted by node and GPU, so that those that communicate most are next to each other.

    Args:
        devices: those of the engines, and then those that judges have of their own, the last judge's first: so a
            device keeps its place when its engine changes its role. Last those of lent engines.

    Returns:
        The devices of the first training ranks, by rank, where the others have devices of their own; and the name of
        the device of each engine, judge and rank that shares one, for `DeviceTimers`.
    """
    names: dict[str, str] = {}
    if sizes.lends_ranks:
        devices = devices[len(devices) - sizes.num_lent :]
        for i in range(sizes.num_lent):
            names[f"{LENT} {i}"] = f"device {i}"
    elif sizes.ranks_in_turns:
        for i in range(sizes.engines):
            names[f"engine {i}"] = f"device {i}"
        last = len(devices) - 1
        for role, number in sizes.judges.items():
            for i in range(number):
                names[f"{role} {i}"] = f"device {i if sizes.in_turns else last}"
                last -= 1
    else:
        # At most engines and judges take turns.
        judges = sizes.judges if sizes.in_turns else {}
        for role, number in judges.items():
            for i in range(number):
                names[f"{role} {i}"] = f"engine {i}"
        return [], names
    ranks: list[ReservedDevice] = []
    for rank, (i, part) in enumerate(_sorted_slots(devices, sizes)[: sizes.ranks]):
        names[rank_name(rank)] = f"device {i}"
        ranks.append(part)
    return ranks, names


def _sorted_slots(
    devices: Sequence[ReservedDevice], sizes: Sizes
) -> list[tuple[int, ReservedDevice]]:
    """Return each device that a rank can be on, with the place of the engine's device that it is part of."""
    slots: list[tuple[int, ReservedDevice]] = []
    for i, device in enumerate(devices):
        slots.extend((i, part) for part in device.split(sizes.devices_per_engine))
    return sorted(slots, key=lambda slot: slot[1].sort_key)
