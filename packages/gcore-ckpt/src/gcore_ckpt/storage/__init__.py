"""Storages of steps: a local or mounted folder, an object store, a Hugging Face folder; and which steps they keep."""

import os
import re
from dataclasses import dataclass

from gcore_ckpt.storage.base import STEP_NAME, StepFiles, Storage, step_name

__all__ = ["STEP_NAME", "Retention", "StepFiles", "Storage", "open_storage", "step_name"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path: a folder, or a URL such as `s3://bucket/folder` or `gs://bucket/folder`."""
    if isinstance(path, str) and _URL.match(path):
        from gcore_ckpt.storage.object_store import ObjectStorage

        return ObjectStorage(path)
    from gcore_ckpt.storage.local import LocalStorage

    return LocalStorage(path)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Steps to keep after a commit: `keep` of the latest (None for all), and multiples of `keep_every` for good."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; expected None (keep all steps) or 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; expected None or 1 or more")
        if self.keep_every is not None and self.keep is None:
            raise ValueError(
                f"keep_every is {self.keep_every} and keep is None, which keeps all steps; expected a keep"
            )

    def superfluous(self, steps: list[int], committed: int | None = None) -> list[int]:
        """Return those of `steps` (ascending) that may go, never the one just committed."""
        if self.keep is None:
            return []
        others = [step for step in steps if step != committed]
        kept = self.keep - (0 if committed is None else 1)
        lowest = others[: max(0, len(others) - kept)]
        return [step for step in lowest if self.keep_every is None or step % self.keep_every != 0]
