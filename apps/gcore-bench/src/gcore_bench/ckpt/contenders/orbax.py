"""Orbax: its asynchronous checkpointer on trees of numpy arrays, as uncompressed zarr3."""

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from gcore_bench.ckpt.contenders.arrays import to_arrays, to_state
from gcore_bench.ckpt.contenders.base import Contender, Pending
from gcore_bench.ckpt.workload import State

_UNSYNCED_FILES = ("_METADATA", "_CHECKPOINT_METADATA")
"""Files that Orbax writes itself; tensorstore syncs those with the data."""


class Orbax(Contender):
    """Orbax copies numpy arrays before it returns, because they may change."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        self._checkpointer: Any = ocp.AsyncCheckpointer(handler)

    def save(self, step: int, state: State) -> Pending:
        self._checkpointer.save(self.path(step), args=ocp.args.PyTreeSave(to_arrays(state)))
        return _Finishing(self._checkpointer)

    def unsynced(self, step: int) -> list[Path]:
        files = (self.path(step) / name for name in _UNSYNCED_FILES)
        return [*(file for file in files if file.exists()), self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        restore_args = dict.fromkeys(like, ocp.RestoreArgs(restore_type=np.ndarray))
        return to_state(
            self._checkpointer.restore(self.path(step), args=ocp.args.PyTreeRestore(restore_args=restore_args))
        )

    def close(self) -> None:
        self._checkpointer.close()


class _Finishing:
    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def done(self) -> bool:
        return not self._checkpointer.is_saving_in_progress()

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
