"""What a run leaves behind as it goes: metrics, samples, checkpoints, and what a person sees."""

import logging
import math
from pathlib import Path

from gcore_controller import Span
from gcore_llm.config import TrainConfig
from gcore_llm.evaluate import Evaluation
from gcore_llm.forecast import Forecast
from gcore_llm.mismatch import warning
from gcore_llm.modality import Job
from gcore_placement import PlacementError
from gcore_runs.display import Display
from gcore_runs.metrics import MetricsWriter
from gcore_runs.recording import Saving
from gcore_runs.report.ledger import ledger
from gcore_runs.run_folder import RunFolder, write_jsonl
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.services import SavedLearner
from gcore_runs.spans import SpanWriter, StepSpans

_logger = logging.getLogger(__name__)

_MANY = 0.5
"""Share of a step's episodes that is reported if they were cut off."""

_CUT_OFF = {
    "truncated_turn": "a turn was cut off before its end, so the environment could not answer it; a higher "
    "rollout.multi_turn.max_tokens_per_turn, or 0, lets turns end",
    "length": "the tokens of all turns were used up; a higher data.max_response_length gives them more",
}
"""By how an episode ended: the cause, and what helps."""


class RunRecorder(Saving[Evaluation]):
    """Writes metrics, samples and checkpoints, and keeps the display up to date; see `Recorder`."""

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
        self._run = run
        self._writer = writer
        self._display = display
        self._forecast = _forecast(job.config, run)
        self._bound = job.config.algorithm.max_rollout_kl
        self._has_warned = False

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """See `Recorder`."""
        self._writer.write(step, evaluation.metrics())
        self._display.evaluated(step, greedy=evaluation.greedy, sampled=evaluation.sampled)
        name = "before" if step == 0 else "after"
        write_jsonl(self._run.samples / f"{name}.jsonl", evaluation.samples)

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""
        shares = ledger([StepSpans(step=step, start_s=0.0, controllers=spans, devices=devices)]).shares()
        metrics = metrics | {f"ledger/{name}": share for name, share in shares.items()}
        if self._forecast is not None:
            metrics |= self._forecast.stepped(metrics)
        self._writer.write(step, metrics)
        self.spans.write(step, spans, spans_by_device=devices)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        self._display.stepped(step, metrics)
        if not self._has_warned and self._bound and (line := warning(step, metrics, self._bound)):
            self._has_warned = True
            self._display.say(line)
        self.signal.stepped(step, metrics)
        self._check_episodes(step, metrics)
        if not all(math.isfinite(v) for v in metrics.values()):
            self._display.say(f"step {step}: the gradient is not finite, the update was skipped")

    def _check_episodes(self, step: int, metrics: dict[str, float]) -> None:
        for end, cause in _CUT_OFF.items():
            share = metrics.get(f"multi_turn/end/{end}", 0.0)
            if share > _MANY:
                message = f"{share:.0%} of the episodes ended because {cause}"
                self.warnings.warn(step, message, key=f"episodes ended by {end}")


def _forecast(config: TrainConfig, run: RunFolder) -> Forecast | None:
    """None: the planner knows no such model, which is no reason not to run."""
    try:
        return Forecast(config, Path(config.model) if config.model else run.model, run.placement)
    except PlacementError as error:
        _logger.info("steps are not foretold: %s", error)
        return None
