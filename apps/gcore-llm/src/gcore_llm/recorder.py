"""Recording of a language model's run: its predicted steps, its mismatch, and the samples of evaluations."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from gcore_llm.learning.preparation import warning
from gcore_llm.modality import Job
from gcore_llm.sampling.evaluate import Evaluation
from gcore_placement import Forecast, PlacementError
from gcore_runs import STAGE_CELLS, BaseRunRecorder, Cell, write_jsonl

_logger = logging.getLogger(__name__)

_MANY = 0.5
"""Fraction of a step's episodes that is reported if they were cut off."""

_CUT_OFF = {
    "truncated_turn": "a turn was cut off before its end, so the environment could not answer it; a higher "
    "rollout.multi_turn.max_tokens_per_turn, or 0, lets turns end",
    "length": "the tokens of all turns were used up; a higher data.max_response_length gives them more",
}
"""The cause, and what helps, for each kind of end of an episode."""


class RunRecorder(BaseRunRecorder[Job, Evaluation]):
    """See `BaseRunRecorder`."""

    cells = (
        Cell("reward", "critic/score/mean", "{:.3f}", "none"),
        Cell("held-out", "val/greedy/score/mean", "{:.3f}", "-"),
        Cell("accepted", "sampling/acceptance", "{:.0%}", "0%"),
        Cell("length", "response_length/mean", "{:.1f}", "0.0"),
        Cell("tokens/s", "perf/throughput", "{:,.0f}", "0"),
        *STAGE_CELLS,
        Cell("busiest controller", "controller/load/max", "{:.1%}"),
    )
    _has_warned = False

    def show_evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        greedy, sampled = evaluation.greedy, evaluation.sampled
        self.display.say(f"step {step}: held-out score {greedy:.3f} greedy, {sampled:.3f} sampled")
        name = "before" if step == 0 else "after"
        write_jsonl(self.run.samples / f"{name}.jsonl", evaluation.samples)
        return evaluation.metrics()

    def step_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return how long the step was predicted to take."""
        return self._forecast.stepped(metrics) if self._forecast else {}

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `BaseRunRecorder.show_step`; warns about a mismatch and about episodes that were cut off."""
        super().show_step(step, metrics)
        bound = self.job.config.algorithm.max_rollout_kl
        if not self._has_warned and bound and (line := warning(step, metrics, bound)):
            self._has_warned = True
            self.display.say(line)
        for end, cause in _CUT_OFF.items():
            fraction = metrics.get(f"multi_turn/end/{end}", 0.0)
            if fraction > _MANY:
                message = f"{fraction:.0%} of the episodes ended because {cause}"
                self.warnings.warn(step, message, key=f"episodes ended by {end}")

    @cached_property
    def _forecast(self) -> Forecast | None:
        """The predictions; None in simulated time, or where the planner does not know the model's architecture."""
        from gcore_llm.forecast import run_forecast

        config = self.job.config
        if config.runtime == "sim":
            return None
        try:
            return run_forecast(config, Path(config.model) if config.model else self.run.model, self.run.placement)
        except PlacementError as error:
            _logger.info("steps are not predicted: %s", error)
            return None
