"""What the machine must have, and the folder that a run fills and leaves nothing of."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gcore_bench.grpo.errors import BenchError

_SIZES_ON_DISK = 4
"""Three saves of the training loop lie side by side, and a save in flight may need room to commit."""
_SIZES_IN_MEMORY = 4
"""The state, a staged copy, and what a writer's own process makes of it."""
_PROCESSES_BYTES = 2 * 10**9
"""Of the Python processes with their libraries."""


def check_machine(folder: Path, size_bytes: int) -> None:
    """Look for enough free disk space and memory before anything is written.

    Raises:
        BenchError: there is not.
    """
    free = shutil.disk_usage(folder).free
    if free < (needed := _SIZES_ON_DISK * size_bytes):
        raise BenchError(
            f"dir is {folder}: {needed / 1e9:.1f} GB of free disk space are needed, it has {free / 1e9:.1f}"
        )
    available = psutil.virtual_memory().available
    if available < (needed := _SIZES_IN_MEMORY * size_bytes + _PROCESSES_BYTES):
        raise BenchError(
            f"size_gb is {size_bytes / 1e9:g}: {needed / 1e9:.1f} GB of available memory are needed, "
            f"this machine has {available / 1e9:.1f}"
        )


@contextmanager
def scratch_folder(parent: Path) -> Generator[Path]:
    """A fresh folder in ``parent``, which is made too; both leave as they came.

    Raises:
        BenchError: it cannot be made.
    """
    made = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="ckpt-", dir=parent)).absolute()
    except OSError as error:
        raise BenchError(f"dir is {parent}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made and not any(parent.iterdir()):
            parent.rmdir()
