"""What a run leaves behind as it goes: metrics, images, checkpoints, and what a person sees."""

import logging

from gcore_controller import Span
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.grids import write_grid
from gcore_diffusion.modality import Job
from gcore_runs.display import Display
from gcore_runs.metrics import MetricsWriter
from gcore_runs.recording import Saving
from gcore_runs.report.ledger import ledger
from gcore_runs.run_folder import RunFolder
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.services import SavedLearner
from gcore_runs.spans import SpanWriter, StepSpans

_logger = logging.getLogger(__name__)


class RunRecorder(Saving[Evaluation]):
    """Writes metrics, images and checkpoints, and keeps the display up to date; see `Recorder`."""

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
        super().__init__(
            job, learner, spans, save_freq=job.config.trainer.save_freq, warnings=RunWarnings(run, display)
        )
        self._eval_n = job.config.rollout.eval_n
        self._run = run
        self._writer = writer
        self._display = display

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """See `Recorder`."""
        metrics = evaluation.metrics()
        self._writer.write(step, metrics)
        picture = self._run.samples / f"step-{step:06}.png"
        write_grid(picture, evaluation.images, evaluation.prompts, per_prompt=self._eval_n)
        names = {"val/score/mean": "reward", "val/held_out/mean": "reward not trained on", "val/accuracy": "accuracy"}
        shown = ", ".join(f"{label} {metrics[name]:.3f}" for name, label in names.items() if name in metrics)
        self._display.say(f"step {step}: held-out images: {shown}")

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""
        shares = ledger([StepSpans(step=step, start_s=0.0, controllers=spans, devices=devices)]).shares()
        metrics = metrics | {f"ledger/{name}": share for name, share in shares.items()}
        self._writer.write(step, metrics)
        self.spans.write(step, spans, spans_by_device=devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        cells = [
            *(
                (label, f"{metrics[name]:.3f}")
                for label, name in (("reward", "critic/score/mean"), ("not trained on", "held_out/score/mean"))
                if name in metrics
            ),
            ("accepted", f"{metrics.get('sampling/acceptance', 0.0):.0%}"),
            ("images/s", f"{metrics.get('perf/throughput', 0.0):,.1f}"),
            ("step", f"{metrics['timing_s/step']:.2f} s"),
            *((s, f"{metrics.get(f'timing_s/{s}', 0.0):.2f} s") for s in ("gen", "reward", "prepare", "train", "sync")),
        ]
        self._display.progressed(step, cells)
        self.signal.stepped(step, metrics)
