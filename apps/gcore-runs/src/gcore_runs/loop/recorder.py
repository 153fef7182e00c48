"""Recording of a run: metrics, spans, warnings, checkpoints, and what the screen shows."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from gcore_controller import RankError, Span, TrainerGroup
from gcore_rollout import Failure
from gcore_runs.display import Display
from gcore_runs.loop.interrupt import Interrupt
from gcore_runs.loop.job import RunJob
from gcore_runs.loop.learning_signal import LearningSignal
from gcore_runs.metrics.writer import MetricsWriter
from gcore_runs.report.ledger import ledger
from gcore_runs.run_folder import RunFolder
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.spans import SpanWriter, StepSpans

_logger = logging.getLogger(__name__)

Present = tuple[int, list[dict[str, Any]] | None]
"""A step, and the controllers' states at its end."""

JobT = TypeVar("JobT", bound=RunJob[Any])
EvaluationT = TypeVar("EvaluationT")


class BaseRunRecorder(ABC, Generic[JobT, EvaluationT]):
    """A `Recorder` that writes a run's folder and takes its checkpoints; apps say how to show steps and evaluations.

    Args:
        job: the point that the run starts or resumes from.
        run: its folder.
        learner: the models in training, which are saved.
        writer: of metrics.
        spans: writer of the timeline.
        display: the screen.

    Attributes:
        interrupt: Ctrl-C, which is held back while the models are between two steps.
        job: See above.
        run: See above.
        display: See above.
        warnings: Where problems are reported.
    """

    def __init__(
        self,
        job: JobT,
        run: RunFolder,
        learner: TrainerGroup,
        *,
        writer: MetricsWriter,
        spans: SpanWriter,
        display: Display,
    ) -> None:
        self.job = job
        self.run = run
        self.display = display
        self.warnings = RunWarnings(run, display)
        self.interrupt = Interrupt()
        self._signal = LearningSignal(self.warnings)
        self._learner = learner
        self._writer = writer
        self._spans = spans
        self._last: Present = (job.first_step, job.controllers)
        self._num_updates = learner.num_updates
        """Updates of the models at the end of the last finished step."""
        self._saved_step = job.first_step

    @abstractmethod
    def show_evaluation(self, step: int, evaluation: EvaluationT) -> Mapping[str, float]:
        """Show an evaluation on the screen and keep its samples; return its metrics."""

    @abstractmethod
    def show_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step on the screen."""

    def step_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return further metrics of a step."""
        del metrics
        return {}

    async def evaluated(self, step: int, evaluation: EvaluationT) -> None:
        """See `Recorder.evaluated`."""
        self._writer.write(step, dict(self.show_evaluation(step, evaluation)))

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder.stepped`."""
        shares = ledger([StepSpans(step=step, start_s=0.0, controllers=spans, devices=devices)]).shares()
        metrics = metrics | {f"ledger/{name}": share for name, share in shares.items()}
        metrics |= self.step_metrics(metrics)
        self._writer.write(step, metrics)
        self._spans.write(step, spans, spans_by_device=devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        self.show_step(step, metrics)
        self._signal.stepped(step, metrics)
        if not all(math.isfinite(v) for v in metrics.values()):
            self.display.say(f"step {step}: the gradient is not finite, the update was skipped")

    async def updating(self) -> None:
        """See `Recorder.updating`."""
        self.interrupt.hold_back()

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """See `Recorder.rewards_failed`."""
        self.warnings.rewards_failed(step, failures)

    async def reached(self, step: int, controllers: list[dict[str, Any]]) -> None:
        """See `Recorder.reached`."""
        self._last, self._num_updates = (step, controllers), self._learner.num_updates
        if step % self.job.config.trainer.save_freq == 0 or step == self.job.total_steps:
            self.save_last()
        self.interrupt.let_through()

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return self._last[0]

    def present(self) -> Present | None:
        """Return the last finished step; None if a model was updated since, or is lost."""
        try:
            return self._last if self._num_updates == self._learner.num_updates else None
        except RankError:
            return None

    def save_last(self) -> None:
        """Checkpoint the last finished step, unless that is done or a model was updated since."""
        present = self.present()
        if present is None or present[0] == self._saved_step:
            return
        step, controllers = present
        start_s = time.time()
        self._learner.save(step, {"step": step, "controllers": controllers})
        self._spans.waited(Span(stage="checkpoint", start_s=start_s, end_s=time.time()))
        self._saved_step = step
