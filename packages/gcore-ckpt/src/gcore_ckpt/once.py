"""One save or one load, for who needs no more."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.reader import Step
from gcore_ckpt.tree import State

if TYPE_CHECKING:
    import torch


def save(path: str | os.PathLike[str], state: State, *, step: int = 0) -> None:
    """Saves `state` as a step under `path`, and returns once it is committed; see `Checkpointer.save`."""
    with Checkpointer(path) as checkpointer:
        checkpointer.save(step, state)


def load(
    path: str | os.PathLike[str],
    template: State = None,
    *,
    step: Step = "latest",
    only: Sequence[str] | None = None,
    device: "str | torch.device" = "cpu",
    mmap: bool = False,
) -> State:
    """Loads a step from `path`; see `Checkpointer.load`."""
    with Checkpointer(path) as checkpointer:
        return checkpointer.load(template, step=step, only=only, device=device, mmap=mmap)
