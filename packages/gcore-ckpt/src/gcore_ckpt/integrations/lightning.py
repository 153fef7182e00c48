"""Lightning's checkpoints as steps of this package, written while it trains on."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import MissingExtraError
from gcore_ckpt.storage import open_for_writing
from gcore_ckpt.storage.local import open_storage

try:
    from lightning.pytorch.plugins import CheckpointIO
except ModuleNotFoundError:
    raise MissingExtraError("lightning", "lightning") from None


class CheckpointerIO(CheckpointIO):
    """Makes a folder with one step of each checkpoint of a Trainer, in the background.

        trainer = Trainer(plugins=[CheckpointerIO()], callbacks=[ModelCheckpoint(every_n_train_steps=100)])
        trainer.fit(model, ckpt_path="last")

    `ModelCheckpoint` says when to save, where, and what to keep. A save returns once all is copied; the next one, a
    load and the end of `fit` wait until it is committed, and raise if it failed. It is for strategies that pass a
    checkpoint to the main process, such as DDP; hyperparameters and what hooks add must be what a state may hold.

    Args:
        staging: As in `Checkpointer`.
        incremental: As in `Checkpointer`, for a file that is saved again under its name, such as `last.ckpt`.
    """

    def __init__(
        self, *, staging: Literal["full", "chunked"] = "full", incremental: bool = False
    ) -> None:
        self._options: dict[str, Any] = {"staging": staging, "incremental": incremental}
        self._saving: Checkpointer | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Start to save a checkpoint as the only step under `path`; it replaces one that is there."""
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}; expected None")
        self._finish()
        self._saving = Checkpointer(path, keep=1, process_group=None, **self._options)
        later = max(self._saving.steps(), default=-1) + 1
        self._saving.save(max(checkpoint.get("global_step", 0), later), checkpoint)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; nothing is unpickled, whatever `weights_only` says."""
        self._finish()
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        return Checkpointer(path, process_group=None).load(device=device)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint: its step in one act, then what is left of the folder."""
        self._finish()
        storage = open_storage(path)
        steps = storage.steps()
        if steps:
            with open_for_writing(storage):
                for step in steps:
                    storage.remove(step)
        if Path(path).is_symlink():
            Path(path).unlink()
        elif Path(path).is_dir():
            shutil.rmtree(path)

    def teardown(self) -> None:
        """Wait until the last checkpoint is committed."""
        self._finish()

    def _finish(self) -> None:
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.close()
