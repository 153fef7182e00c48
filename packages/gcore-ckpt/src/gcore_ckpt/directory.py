"""A folder of checkpoints: which steps are committed, and the names and syncs that make commit and deletion atomic.

A committed step is a folder of its canonical name, `step-00000012`, and nothing else is. Folders that are being written
or deleted have temporary names, so that a rename is what commits a step and what takes it back.
"""

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Literal, TypeAlias

from gcore_ckpt.errors import CheckpointNotFoundError

Step: TypeAlias = int | Literal["latest"]

_STEP_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_TEMP_PREFIX = ".tmp-"


def step_name(step: int) -> str:
    """The name of a committed step's folder."""
    return f"step-{step:08d}"


def temp_path(path: Path, step: int) -> Path:
    """A fresh temporary name in `path` for a step that is being written or deleted."""
    return path / f"{_TEMP_PREFIX}{step_name(step)}-{uuid.uuid4().hex[:12]}"


def committed_steps(path: Path) -> list[int]:
    """The committed steps in `path`, ascending; none if there is no such folder."""
    if not path.is_dir():
        return []
    matches = (_STEP_NAME.fullmatch(entry.name) for entry in path.iterdir())
    steps = (int(match[1]) for match in matches if match)
    return sorted(step for step in steps if (path / step_name(step)).is_dir())


def find_step(path: Path, step: Step) -> int:
    """The number of a committed step; `"latest"` is the highest.

    Raises:
        CheckpointNotFoundError: It is not there.
    """
    steps = committed_steps(path)
    if not steps:
        raise CheckpointNotFoundError(f"{path} holds no committed step")
    if step == "latest":
        return steps[-1]
    if step not in steps:
        raise CheckpointNotFoundError(f"{path} holds no step {step!r}; its committed steps are {steps}")
    return step


def create_directory(path: Path) -> Path:
    """Creates `path` and its parents where they are missing, and returns it."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent)
    return path


def remove_step(path: Path, step: int) -> None:
    """Deletes a committed step. It stops being one before its first file goes: no reader sees half a step."""
    temp = temp_path(path, step)
    (path / step_name(step)).rename(temp)
    shutil.rmtree(temp)


def remove_leftovers(path: Path) -> None:
    """Removes what dead writers left half written or half deleted. Only the holder of the writer's lock may do so."""
    for entry in path.iterdir():
        if entry.name.startswith(_TEMP_PREFIX):
            shutil.rmtree(entry)


def sync_directory(path: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
