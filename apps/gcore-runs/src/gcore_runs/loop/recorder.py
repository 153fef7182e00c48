"""Recording of a run's job: metrics, spans, warnings, checkpoints, what the screen shows, and Ctrl-C between steps."""

import gc
import logging
import math
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from types import FrameType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from gcore_controller import (
    Context,
    Evaluated,
    Event,
    Modality,
    Program,
    RankError,
    Recorder,
    RunStart,
    Span,
    Stepped,
    TrainerGroup,
    Updating,
)
from gcore_placement import STRATEGIES, Ledger
from gcore_rollout import Failure
from gcore_runs.logs import one_line, printable, read_memory
from gcore_runs.loop.best import BEST, SINCE_BEST, compare_with_best, is_best, is_due, keep_best
from gcore_runs.run_folder import (
    MetricsWriter,
    RunFolder,
    RunWarnings,
    SpanWriter,
    StepSpans,
    append_json,
    read_jsonl,
)
from gcore_runs.settings.run_config import BaseRLConfig

STAGES = ("gen", "reward", "prepare", "train", "sync")
"""Stages of a training step, in their order."""

_logger = logging.getLogger(__name__)

_PLAIN_EVERY_S = 10.0
_LARGE = 1e9  # numbers below this are written out on the screen
_PATIENCE = 5
"""Number of consecutive steps without a learning signal that is reported."""

_WINDOW = 10
"""Readings of memory whose lowest is taken: what is held for a moment is no growth."""
_NUM_READINGS = 4 * _WINDOW
_MIN_RISE = 1.01

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, what a scheduler sends before it takes the machine, and what it can be asked to send some time before."""

Present = tuple[int, list[dict[str, Any]] | None]
"""A step, and the controllers' states at its end."""

ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)
EvaluationT = TypeVar("EvaluationT")


class Display:
    """A live progress display on a terminal; elsewhere a line every ten seconds.

    Example:
        >>> with Display() as display:
        ...     display.say("10,000 prompts")
        ...     display.phase("training", total=200)
        ...     display.show_progress(1, [("step", "1.20 s"), ("score", "0.250")])
        10,000 prompts
        step 1: step 1.20 s, score 0.250
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        done = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
        )
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._progress = Progress(*done, *times, console=self.console, expand=True)
        self._task = self._progress.add_task("starting", total=None)
        self._table: RenderableType = ""
        self._stages: Callable[[], Sequence[str | None]] = tuple
        self._live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
        )
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
        # A text in brackets would be taken for a style.
        self.console.print(printable(message), soft_wrap=True, markup=False)

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

    def show_progress(
        self, step: int, cells: Sequence[tuple[str, str]] = (), *, unit: str = "step"
    ) -> None:
        """Advance the progress bar to ``step``, and show ``cells``, pairs of a name and a value."""
        self._progress.update(self._task, completed=step)
        if not cells:
            return
        table = Table.grid(padding=(0, 3))
        table.add_row(*(f"[dim]{name}[/]" for name, _ in cells))
        table.add_row(*(value for _, value in cells))
        self._table = table
        self._say_sometimes(f"{unit} {step}: " + ", ".join(map(" ".join, cells)))

    def show_count(self, name: str, done: int, total: int) -> None:
        """Show how far a phase is, which starts with the first call of this name."""
        if self._progress.tasks[0].description != name:
            self.phase(name, total=total)
        self._progress.update(self._task, completed=done)
        self._say_sometimes(f"{name}: {done:,} of {total:,}")

    def _say_sometimes(self, line: str) -> None:
        """Print a line where there is no terminal, if the last one was long ago."""
        now_s = time.monotonic()
        if not self.console.is_terminal and now_s - self._last_line_s >= _PLAIN_EVERY_S:
            self._last_line_s = now_s
            self.console.print(line, soft_wrap=True)

    def _render(self) -> RenderableType:
        stages = self._stages()
        if len(stages) > 1:
            return Group(self._progress, self._table, _by_stage(stages))
        return Group(self._progress, self._table)


def _by_stage(stages: Sequence[str | None]) -> Text:
    """Return the ranks of each stage: controllers   gen 0-3, 7   reward 4-6."""
    names = [stage or "no stage" for stage in stages]
    text = Text("controllers")
    other_names = sorted(set(names).difference(STAGES))
    for name in (*STAGES, *other_names):
        ranks = [rank for rank, stage in enumerate(names) if stage == name]
        if not ranks:
            continue
        ranges: list[str] = []
        # Consecutive ranks differ from their index by the same number.
        for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
            consecutive = [rank for _, rank in pairs]
            first = consecutive[0]
            ranges.append(str(first) if len(consecutive) == 1 else f"{first}-{consecutive[-1]}")
        text.append(f"   {name} ", style="dim").append(", ".join(ranges))
    return text


class Cell(NamedTuple):
    """A number that the screen shows of every step.

    Example:
        >>> metrics = {"timing_s/step": 1.234, "val/score": 0.25}
        >>> for cell in (STAGE_CELLS[0], Cell("held-out score", "val/score", "{:.1%}")):
        ...     print(cell.label, format_metric(metrics[cell.metric], cell.form))
        step 1.23 s
        held-out score 25.0%
    """

    label: str
    metric: str
    form: str
    """Format of the metric's value: ``{:.2f} s``."""
    absent: str | None = None
    """Text without the metric; None: the cell is left out."""


STAGE_CELLS = (
    Cell("step", "timing_s/step", "{:.2f} s", "0.00 s"),
    *(Cell(stage, f"timing_s/{stage}", "{:.2f} s", "0.00 s") for stage in STAGES),
)
"""Times of a step and of its stages."""


def format_metric(value: float, form: str = "{:.3f}") -> str:
    """Format a number for the screen; from 1e9 on, with three digits and a power of ten."""
    if abs(value) < _LARGE:
        return form.format(value)
    return f"{value:.3g}"


def shown_cells(cells: Iterable[Cell], metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the label and the text of each cell that is shown."""
    texts: list[tuple[str, str]] = []
    for cell in cells:
        if cell.metric in metrics:
            texts.append((cell.label, format_metric(metrics[cell.metric], cell.form)))
        elif cell.absent is not None:
            texts.append((cell.label, cell.absent))
    return texts


@dataclass(frozen=True, kw_only=True)
class RunJob(RunStart, ABC, Generic[ConfigT]):
    """A run of the RLHF program, and the point that it starts or resumes from; apps add their prompts.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class MyJob(RunJob[Any]):
        ...     prompts: list[str]
        ...
        ...     def modality(self):
        ...         return MyModality(self.prompts)  # what is sampled, scored and trained on
        >>> config = BaseRunConfig(trainer=RLTrainerConfig(total_training_steps=20))
        >>> MyJob(config=config, prompts=["2+2="], first_step=5).total_steps
        20
    """

    config: ConfigT

    @abstractmethod
    def modality(self) -> Modality[Any, Any, Any, Any, Any]:
        """Return the modality of what is trained, for one controller."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.trainer.total_training_steps

    def program(self, recorder: Recorder) -> Program[Any, None]:
        """Return the program of the job, to be run by a runtime on every controller."""
        from gcore_controller import RLHFLoop

        follows_load = (
            self.config.runtime == "ray" and STRATEGIES[self.config.strategy].follows_load
        )
        loop = replace(self.config.loop, reports_waves=follows_load)

        async def run(ctx: Context[Any]) -> None:
            with frozen_objects():
                await RLHFLoop(ctx, self.modality(), loop, self, recorder).run()

        return run


JobT = TypeVar("JobT", bound=RunJob[Any])


_freezing = threading.Lock()


@contextmanager
def frozen_objects() -> Generator[None]:
    """Leave what is there now, such as imported modules, out of the garbage collections inside the block.

    It does nothing inside another such block, as of another controller here, and in a process that has frozen objects
    before, as a fork server does. Frozen objects are not listed, and to count them would be to walk through them.
    """
    if not _freezing.acquire(blocking=False):
        yield
        return
    was_frozen = all(value is not sys.modules for value in gc.get_objects())
    try:
        if not was_frozen:
            gc.collect()
            gc.freeze()
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        _freezing.release()


@contextmanager
def interrupted_by(handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 call ``handler`` inside the block; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Stop:
    """Ctrl-C, SIGTERM or SIGUSR1, which end a loop between two steps, where the last finished one can be saved.

    The second one raises Python's own `KeyboardInterrupt` immediately.

    Example:
        >>> stop = Stop()
        >>> with stop.catch_interrupts(lambda: print("stopping after this step")):
        ...     stop.hold_back()  # from here to let_through, Ctrl-C waits
        ...     stop.let_through()
        ...     stop.check()  # raises KeyboardInterrupt if Ctrl-C was pressed
        ...     stop.end_early()
        stopping after this step
        >>> stop.is_early
        True
    """

    is_orderly = False
    """Whether `check` has ended the loop."""
    is_early = False
    """Whether `end_early` was called."""
    is_requested = False
    """Whether Ctrl-C was pressed."""
    _is_held_back = False
    _act: Callable[[], object] | None = None

    def catch_interrupts(
        self, act: Callable[[], object] | None = None
    ) -> AbstractContextManager[None]:
        """Note Ctrl-C inside the block, and call ``act`` unless it is held back."""
        self._act = act
        return interrupted_by(self._request)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self.is_requested:
            self.is_orderly = True
            raise KeyboardInterrupt

    def end_early(self) -> None:
        """End the loop as Ctrl-C does, although the run is complete."""
        self.is_early = not self.is_requested
        if self._act is not None:
            self._act()

    def hold_back(self) -> None:
        """Delay Ctrl-C until `let_through`."""
        self._is_held_back = True

    def let_through(self) -> None:
        """Act on a Ctrl-C that came since `hold_back`."""
        self._is_held_back = False
        if self.is_requested and self._act is not None:
            self._act()

    def _request(self, *_: object) -> None:
        for number in _INTERRUPTS:
            signal.signal(number, signal.default_int_handler)
        self.is_requested = True
        if not self._is_held_back:
            self.let_through()


class BaseRunRecorder(ABC, Generic[JobT, EvaluationT]):
    """A `Recorder` that writes a run's folder and takes its checkpoints; apps say how to show steps and evaluations.

    Ctrl-C is held back while the models are between two steps; see `stop`.

    Example:
        >>> class ScoreRecorder(BaseRunRecorder[RunJob[Any], dict[str, float]]):
        ...     cells = (*STAGE_CELLS, Cell("held-out score", "val/score", "{:.1%}"))
        ...
        ...     def show_evaluation(self, step, evaluation):
        ...         self.display.say(f"step {step}: score {evaluation['val/score']:.1%}")
        ...         return evaluation
        ...
        ...     def score(self, metrics):
        ...         return metrics["val/score"]
    """

    cells: ClassVar[tuple[Cell, ...]]
    """Numbers of every step on the screen. The values of an evaluation stay until the next one."""

    def __init__(
        self,
        job: JobT,
        run: RunFolder,
        learner: TrainerGroup,
        writer: MetricsWriter,
        spans: SpanWriter,
        display: Display,
    ) -> None:
        self.job = job
        self.run = run
        self.display = display
        self.warnings = RunWarnings(run, display.say)
        self.stop = Stop()
        self.learner = learner
        self.writer = writer
        self._spans = spans
        self._num_idle = 0
        """Consecutive steps without a learning signal."""
        self._last: Present = (job.first_step, job.controllers)
        self._num_updates = learner.num_updates
        """Updates of the models at the end of the last finished step."""
        self._saved_step = job.first_step
        self._memory: dict[str, list[float]] = {}

    @abstractmethod
    def show_evaluation(self, step: int, evaluation: EvaluationT) -> Mapping[str, float]:
        """Show an evaluation on the screen and keep its samples; return its metrics."""

    @abstractmethod
    def score(self, metrics: Mapping[str, float]) -> float | None:
        """Return what the evaluation last shown is compared by without trainer.best_metric; None: it is in doubt."""

    def step_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return further metrics of a step, after warnings about it."""
        del step, metrics
        return {}

    async def __call__(self, event: Event) -> None:
        match event:
            case Updating():
                self.stop.hold_back()
            case Evaluated(step=step, evaluation=evaluation):
                self._warn_of_rewards(step, event.failures)
                metrics = dict(self.show_evaluation(step, evaluation))
                trainer = self.job.config.trainer
                self.display.latest |= metrics
                metrics |= compare_with_best(
                    self.run.metrics, metrics, self.score(metrics), trainer
                )
                if trainer.export == "best" and is_best(metrics):
                    keep_best(self.run, step, metrics[BEST], self.learner.save_pretrained)
                self.writer.write(step, metrics)
                if is_due(metrics, trainer.early_stopping_patience) and step < self.job.total_steps:
                    self._end_early(step, metrics)
            case Stepped(step=step):
                self._record_step(event)
                self._last = (step, event.controllers)
                self._num_updates = self.learner.num_updates
                if event.is_last or self._is_save_due(step):
                    self.save_last()
                self.stop.let_through()
            case _:
                pass

    def _end_early(self, step: int, metrics: Mapping[str, float]) -> None:
        reason = f"no improvement in {metrics[SINCE_BEST]:.0f} evaluation{'s' * (metrics[SINCE_BEST] > 1)}"
        self.display.say(
            f"step {step}: {reason}: the run ends early (trainer.early_stopping_patience)"
        )
        self.stop.end_early()

    def _is_save_due(self, step: int) -> bool:
        is_local = bool(self.job.config.local_checkpoints.folder)
        return is_local or step % self.job.config.trainer.save_freq == 0

    def _record_step(self, event: Stepped) -> None:
        step = event.step
        self._warn_of_rewards(step, event.failures)
        spans = event.spans
        devices = event.devices
        intervals = StepSpans(
            step=step, start_s=0.0, controllers=spans, devices=devices
        ).intervals()
        shares = Ledger.of([intervals]).shares()
        metrics = event.metrics | {f"ledger/{name}": share for name, share in shares.items()}
        metrics |= self.step_metrics(step, metrics) | self._record_memory(step)
        self.writer.write(step, metrics)
        self.writer.write_samples(step, event.samples)
        self._spans.write(step, spans, devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        self.display.show_progress(
            step, shown_cells(self.cells, {**self.display.latest, **metrics})
        )
        self._num_idle = 0 if metrics.get(Modality.HAS_SIGNAL, 1.0) else self._num_idle + 1
        if self._num_idle and self._num_idle % _PATIENCE == 0:
            message = f"the last {_PATIENCE} steps had nothing to learn from: {explain_missing_signal(metrics)}"
            self.warnings.warn(step, message, key=Modality.HAS_SIGNAL)
        if not all(map(math.isfinite, metrics.values())):
            self.display.say(f"step {step}: the gradient is not finite, the update was skipped")

    def _record_memory(self, step: int) -> dict[str, float]:
        """Record the memory of each process and warn of those that grow; return that of each role."""
        if self.job.config.is_simulated:
            return {}
        sizes = read_memory(self.run.logs)
        append_json(self.run.memory, {"step": step, **sizes})
        for name, message in find_growth(self._memory, sizes):
            self.warnings.warn(step, message, key=name)
        totals = defaultdict[str, float](float)
        for name, size in sizes.items():
            totals[f"perf/{name.partition('-')[0]}"] += size
        return dict(totals)

    def _warn_of_rewards(self, step: int, failures: Sequence[Failure]) -> None:
        for failure in failures:
            reason = one_line(failure.message) or "no message"
            message = (
                f"a reward failed and its group was dropped: {failure.kind}: {reason}; "
                f"the traceback is in {self.run.logs}"
            )
            self.warnings.warn(step, message, key=failure.kind, count=failure.count)

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return self._last[0]

    def present(self) -> Present | None:
        """Return the last finished step; None if a model was updated since, or is lost."""
        try:
            return self._last if self._num_updates == self.learner.num_updates else None
        except RankError:
            return None

    def save_last(self) -> None:
        """Checkpoint the last finished step, unless that is done or a model was updated since."""
        present = self.present()
        if present is None or present[0] == self._saved_step:
            return
        step, controllers = present
        start_s = time.time()
        self.learner.save(step, {"step": step, "controllers": controllers})
        self._spans.record_wait(Span(stage="checkpoint", start_s=start_s, end_s=time.time()))
        self._saved_step = step


def find_growth(
    history: dict[str, list[float]], sizes: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """Add readings to a history of each name; yield the names that grow, each with a sentence that says so.

    A name grows if the lowest of ten readings rises by over 1 % three times in a row.
    """
    for name, size in sizes.items():
        readings = history.setdefault(name, [])
        # Other processes write every few seconds: in a short step they have written nothing.
        if size not in readings[-1:]:
            readings.append(size)
        if len(readings) == _NUM_READINGS:
            starts = range(0, _NUM_READINGS, _WINDOW)
            lows = [round(min(readings[i : i + _WINDOW]), 3) for i in starts]
            if all(later > _MIN_RISE * low for low, later in pairwise(lows)):
                yield name, f"{name} grows: the lowest of each ten steps was {lows}"
            del readings[:_WINDOW]


def check_signal(run: RunFolder, warnings: RunWarnings) -> bool:
    """Return whether any step of a run had a learning signal, or none recorded any, and warn otherwise."""
    rows: list[dict[str, Any]] = [
        row for row in read_jsonl(run.metrics) if Modality.HAS_SIGNAL in row
    ]
    if not rows or any(row[Modality.HAS_SIGNAL] for row in rows):
        return True
    message = f"the run trained nothing: no step had anything to learn from: {explain_missing_signal(rows[-1])}"
    warnings.warn(rows[-1]["step"], message, key="no signal in the run")
    return False


def explain_missing_signal(metrics: Mapping[str, float]) -> str:
    """Say why a step had nothing to learn from, by its metrics."""
    low = metrics.get("critic/score/min")
    high = metrics.get("critic/score/max")
    if low is None or high is None:
        return "no response got a score; look at the reward and at its errors in logs/"
    cause = f"every response scored {low:.3g}"
    if low != high:
        cause = "in every group all responses scored alike"
        if not metrics.get("sampling/groups", 1.0):
            cause += ", so none was kept"
    return f"{cause}; look at the reward, at samples/ and at how hard the prompts are"
