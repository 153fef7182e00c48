"""Where a program leaves what happened."""

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gcore_controller import Span
from gcore_rollout import Failure
from gcore_runs.errors import RankError
from gcore_runs.interrupt import Interrupt
from gcore_runs.learning_signal import LearningSignal
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.spans import SpanWriter

if TYPE_CHECKING:
    from gcore_runs.services import RunJob, SavedLearner

Present = tuple[int, list[dict[str, Any]] | None]
"""A step, and the controllers' states at its end."""

EvaluationT_contra = TypeVar("EvaluationT_contra", contravariant=True)


class Saving(ABC, Generic[EvaluationT_contra]):
    """A `Recorder` that takes checkpoints; what else it leaves is its subclass's.

    Args:
        job: from where the run begins, or goes on.
        learner: what is saved.
        spans: where it is told how long that took.
        save_freq: steps between checkpoints; the last step has one, too.
        warnings: where failures are reported.

    Attributes:
        interrupt: Held back while the models are between two steps.
        spans: Where it is told how long things took.
        signal: To be given the metrics of every step.
        warnings: Where what is wrong is reported.
    """

    def __init__(
        self,
        job: "RunJob[Any]",
        learner: "SavedLearner",
        spans: SpanWriter,
        *,
        save_freq: int,
        warnings: RunWarnings,
    ) -> None:
        self.warnings = warnings
        self.signal = LearningSignal(warnings)
        self.interrupt = Interrupt()
        self._learner = learner
        self.spans = spans
        self._save_freq = save_freq
        self._total_steps = job.total_steps
        self._last: Present = (job.first_step, job.controllers)
        self._num_updates = learner.num_updates
        """Then."""
        self._saved_step = job.first_step

    @abstractmethod
    async def evaluated(self, step: int, evaluation: EvaluationT_contra) -> None:
        """See `Recorder`."""

    @abstractmethod
    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""

    async def updating(self) -> None:
        """See `Recorder`."""
        self.interrupt.hold_back()

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """See `Recorder`."""
        self.warnings.rewards_failed(step, failures)

    async def reached(self, step: int, controllers: list[dict[str, Any]]) -> None:
        """See `Recorder`."""
        self._last, self._num_updates = (step, controllers), self._learner.num_updates
        if step % self._save_freq == 0 or step == self._total_steps:
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
        self.spans.waited(Span(stage="checkpoint", start_s=start_s, end_s=time.time()))
        self._saved_step = step
