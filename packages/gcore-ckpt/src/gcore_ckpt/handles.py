"""Handles of saves and loads in the background, and what each did: bytes, and where its seconds went."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gcore_ckpt.threads import Outcome

StateT = TypeVar("StateT")

_logger = logging.getLogger(__name__)

_MAX_FAILURES = 2
"""Saves in a row that may fail without a call of the caller raising an error."""


@dataclass(kw_only=True)
class SaveReport:
    """The work of a save on this rank. Times are 0 until they are known.

    Example:
        >>> with Checkpointer("reported") as checkpointer:
        ...     handle = checkpointer.save(1, {"weight": torch.zeros(1000)})
        ...     handle.wait()
        >>> handle.report.written_bytes == handle.report.size_bytes
        True
        >>> handle.report.stall_s > 0
        True
    """

    size_bytes: int = 0
    """Bytes of the data files that this rank writes; an incremental save may write fewer."""
    written_bytes: int = 0
    """Bytes of those that have been written so far, or found unchanged."""
    wait_s: float = 0.0
    """Time that `save` waited for earlier saves."""
    plan_s: float = 0.0
    """Time to find out, with the other ranks, who writes what."""
    copy_s: float = 0.0
    """Time to copy the state into host memory."""
    write_s: float = 0.0
    """Time from the first byte written to the commit, next to the training."""

    @property
    def stall_s(self) -> float:
        """Time that the caller of `save` waited."""
        return self.wait_s + self.plan_s + self.copy_s


@dataclass(kw_only=True)
class LoadReport:
    """The work of a load on this rank. It is empty until the load has ended.

    Example:
        >>> with Checkpointer("partial") as checkpointer:
        ...     checkpointer.save(1, {"weight": torch.ones(2), "old": 7}).wait()
        >>> template = {"weight": torch.zeros(2), "bias": torch.zeros(2)}
        >>> handle = Checkpointer("partial").load_async(template, strict=False)
        >>> state = handle.wait()
        >>> handle.report.missing, handle.report.unused
        (['bias'], ['old'])
    """

    step: int | None = None
    """The step that was loaded; None for a Hugging Face folder."""
    missing: list[str] = field(default_factory=list[str])
    """With ``strict=False``, dotted paths of the template that were not saved; what is there is as it was."""
    unused: list[str] = field(default_factory=list[str])
    """Dotted paths that were saved and that the template does not have: of a part of which it has nothing, the part."""
    size_bytes: int = 0
    """Bytes that were read for this rank's tensors."""
    open_s: float = 0.0
    """Time to find, open and check the step."""
    match_s: float = 0.0
    """Time to match the template, or to make new tensors."""
    read_s: float = 0.0
    """Time to read and check the data."""


class LoadHandle(Generic[StateT]):
    """A load in the background.

    Example:
        >>> with Checkpointer("pretrained") as checkpointer:
        ...     checkpointer.save(5, {"weight": torch.ones(3)}).wait()
        >>> handle = Checkpointer("pretrained").load_async()
        >>> model = torch.nn.Linear(3, 1)  # while it is read
        >>> handle.wait()["weight"]
        tensor([1., 1., 1.])
        >>> handle.report.step
        5
    """

    def __init__(
        self, outcome: Outcome[StateT], report: LoadReport, finish: Callable[[StateT], StateT]
    ) -> None:
        self.report = report
        self._outcome = outcome
        self._finish = finish
        self._finished: list[StateT] = []

    def done(self) -> bool:
        """Return whether the load has ended, well or not."""
        return self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> StateT:
        """Wait until all is loaded, pass objects of the template their states, and return the state.

        Raises:
            TimeoutError: It is still being loaded after `timeout_s` seconds.
            CheckpointError: See `Checkpointer.load`.
        """
        if not self._outcome.wait(timeout_s):
            raise TimeoutError(f"the step is still being loaded after {timeout_s} s")
        if not self._finished:
            self._finished.append(self._finish(self._outcome.result()))
        return self._finished[0]


class SaveHandle:
    """A save, of `step`, that is being written in the background.

    Example:
        >>> weight = torch.ones(3)
        >>> with Checkpointer("background") as checkpointer:
        ...     handle = checkpointer.save(1, {"weight": weight})
        ...     weight += 1  # already copied
        ...     handle.wait()
        >>> handle.is_committed()
        True
        >>> Checkpointer("background").load()["weight"]
        tensor([1., 1., 1.])
    """

    def __init__(self, step: int, outcome: Outcome[None], report: SaveReport) -> None:
        self.step = step
        self.report = report
        self.abandoned = (
            False  # whether `save` was interrupted or refused, so that its caller has no handle
        )
        self._outcome = outcome
        self._collected = False

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the step is committed; what retention deletes after that, `Checkpointer.wait` waits for.

        Raises:
            CheckpointWriteError: The save failed. The `Checkpointer` will not raise this error again.
            TimeoutError: It is still being written after `timeout_s` seconds.
        """
        self.join(timeout_s)
        self.collect()
        self._outcome.result()

    def collect(self) -> None:
        """Mark the error of the save, if there is one, as reported to the caller."""
        self._collected = True

    def is_committed(self) -> bool:
        """Return whether the save has ended well."""
        return self._outcome.done() and self._outcome.exception() is None

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the save has ended, well or not."""
        if not self._outcome.wait(timeout_s):
            raise TimeoutError(f"step {self.step} is still being written after {timeout_s} s")

    def uncollected_error(self) -> BaseException | None:
        """Return the error of a save that has ended and that no call has waited for."""
        if self._collected or self.abandoned or not self._outcome.done():
            return None
        return self._outcome.exception()


def raise_uncollected(handles: dict[SaveHandle, None]) -> None:
    """Remove the saves that have ended, and raise the errors that no call has waited for as one."""
    errors: list[BaseException] = []
    for handle in list(handles):
        if not handle.done():
            continue
        error = handle.uncollected_error()
        if error is not None:
            handle.collect()
            errors.append(error)
        handles.pop(handle, None)
    if errors:
        for error in errors[1:]:
            errors[0].add_note(f"and {error}")
        raise errors[0]


def raise_repeated(handles: dict[SaveHandle, None]) -> None:
    """Raise the errors that no call has waited for if several saves in a row have failed.

    A single one was logged, and the next save may succeed.
    """
    failures = 0
    last_committed: SaveHandle | None = None
    for handle in list(handles):
        if handle.uncollected_error() is not None:
            failures += 1
        elif handle.is_committed():
            failures = 0
            if last_committed is not None:
                handles.pop(last_committed, None)
            last_committed = handle
        elif handle.done():
            handles.pop(handle, None)
    if failures >= _MAX_FAILURES:
        raise_uncollected(handles)


_unreported: dict[SaveHandle, None] = {}
"""Saves that are in flight, or have failed and no call has raised their error."""


def report_at_exit(handle: SaveHandle) -> None:
    """Log the error of a save at exit, and end the process with exit code 120, if no call raises it before."""
    for pending in list(_unreported):
        if pending.done() and pending.uncollected_error() is None:
            _unreported.pop(pending, None)
    _unreported[handle] = None


def _report_lost_saves() -> None:
    errors: list[BaseException] = []
    for handle in list(_unreported):
        handle.join()
        error = handle.uncollected_error()
        if error is not None:
            _logger.error("the process ends, and no call has raised this error: %s", error)
            errors.append(error)
    if errors:
        sys.stdout = _FailingOutput(sys.stdout, errors[-1])


class _FailingOutput:
    """Standard output whose last flush fails, for which the interpreter ends with exit code 120.

    An exit handler has no other way to change the exit code, unless it keeps those of other libraries from running.
    """

    def __init__(self, output: Any, error: BaseException) -> None:
        self._output = output
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def flush(self) -> None:
        if self._output is not None:
            self._output.flush()
        if sys.is_finalizing():
            raise self._error


atexit.register(_report_lost_saves)
os.register_at_fork(after_in_child=_unreported.clear)
