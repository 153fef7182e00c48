"""Saves what was read from a checkpoint of another kind as a step."""

import os
from collections.abc import Callable
from pathlib import Path

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import CheckpointWriteError
from gcore_ckpt.format.tree import State


def save_imported(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int,
    read: Callable[[Path], State],
) -> None:
    """Save what `read` returns for `source` as a step, which must not be there yet; nothing is read if it is."""
    with Checkpointer(path, process_group=None) as checkpointer:
        if step in checkpointer.steps():
            raise CheckpointWriteError(
                f"{path} already holds step {step}; a committed step is never overwritten"
            )
        state = read(Path(source))
        try:
            checkpointer.save(step, state).wait()
        except TypeError as error:
            raise CheckpointWriteError(f"{source} holds what cannot be saved: {error}") from error
