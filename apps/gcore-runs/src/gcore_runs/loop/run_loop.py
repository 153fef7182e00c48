"""The steps of a run, from the first to the last, with recovery from losses that can be replaced."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gcore_ckpt import Checkpointer
from gcore_controller import Backend, RankError
from gcore_runs.loop.job import RunConfig, RunJob
from gcore_runs.loop.recorder import BaseRunRecorder, Present
from gcore_runs.loop.supervisor import Supervisor
from gcore_runs.metrics.writer import MetricsWriter
from gcore_runs.spans import SpanWriter

_MAX_LOSSES = 5
"""How many times in a row services may die without a finished step in between."""

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=RunConfig)
EvaluationT = TypeVar("EvaluationT")


@dataclass(frozen=True, kw_only=True)
class RunLoop(Generic[JobT, ConfigT, EvaluationT]):
    """Runs a job, and continues from where its models are whenever something is lost that can be replaced.

    Attributes:
        supervisor: Of the run, whose folder is open.
        services: What the job runs on; closed by the caller.
        recorder: Makes the recorder of an attempt.
    """

    supervisor: Supervisor
    services: Backend[JobT, ConfigT, EvaluationT]
    recorder: Callable[[JobT, MetricsWriter, SpanWriter], BaseRunRecorder[JobT, EvaluationT]]

    def to_the_end(self, job: JobT) -> None:
        """Run the job; after an earlier process of the run, from the models of its last checkpoint.

        Raises:
            KeyboardInterrupt: after a checkpoint of the last finished step.
            Exception: what cannot be replaced, or too much was lost without a step in between.
        """
        services, display = self.services, self.supervisor.display
        if services.shortfall:
            display.say(services.shortfall)
        if job.first_step:
            job = replace(job, controllers=services.learner.load()["controllers"])
        display.phase("training", total=job.total_steps, done=job.first_step)
        display.watch(services.stages)
        num_losses = 0
        spans = SpanWriter(self.supervisor.run.spans, last_step=job.first_step)
        while (loss := self._attempt(job, spans)) is not None:
            num_losses = 1 if loss.has_progressed else num_losses + 1
            while True:
                if num_losses > _MAX_LOSSES:
                    raise loss.error
                try:
                    recovery = self.supervisor.run_async(
                        services.recover(loss.error, keeps_models=loss.present is not None)
                    )
                    job = self._resumed(job, loss.present if recovery.keeps_models else None)
                    break
                except RankError as error:
                    if error is loss.error:
                        raise
                    # A rank was killed while the first loss was being replaced.
                    display.say(f"{loss.error}; another loss came before everything was replaced")
                    loss = _Loss(error=error)
                    num_losses += 1
            spans.resume(last_step=job.first_step, cause=recovery.cause)
            display.say(f"{recovery.message}; continuing after step {job.first_step}")

    def _attempt(self, job: JobT, spans: SpanWriter) -> "_Loss | None":
        """Run a job once; however it ends, its last step is saved if the models are still there."""
        first_step = job.first_step
        with self.supervisor.metrics_writer(last_step=first_step) as writer:
            try:
                recorder = self.recorder(job, writer, spans)
            except RankError as error:
                return _Loss(error=error)
            try:
                self.supervisor.run_async(self._run(job, recorder))
            except BaseException as error:
                with suppress(RankError):
                    recorder.save_last()
                if isinstance(error, asyncio.CancelledError):
                    raise KeyboardInterrupt from None
                if not isinstance(error, Exception):
                    raise
                has_progressed = recorder.last_step > first_step
                return _Loss(error=error, present=recorder.present(), has_progressed=has_progressed)
        return None

    async def _run(self, job: JobT, recorder: BaseRunRecorder[JobT, EvaluationT]) -> None:
        main = asyncio.current_task()
        assert main is not None
        with recorder.interrupt.cancels(main):
            await self.services.run(job, recorder)

    def _resumed(self, job: JobT, present: Present | None) -> JobT:
        """Return the job from where its models are: at the last finished step, or at the last checkpoint."""
        step, controllers = present or (0, None)
        if present is None and Checkpointer(self.supervisor.run.checkpoints).steps():
            saved = self.services.learner.load()
            step, controllers = saved["step"], saved["controllers"]
        config = self.services.config
        return replace(
            job,
            config=config,
            first_step=step,
            is_evaluated=self.supervisor.is_evaluated(step, job.total_steps),
            controllers=controllers,
            is_policy_behind=True,
        )


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """The end of an attempt before the last step."""

    error: Exception
    present: Present | None = None
    """See `BaseRunRecorder.present`."""
    has_progressed: bool = False
    """Whether it finished a step."""
