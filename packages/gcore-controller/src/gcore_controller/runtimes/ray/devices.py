"""The device map of a Ray cluster: which engines, judges and training ranks share a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

    @property
    def options(self) -> dict[str, Any]:
        """Options of a further actor there, which reserves nothing and is to set CUDA_VISIBLE_DEVICES itself."""
        # Without `soft`: Ray places an actor that reserves nothing on any node, unless it must not.
        strategy = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def split(self, count: int) -> list["ReservedDevice"]:
        """Return the devices, so many, that an engine's ranks are on."""
        return [ReservedDevice(self.node, self.gpus[first::count]) for first in range(count)]


@dataclass(frozen=True, kw_only=True)
class SharedDevices:
    """The devices that several roles share."""

    ranks: Sequence[ReservedDevice] = ()
    """The devices of the first training ranks, by rank; the other ranks have devices of their own."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The name of the device of each engine, judge and rank that shares one, for `DeviceTimers`."""

    @classmethod
    def of(cls, sizes: Sizes, devices: Sequence[ReservedDevice]) -> "SharedDevices":
        """Assign the roles of these sizes to devices.

        Ranks are sorted by node and GPU, so that those that communicate most are next to each other.

        Args:
            devices: those of the engines, and then those that judges have of their own, the last judge's first: so a
                device keeps its place when its engine changes its role. Last those of lent engines.
        """
        if sizes.lends_ranks:
            lent = devices[len(devices) - sizes.num_lent :]
            slot_of: dict[str, int] = {}
            for i in range(sizes.num_lent):
                slot_of[f"{LENT} {i}"] = i
            return cls._with_ranks(_sorted_slots(lent, sizes), sizes, slot_of)
        if not sizes.ranks_in_turns:
            # At most engines and judges take turns.
            judges = sizes.judges if sizes.in_turns else {}
            names: dict[str, str] = {}
            for role, number in judges.items():
                for i in range(number):
                    names[f"{role} {i}"] = f"engine {i}"
            return cls(names=names)
        slot_of = {f"engine {i}": i for i in range(sizes.engines)}
        last = len(devices) - 1
        for role, number in sizes.judges.items():
            for i in range(number):
                slot_of[f"{role} {i}"] = i if sizes.in_turns else last
                last -= 1
        return cls._with_ranks(_sorted_slots(devices, sizes), sizes, slot_of)

    @classmethod
    def _with_ranks(
        cls, slots: "Sequence[tuple[int, ReservedDevice]]", sizes: Sizes, engines: Mapping[str, int]
    ) -> "SharedDevices":
        names = {name: f"device {i}" for name, i in engines.items()}
        ranks: list[ReservedDevice] = []
        for rank, (i, part) in enumerate(slots[: sizes.ranks]):
            names[rank_name(rank)] = f"device {i}"
            ranks.append(part)
        return cls(ranks=ranks, names=names)


def _sorted_slots(
    devices: Sequence[ReservedDevice], sizes: Sizes
) -> list[tuple[int, ReservedDevice]]:
    """Return each device that a rank can be on, with the place of the engine's device that it is part of."""
    slots: list[tuple[int, ReservedDevice]] = []
    for i, device in enumerate(devices):
        slots.extend((i, part) for part in device.split(sizes.devices_per_engine))
    return sorted(slots, key=lambda slot: (slot[1].node, [(len(gpu), gpu) for gpu in slot[1].gpus]))
