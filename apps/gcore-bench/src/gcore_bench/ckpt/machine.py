"""Checks of disk space and memory, and the scratch folder of a run."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gcore_bench.harness.errors import BenchError

_SIZES_ON_DISK = 4
"""The part loop keeps three saves, and a save in flight may need space to commit."""
_SIZES_IN_MEMORY = 4
"""The state, a staged copy, and the copies in the process of a writer."""
_PROCESSES_BYTES = 2 * 10**9
"""Memory of the Python processes with their libraries."""


def check_machine(folder: Path, size_bytes: int) -> None:
    """Check that there is enough disk space and memory before anything is written.

    Raises:
        BenchError: there is too little of one.
    """
    free = shutil.disk_usage(folder).free
    if free < (needed := _SIZES_ON_DISK * size_bytes):
        raise BenchError(
            f"dir is {folder}; expected {needed / 1e9:.1f} GB of free disk space there, found {free / 1e9:.1f}"
        )
    available = psutil.virtual_memory().available
    if available < (needed := _SIZES_IN_MEMORY * size_bytes + _PROCESSES_BYTES):
        raise BenchError(
            f"size_gb is {size_bytes / 1e9:g}; expected {needed / 1e9:.1f} GB of available memory for it, "
            f"found {available / 1e9:.1f}"
        )


@contextmanager
def scratch_folder(parent: Path) -> Generator[Path]:
    """Make a folder in ``parent``, which is made too; remove at the end what was made.

    Raises:
        BenchError: the folder cannot be made.
    """
    made = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="ckpt-", dir=parent)).absolute()
    except OSError as error:
        raise BenchError(f"dir is {parent}; expected a folder that can be written to: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made and not any(parent.iterdir()):
            parent.rmdir()
