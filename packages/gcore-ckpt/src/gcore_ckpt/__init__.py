"""Asynchronous, atomic, verified checkpoints for training loops.

A save stalls the caller only for the copy out of live memory; a checkpoint exists whole or not at all.
"""

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
)
from gcore_ckpt.handle import SaveHandle
from gcore_ckpt.tree import State
from gcore_ckpt.verify import verify

__all__ = [
    "CheckpointError",
    "CheckpointLockedError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "Checkpointer",
    "CorruptCheckpointError",
    "SaveHandle",
    "State",
    "verify",
]
