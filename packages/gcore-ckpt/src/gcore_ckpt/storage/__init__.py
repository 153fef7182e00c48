"""Storages of steps: a local or mounted folder, an object store, a Hugging Face folder."""

import os
import re

from gcore_ckpt.storage.base import STEP_NAME, StepFiles, Storage, step_name

__all__ = ["STEP_NAME", "StepFiles", "Storage", "open_storage", "step_name"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path: a folder, or a URL such as `s3://bucket/folder` or `gs://bucket/folder`.

    Raises:
        ValueError: A URL of an unknown kind.
    """
    if isinstance(path, str) and _URL.match(path):
        from gcore_ckpt.storage.object_store import ObjectStorage

        return ObjectStorage(path)
    from gcore_ckpt.storage.local import LocalStorage

    return LocalStorage(path)
