"""One save or one load, without a Checkpointer."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.format.tree import State

if TYPE_CHECKING:
    import torch

    from gcore_ckpt.loading.reader import Step


def save(path: str | os.PathLike[str], state: State, *, step: int = 0) -> None:
    """Save `state` as a step under `path`, and return once it is committed; see `Checkpointer.save`."""
    with Checkpointer(path) as checkpointer:
        checkpointer.save(step, state)


def load(
    path: str | os.PathLike[str],
    template: State = None,
    *,
    step: "Step" = "latest",
    only: Sequence[str] | None = None,
    device: "str | torch.device" = "cpu",
    mmap: bool = False,
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> State:
    """Load a step from `path`; see `Checkpointer.load`."""
    with Checkpointer(path) as checkpointer:
        return checkpointer.load(
            template,
            step=step,
            only=only,
            device=device,
            mmap=mmap,
            strict=strict,
            progress=progress,
        )
