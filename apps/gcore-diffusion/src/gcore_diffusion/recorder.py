"""What a run leaves behind as it goes: metrics, images, checkpoints, and what a person sees."""

import logging
import math
import time

from gcore_controller import Span
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.grids import write_grid
from gcore_diffusion.learner import Learner
from gcore_diffusion.program import Job
from gcore_diffusion.sampling import State
from gcore_runs.display import Display
from gcore_runs.interrupt import Interrupt
from gcore_runs.metrics import MetricsWriter
from gcore_runs.report.ledger import ledger
from gcore_runs.run_folder import RunFolder
from gcore_runs.spans import SpanWriter, StepSpans

_logger = logging.getLogger(__name__)


class RunRecorder:
    """Writes metrics, images and checkpoints, and keeps the display up to date.

    Attributes:
        interrupt: Held back while the models are between two steps.
    """

    def __init__(
        self, job: Job, run: RunFolder, learner: Learner, *, writer: MetricsWriter, spans: SpanWriter, display: Display
    ) -> None:
        self.interrupt = Interrupt()
        self._config: DiffusionConfig = job.config
        self._run = run
        self._learner = learner
        self._writer = writer
        self._spans = spans
        self._display = display
        self._last = (job.first_step, job.controllers)
        self._num_updates = learner.num_updates
        self._saved_step = job.first_step

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """See `Recorder`."""
        metrics = evaluation.metrics()
        self._writer.write(step, metrics)
        picture = self._run.samples / f"step-{step:06}.png"
        write_grid(picture, evaluation.images, evaluation.prompts, per_prompt=self._config.rollout.eval_n)
        names = {"val/score/mean": "reward", "val/held_out/mean": "reward not trained on", "val/accuracy": "accuracy"}
        shown = ", ".join(f"{label} {metrics[name]:.3f}" for name, label in names.items() if name in metrics)
        self._display.say(f"step {step}: held-out images: {shown}")

    async def updating(self) -> None:
        """See `Recorder`."""
        self.interrupt.hold_back()

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""
        shares = ledger([StepSpans(step=step, start_s=0.0, controllers=spans, devices=devices)]).shares()
        metrics = metrics | {f"ledger/{name}": share for name, share in shares.items()}
        self._writer.write(step, metrics)
        self._spans.write(step, spans, spans_by_device=devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        cells = [
            ("reward", f"{metrics.get('critic/score/mean', math.nan):.3f}"),
            ("not trained on", f"{metrics.get('held_out/score/mean', math.nan):.3f}"),
            ("accepted", f"{metrics.get('sampling/acceptance', 0.0):.0%}"),
            ("images/s", f"{metrics.get('perf/throughput', 0.0):,.1f}"),
            ("step", f"{metrics['timing_s/step']:.2f} s"),
            *((s, f"{metrics.get(f'timing_s/{s}', 0.0):.2f} s") for s in ("gen", "reward", "prepare", "train", "sync")),
        ]
        self._display.progressed(step, cells)

    async def reached(self, step: int, controllers: list[State]) -> None:
        """See `Recorder`."""
        self._last, self._num_updates = (step, controllers), self._learner.num_updates
        if step % self._config.trainer.save_freq == 0 or step == self._config.trainer.total_training_steps:
            self.save_last()
        self.interrupt.let_through()

    def save_last(self) -> None:
        """Checkpoint the last finished step, unless that is done or the model has moved on since."""
        step, controllers = self._last
        if step == self._saved_step or self._num_updates != self._learner.num_updates:
            return
        start_s = time.time()
        self._learner.save(step, {"step": step, "controllers": controllers})
        self._spans.waited(Span(stage="checkpoint", start_s=start_s, end_s=time.time()))
        self._saved_step = step
