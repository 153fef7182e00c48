"""The screen of a run: a live progress display, or plain lines."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

STAGES = ("gen", "reward", "prepare", "train", "sync")
"""Stages of a training step, in their order."""

_PLAIN_EVERY_S = 10.0

_logger = logging.getLogger(__name__)


class Display:
    """A live progress display on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._table: RenderableType = ""
        self._stages: Callable[[], Sequence[str | None]] = tuple
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
        self._last_line_s = 0.0
        self.latest: dict[str, float] = {}
        """Metrics of the last evaluation, which the steps after it show, too."""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print a line that stays on the screen, and log it."""
        _logger.info("%s", message)
        self.console.print(message, soft_wrap=True)

    def watch(self, stages: Callable[[], Sequence[str | None]]) -> None:
        """Show on a terminal in which of the present ``stages``, by rank, each of several controllers is.

        The function is called several times a second, from another thread, and must not block.
        """
        self._stages = stages

    def phase(self, name: str, *, total: int, done: int = 0) -> None:
        """Start a new progress bar."""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, completed=done)
        self._table = ""

    def warmed_up(self, step: int, *, loss: float, accuracy: float) -> None:
        """Show a check of the supervised warm-up."""
        self._progress.update(self._task, completed=step)
        self._table = f"loss {loss:.3f}   held-out accuracy {accuracy:.3f}"
        self._line(f"warm-up {step}: loss {loss:.3f}, held-out accuracy {accuracy:.3f}")

    def progressed(self, step: int, cells: Sequence[tuple[str, str]] = ()) -> None:
        """Advance the progress bar to ``step``, and show ``cells``, pairs of a name and a value."""
        self._progress.update(self._task, completed=step)
        if not cells:
            return
        table = Table.grid(padding=(0, 3))
        table.add_row(*(f"[dim]{name}[/]" for name, _ in cells))
        table.add_row(*(value for _, value in cells))
        self._table = table
        self._line(f"step {step}: " + ", ".join(f"{name} {value}" for name, value in cells))

    def _line(self, text: str) -> None:
        now_s = time.monotonic()
        if not self.console.is_terminal and now_s - self._last_line_s >= _PLAIN_EVERY_S:
            self._last_line_s = now_s
            self.console.print(text, soft_wrap=True)

    def _render(self) -> RenderableType:
        stages = self._stages()
        return Group(self._progress, self._table, *([_by_stage(stages)] if len(stages) > 1 else []))


def _by_stage(stages: Sequence[str | None]) -> Text:
    """Return the ranks of each stage: controllers   gen 0-3, 7   reward 4-6."""
    found: dict[str, list[int]] = {}
    for rank, stage in enumerate(stages):
        found.setdefault(stage or "no stage", []).append(rank)
    order = {stage: place for place, stage in enumerate(STAGES)}
    text = Text("controllers")
    for stage in sorted(found, key=lambda name: (order.get(name, len(order)), name)):
        text.append(f"   {stage} ", style="dim").append(_ranges(found[stage]))
    return text


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks in short form: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
