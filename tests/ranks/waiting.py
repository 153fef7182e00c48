"""Waiting for what another process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    """Return once it is true; what takes five minutes has failed."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
