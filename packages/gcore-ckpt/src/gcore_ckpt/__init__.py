"""Asynchronous, resharding, atomic, verified checkpoints for training loops.

A save stalls the caller only for the copy out of live memory; a checkpoint exists whole or not at all; any number of
ranks loads what any other number has saved.
"""

from typing import TYPE_CHECKING, Any

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
)
from gcore_ckpt.handle import SaveHandle
from gcore_ckpt.once import load, save
from gcore_ckpt.tree import PerRank, State
from gcore_ckpt.verify import verify

if TYPE_CHECKING:
    from gcore_ckpt.shards import Shard

__all__ = [
    "CheckpointError",
    "CheckpointLockedError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "Checkpointer",
    "CorruptCheckpointError",
    "PerRank",
    "SaveHandle",
    "Shard",
    "State",
    "load",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Shard":  # it needs torch, which the package itself does not import
        from gcore_ckpt.shards import Shard

        return Shard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
