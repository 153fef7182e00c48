"""Explains why a path holds no steps: it is something else, which another argument or command reads."""

import re
from pathlib import Path

from gcore_ckpt.storage import Storage
from gcore_ckpt.storage.local import LocalStorage

_STEP_FOLDER = re.compile(r"step-(\d+)", re.ASCII)
_TORCH_FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt")


def describe_foreign(storage: Storage) -> str:
    """Return the end of a message about a path without steps: what the path is, and what to pass or call instead."""
    path = storage.path if isinstance(storage, LocalStorage) else None
    if path is not None and path.is_file():
        return f": it is a file; if torch.save wrote it, import it: gcore-ckpt import-pt {path} NEW_PATH"
    if path is not None and (path / ".metadata").is_file():
        written = "it is a checkpoint of torch.distributed.checkpoint"
        return f": {written}; import it: gcore-ckpt import-dcp {path} NEW_PATH"
    parent, _, name = str(storage).rstrip("/").rpartition("/")
    step = _STEP_FOLDER.fullmatch(name)
    if step is not None:
        return (
            ": it is named like the folder of one step; "
            f"expected the path {parent or '.'!r} with step {int(step[1])}"
        )
    if path is not None and not path.exists():
        return ": there is no such folder"
    file = _find_torch_file(path) if path is not None else None
    if file is not None:
        return f": it holds files of torch.save; import one: gcore-ckpt import-pt {file} NEW_PATH"
    return ""


def _find_torch_file(path: Path) -> Path | None:
    for pattern in _TORCH_FILES:
        for file in sorted(path.glob(pattern)):
            if file.is_file():
                return file
    return None
