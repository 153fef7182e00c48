"""The work of a process of the parts convergence and recovery: a run of `gcore-llm train`, watched or killed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from gcore_bench.harness.processes import Spec
from gcore_ckpt import Checkpointer
from gcore_llm import train
from gcore_runs import Display, append_json

Note = Callable[..., None]
"""Appends an event to the file of an attempt, with the machine's time."""


def run(spec: Spec) -> dict[str, dict[str, float]]:
    """Start or resume the run of ``config``, to its end or to the moment at which it is to be killed; no figures."""
    options = spec.options
    note = partial(_note, Path(options["events"]))
    note("started")
    display = _Watched(note, kill_after_s=options["kill_after_s"])
    with _watched_saves(note, waits=options["waits"]):
        train(options["config"], display)
    display.is_over.set()
    note("ended")
    return {}


def _note(path: Path, event: str, **values: float) -> None:
    append_json(path, {"event": event, "at_s": time.monotonic(), **values})


class _Watched(Display):
    """A display that shows nothing, notes each step, and kills the process some time after training has started."""

    def __init__(self, note: Note, *, kill_after_s: float | None) -> None:
        super().__init__(Console(quiet=True))
        self.is_over = threading.Event()
        """Set once there is nothing left to kill."""
        self._note_event, self._kill_after_s = note, kill_after_s

    def phase(self, name: str, *, total: int, done: int = 0) -> None:
        super().phase(name, total=total, done=done)
        if name == "training":
            self._note_event("training", step=done)
            if self._kill_after_s is not None:
                threading.Thread(target=self._kill, daemon=True).start()

    def progressed(self, step: int, cells: Sequence[tuple[str, str]] = (), *, unit: str = "step") -> None:
        super().progressed(step, cells, unit=unit)
        self._note_event("step", step=step)

    def _kill(self) -> None:
        if not self.is_over.wait(self._kill_after_s):
            self._note_event("killed")
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _watched_saves(note: Note, *, waits: bool) -> Generator[None]:
    """Note how long each save stalls training; with ``waits`` until its step is committed.

    The app itself has no setting for synchronous saves, so the one call is replaced that it makes to save.
    """
    save = Checkpointer.save

    def watched(self: Checkpointer, step: int, state: Any) -> Any:
        start_s = time.monotonic()
        handle = save(self, step, state)
        if waits:
            handle.wait()
        note("saved", step=step, stall_s=time.monotonic() - start_s)
        return handle

    with patch.object(Checkpointer, "save", watched):
        yield
