"""`Shard` and `Shards`: the boxes of a global tensor that a process holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gcore_ckpt.format.boxes import Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The box of a global tensor that this process holds.

    Attributes:
        global_shape: Shape of the global tensor.
        offset: First index of the box in each dimension; its extents are those of `tensor`.
        tensor: The data of the box.
        name: Name of the global tensor, the same in all processes. None: its path in the state.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    name: str | None = None

    @property
    def box(self) -> Box:
        """The box that is held."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))

    def with_tensor(self, tensor: torch.Tensor) -> "Shard":
        """Return the same box with other data."""
        return Shard(global_shape=self.global_shape, offset=self.offset, tensor=tensor, name=self.name)


@dataclass(frozen=True, eq=False)
class Shards:
    """The boxes of one global tensor that this process holds, where they are several, or none.

    Attributes:
        parts: The boxes, without names of their own: the tensor's name is its path in the state.
    """

    parts: Sequence[Shard]
