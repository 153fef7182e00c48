"""Environment variables and stderr of contenders' processes."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

QUIET: dict[str, str] = {
    # Idle OpenMP threads spin by default, which slows down contenders at random when other work is on the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
"""Environment of every contender's process."""


@contextmanager
def environment(**values: str) -> Generator[None]:
    """Add `QUIET` and ``values`` to this process's environment, which processes that start meanwhile inherit."""
    before = os.environ.copy()
    os.environ.update(QUIET, **values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def stderr_to(log: Path) -> Generator[None]:
    """Send stderr of this process, and of processes that start meanwhile, to a file."""
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
