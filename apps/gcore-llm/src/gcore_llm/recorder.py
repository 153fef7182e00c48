"""What a run leaves behind as it goes: metrics, samples, checkpoints, and what a person sees."""

import logging
import math
import time
from pathlib import Path

from gcore_controller import Span
from gcore_llm.config import TrainConfig
from gcore_llm.errors import RankError
from gcore_llm.evaluate import Evaluation
from gcore_llm.forecast import Forecast
from gcore_llm.learner import SavedLearner
from gcore_llm.program import Job
from gcore_llm.sampling import State
from gcore_placement import PlacementError
from gcore_runs.display import Display
from gcore_runs.interrupt import Interrupt
from gcore_runs.metrics import MetricsWriter
from gcore_runs.report.ledger import ledger
from gcore_runs.run_folder import RunFolder, write_jsonl
from gcore_runs.spans import SpanWriter, StepSpans

_logger = logging.getLogger(__name__)

Present = tuple[int, list[State] | None]
"""A step, and the controllers' states at its end."""


class RunRecorder:
    """Writes metrics, samples and checkpoints, and keeps the display up to date.

    Attributes:
        interrupt: Held back while the models are between two steps.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder,
        learner: SavedLearner,
        *,
        writer: MetricsWriter,
        spans: SpanWriter,
        display: Display,
    ) -> None:
        self.interrupt = Interrupt()
        self._config = job.config
        self._run = run
        self._learner = learner
        self._writer = writer
        self._display = display
        self._last: Present = (job.first_step, job.controllers)
        self._num_updates = learner.num_updates
        """Then."""
        self._saved_step = job.first_step
        self._spans = spans
        self._forecast = _forecast(job.config, run)

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """See `Recorder`."""
        self._writer.write(step, evaluation.metrics())
        self._display.evaluated(step, greedy=evaluation.greedy, sampled=evaluation.sampled)
        name = "before" if step == 0 else "after"
        write_jsonl(self._run.samples / f"{name}.jsonl", evaluation.samples)

    async def updating(self) -> None:
        """See `Recorder`."""
        self.interrupt.hold_back()

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""
        shares = ledger([StepSpans(step=step, start_s=0.0, controllers=spans, devices=devices)]).shares()
        metrics = metrics | {f"ledger/{name}": share for name, share in shares.items()}
        if self._forecast is not None:
            metrics |= self._forecast.stepped(metrics)
        self._writer.write(step, metrics)
        self._spans.write(step, spans, spans_by_device=devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        self._display.stepped(step, metrics)
        if not all(math.isfinite(v) for v in metrics.values()):
            self._display.say(f"step {step}: the gradient is not finite, the update was skipped")

    async def reached(self, step: int, controllers: list[State]) -> None:
        """See `Recorder`."""
        self._last, self._num_updates = (step, controllers), self._learner.num_updates
        if step % self._config.trainer.save_freq == 0 or step == self._config.trainer.total_training_steps:
            self.save_last()
        self.interrupt.let_through()

    @property
    def last_step(self) -> int:
        """The last finished one."""
        return self._last[0]

    def present(self) -> Present | None:
        """The last finished step; None if a model has moved on since, or is lost."""
        try:
            return self._last if self._num_updates == self._learner.num_updates else None
        except RankError:
            return None

    def save_last(self) -> None:
        """Checkpoint the last finished step, unless that is done or a model has moved on since."""
        present = self.present()
        if present is None or present[0] == self._saved_step:
            return
        step, controllers = present
        start_s = time.time()
        self._learner.save(step, {"step": step, "controllers": controllers})
        self._spans.waited(Span(stage="checkpoint", start_s=start_s, end_s=time.time()))
        self._saved_step = step


def _forecast(config: TrainConfig, run: RunFolder) -> Forecast | None:
    """None: the planner knows no such model, which is no reason not to run."""
    try:
        return Forecast(config, Path(config.model) if config.model else run.model, run.placement)
    except PlacementError as error:
        _logger.info("steps are not foretold: %s", error)
        return None
