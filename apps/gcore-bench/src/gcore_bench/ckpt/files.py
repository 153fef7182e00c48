"""The page cache, from a process without privileges."""

import os
from collections.abc import Iterator
from pathlib import Path

_PIECE_BYTES = 16 << 20


def sync_paths(*paths: Path) -> None:
    """Sync files and folders, not what lies in the folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cache(root: Path) -> None:
    """Take every file below ``root`` out of the page cache: the next read comes from the disk."""
    for path in _files(root):
        sync_paths(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(root: Path) -> None:
    """Read every file below ``root`` into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for path in _files(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())
