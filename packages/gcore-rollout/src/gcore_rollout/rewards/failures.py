"""Counts of reward calls and of their failures by kind."""

import logging
import traceback
from dataclasses import dataclass, replace

from gcore_rollout.errors import RolloutError

_MAX_KINDS = 100
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failures of one kind."""

    kind: str
    """The exception's type, and where it was raised."""
    message: str
    """Message of the first failure."""
    count: int


class FailureLog:
    """Counts calls, and failures by the exception's type and the line that raised it.

    The first traceback of each kind is logged.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._counts: dict[str, Failure] = {}
        self._num_calls = 0

    def succeeded(self) -> None:
        """Count a call that did not fail."""
        self._num_calls += 1

    def failed(self, error: BaseException) -> None:
        """Count a call that failed, by the root cause of an error of this package."""
        self._num_calls += 1
        root = error
        while isinstance(root, RolloutError) and root.__cause__ is not None:
            root = root.__cause__
        frames = traceback.extract_tb(root.__traceback__)
        where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        kind = f"{type(root).__name__}{where}"
        if kind not in self._known and len(self._known) >= _MAX_KINDS:
            kind = "another error"
        if kind not in self._known:
            self._known.add(kind)
            _logger.info("%s; the first of its kind:", error, exc_info=error)
        found = self._counts.get(kind) or Failure(kind=kind, message=str(root), count=0)
        self._counts[kind] = replace(found, count=found.count + 1)

    def drain(self) -> tuple[int, list[Failure]]:
        """Return the number of calls and the failures since this method was called last."""
        drained = self._num_calls, list(self._counts.values())
        self._num_calls, self._counts = 0, {}
        return drained
