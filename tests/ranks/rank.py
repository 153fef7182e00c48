"""What a rank of `ranks.py` has: its number, groups of the first ranks and meshes over them, all made once."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that run a case together.

    Attributes:
        number: Its number among all.
        groups: The group of the first 1, 2, ... ranks, for those that this one is in.
    """

    number: int
    groups: dict[int, dist.ProcessGroup]

    @classmethod
    def joined(cls) -> "Rank":
        """This process, which has joined the others; all call it together."""
        groups: dict[int, dist.ProcessGroup] = {}
        for size in range(1, dist.get_world_size() + 1):
            group = dist.new_group(list(range(size)))
            if isinstance(group, dist.ProcessGroup):  # else this rank is outside
                groups[size] = group
        return cls(number=dist.get_rank(), groups=groups)


@cache
def mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of this shape over the first ranks; all ranks make it together, on its first use."""
    names = ("dp", "tp")[: len(shape)]
    count = int(torch.tensor(shape).prod())
    return DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=names)
