"""Files that runs keep for the next one: converted data, and what was computed from it."""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of cached files: gcore in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gcore"


def cache_file(name: str, key: object, make: Callable[[Path], object]) -> Path:
    """Return the cached file ``name`` of this key, which ``make`` writes to a path if there is none yet.

    The key is whatever determines the content: its ``repr`` is hashed.
    """
    stem, dot, suffix = name.partition(".")
    file = (
        cache_folder()
        / f"{stem}-{blake2b(repr(key).encode(), digest_size=16).hexdigest()}{dot}{suffix}"
    )
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may make the same file: the last one to finish replaces it by an equal one.
        new_file = file.with_name(f".{os.getpid()}-{file.name}")
        try:
            make(new_file)
            new_file.replace(file)
        finally:
            new_file.unlink(missing_ok=True)
    return file
