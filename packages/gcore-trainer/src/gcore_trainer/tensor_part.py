"""What a rank has of a global tensor, where no `DTensor` can say it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorPart:
    """A box of a global tensor. A rank may have several boxes of one."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in each dimension; its extents are those of ``tensor``."""
    tensor: torch.Tensor
    """A view of the live data."""
