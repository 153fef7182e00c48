"""Asynchronous, resharding, atomic, verified checkpoints for training loops.

A save stalls the caller only for the copy out of live memory; a checkpoint exists whole or not at all; any number of
ranks loads what any other number has saved.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

from gcore_ckpt.checkpointer import Checkpointer, load, save
from gcore_ckpt.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    LostRankError,
)
from gcore_ckpt.format.tree import PerRank, State
from gcore_ckpt.loading.verify import verify
from gcore_ckpt.saving.handle import SaveHandle

if TYPE_CHECKING:
    from gcore_ckpt.ranks.shards import Shard, Shards
    from gcore_ckpt.tools.dcp import import_dcp
    from gcore_ckpt.tools.hugging_face import export_hf

__all__ = [
    "CheckpointError",
    "CheckpointLockedError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "Checkpointer",
    "CorruptCheckpointError",
    "LostRankError",
    "PerRank",
    "SaveHandle",
    "Shard",
    "Shards",
    "State",
    "export_hf",
    "import_dcp",
    "load",
    "save",
    "verify",
]


_NEED_TORCH = {
    "Shard": "gcore_ckpt.ranks.shards",
    "Shards": "gcore_ckpt.ranks.shards",
    "export_hf": "gcore_ckpt.tools.hugging_face",
    "import_dcp": "gcore_ckpt.tools.dcp",
}
"""Modules of the names that are imported lazily, because they import torch."""


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(_importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
