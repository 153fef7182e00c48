"""Takes over a file of `torch.save`, whose pickle makes nothing but tensors and plain values."""

import os
from pathlib import Path

import torch

from gcore_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.format.tree import State
from gcore_ckpt.tools.importing import save_imported


def import_pt(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, step: int = 0
) -> None:
    """Read a file that `torch.save` wrote, with `weights_only=True`, and save it as a step.

    One process does it, with the whole state in host memory. Nothing that the file names is called, except the classes
    that torch allows and those that the caller has passed to `torch.serialization.add_safe_globals`.

    Args:
        source: The file, such as `model.pt`.
        path: The folder or URL of the checkpoints to save to.
        step: Number of the step to save.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: The file is damaged, or holds objects that `weights_only=True` refuses.
        CheckpointWriteError, CheckpointLockedError: It could not be saved.
    """
    save_imported(source, path, step, _read)


def _read(source: Path) -> State:
    if not source.is_file():
        raise CheckpointNotFoundError(f"{source} is no file; expected one that torch.save wrote")
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # of many kinds, for damaged data and for classes that it does not load
        reason = str(error).partition("\n")[0]
        raise CorruptCheckpointError(
            f"{source}: torch.load(weights_only=True) refuses it: {reason}"
        ) from error
