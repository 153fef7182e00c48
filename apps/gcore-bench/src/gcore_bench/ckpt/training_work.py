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
from gcore_llm.config import WarmupConfig
from gcore_runs import Display, append_json

_FIRST_STEP_S = 1.0
"""Assumed duration of the first step, before which there is none."""

Note = Callable[..., None]
"""Appends an event to the file of an attempt, with the machine's time."""


def run(spec: Spec) -> dict[str, dict[str, float]]:
    """Start or resume the run of ``config``, to its end or until it has made ``kill_after`` steps; no figures."""
    options = spec.options
    note = partial(_note, Path(options["events"]))
    note("started")
    display = _Watched(note, kill_after=options["kill_after"])
    with _watched_saves(note, waits=options["waits"]):
        train(options["config"], display, warmup=WarmupConfig(max_steps=options["warmup_steps"]))
    display.is_over.set()
    note("ended")
    return {}


def _note(path: Path, event: str, **values: float) -> None:
    append_json(path, {"event": event, "at_s": time.monotonic(), **values})


class _Watched(Display):
    """A display that shows nothing, notes each step, and kills the process after a number of steps and a part of one.

    The part is one of the duration of the step before, so that the work done hardly depends on other work on the cores.
    """

    def __init__(self, note: Note, *, kill_after: float | None) -> None:
        super().__init__(Console(quiet=True))
        self.is_over = threading.Event()
        """Set once there is nothing left to kill."""
        self._note_event, self._kill_after = note, kill_after
        self._num_steps, self._step_began_s = 0, 0.0

    def phase(self, name: str, *, total: int, done: int = 0) -> None:
        super().phase(name, total=total, done=done)
        if name == "training":
            self._note_event("training", step=done)
            self._step_began_s = time.monotonic()
            self._kill_in_time(_FIRST_STEP_S)

    def progressed(self, step: int, cells: Sequence[tuple[str, str]] = (), *, unit: str = "step") -> None:
        super().progressed(step, cells, unit=unit)
        self._note_event("step", step=step)
        now_s = time.monotonic()
        self._num_steps, step_s, self._step_began_s = self._num_steps + 1, now_s - self._step_began_s, now_s
        self._kill_in_time(step_s)

    def _kill_in_time(self, step_s: float) -> None:
        """Kill the process within the next step if it is the one, of about so many seconds."""
        if self._kill_after is not None and int(self._kill_after) == self._num_steps:
            delay_s = (self._kill_after - self._num_steps) * step_s
            threading.Thread(target=self._kill, args=(delay_s,), daemon=True).start()

    def _kill(self, delay_s: float) -> None:
        if not self.is_over.wait(delay_s):
            self._note_event("killed", after=self._kill_after or 0.0)
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
