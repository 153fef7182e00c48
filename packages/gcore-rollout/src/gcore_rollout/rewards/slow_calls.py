"""A warning that names a call of a reward which takes long, while it runs."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

SLOW_S = 5.0
"""Seconds after which a call is named."""
CHECK_S = 1.0
"""Seconds between two looks at the calls that run."""
_logger = logging.getLogger(__name__)


def warn_of_slow_call(call: str) -> None:
    """Log that a call has been running for ``SLOW_S``."""
    _logger.warning("%s has been running for %g s", call, SLOW_S)


class SlowCalls:
    """The synchronous calls that run now. One thread looks at all of them: a timer for each would take longer than most
    rewards do."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, Callable[[], str]]] = {}
        self._numbers = itertools.count()
        self._has_calls = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, describe: Callable[[], str]) -> Generator[None]:
        """Name the call of this block, by ``describe()``, if it takes longer than ``SLOW_S``."""
        if self._thread is None or not self._thread.is_alive():
            # A fork of this process has the object without the thread.
            self._thread = threading.Thread(target=self._check, name="slow-rewards", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        self._running[number] = (time.monotonic(), describe)
        self._has_calls.set()
        try:
            yield
        finally:
            del self._running[number]

    def _check(self) -> None:
        reported = -1
        while True:
            self._has_calls.wait()
            time.sleep(CHECK_S)
            self._has_calls.clear()
            for number, (start_s, describe) in list(self._running.items()):
                self._has_calls.set()
                if number > reported and time.monotonic() - start_s >= SLOW_S:
                    reported = number
                    warn_of_slow_call(describe())


slow_calls = SlowCalls()
"""The calls of this process."""
