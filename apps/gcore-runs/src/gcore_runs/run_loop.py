"""A run from its first step to its last, whatever is lost on the way that can be replaced."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gcore_ckpt import Checkpointer
from gcore_controller import Backend, RankError
from gcore_runs.display import Display
from gcore_runs.job import RunConfig, RunJob
from gcore_runs.metrics import MetricsWriter
from gcore_runs.recorder import BaseRunRecorder, Present
from gcore_runs.run_folder import RunFolder
from gcore_runs.spans import SpanWriter

if TYPE_CHECKING:
    from gcore_runs.prometheus import PrometheusExporter

_MAX_LOSSES = 5
"""So many times in a row services may die without a step made in between."""

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=RunConfig)
EvaluationT = TypeVar("EvaluationT")


def steps_made(run: RunFolder, total: int, display: Display) -> int | None:
    """Steps that a run has made before; None: all, and it is exported. It is said if there are any."""
    steps = Checkpointer(run.checkpoints).steps()
    first_step = steps[-1] if steps else 0
    if first_step >= total and run.export.is_dir():
        display.say(f"complete: {first_step} steps are done, more need a higher trainer.total_training_steps")
        return None
    if first_step:
        display.say(f"resuming after step {first_step} of {total}")
    return first_step


@dataclass(frozen=True, kw_only=True)
class RunLoop(Generic[JobT, ConfigT, EvaluationT]):
    """Runs a job, and goes on from where its models are whenever something is lost that can be replaced.

    Attributes:
        services: What it runs on; to be closed by the caller.
        run: Its folder.
        recorder: Makes the recorder of an attempt.
        is_evaluated: Whether the evaluation after a step, if one is due with these settings, is recorded already.
        runner: Whose event loop everything runs in.
        display: Says what was lost.
        tensorboard: Whether metrics go there, too.
        prometheus: And there.
    """

    services: Backend[JobT, ConfigT, EvaluationT]
    run: RunFolder
    recorder: Callable[[JobT, MetricsWriter, SpanWriter], BaseRunRecorder[JobT, EvaluationT]]
    is_evaluated: Callable[[ConfigT, int], bool]
    runner: asyncio.Runner
    display: Display
    tensorboard: bool
    prometheus: "PrometheusExporter | None" = None

    def to_the_end(self, job: JobT) -> None:
        """Run it, from the models of the last checkpoint where steps are made already.

        Raises:
            KeyboardInterrupt: after a checkpoint of the last finished step.
            Exception: what cannot be replaced, or too much was lost without a step in between.
        """
        services, display = self.services, self.display
        if services.shortfall:
            display.say(services.shortfall)
        if job.first_step:
            job = replace(job, controllers=services.learner.load()["controllers"])
        display.phase("training", total=job.total_steps, done=job.first_step)
        display.watch(services.stages)
        num_losses = 0
        spans = SpanWriter(self.run.spans, last_step=job.first_step)
        while (loss := self._attempt(job, spans)) is not None:
            num_losses = 1 if loss.has_progressed else num_losses + 1
            while True:
                if num_losses > _MAX_LOSSES:
                    raise loss.error
                try:
                    recovery = self.runner.run(services.recover(loss.error, keeps_models=loss.present is not None))
                    job = self._resumed(job, loss.present if recovery.keeps_models else None)
                    break
                except RankError as error:
                    if error is loss.error:
                        raise
                    # One that was killed on the way back.
                    display.say(f"{loss.error}; the next came before all was replaced")
                    loss = _Loss(error=error)
                    num_losses += 1
            spans.go_on(last_step=job.first_step, cause=recovery.cause)
            display.say(f"{recovery.message}; going on after step {job.first_step}")

    def _attempt(self, job: JobT, spans: SpanWriter) -> "_Loss | None":
        """Run a job; whatever ends it, its last step is saved if the models are still there."""
        first_step = job.first_step
        with MetricsWriter(
            self.run, last_step=first_step, tensorboard=self.tensorboard, prometheus=self.prometheus
        ) as writer:
            try:
                recorder = self.recorder(job, writer, spans)
            except RankError as error:
                return _Loss(error=error)
            try:
                self.runner.run(self._run(job, recorder))
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
        """The job from where its models are: as they were when it lost something, or of the last checkpoint."""
        step, controllers = present or (0, None)
        if present is None and Checkpointer(self.run.checkpoints).steps():
            saved = self.services.learner.load()
            step, controllers = saved["step"], saved["controllers"]
        config = self.services.config
        return replace(
            job,
            config=config,
            first_step=step,
            is_evaluated=self.is_evaluated(config, step),
            controllers=controllers,
            is_policy_behind=True,
        )


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """How an attempt ended before its time."""

    error: Exception
    present: Present | None = None
    """See `BaseRunRecorder.present`."""
    has_progressed: bool = False
    """Whether it made a step."""


@contextmanager
def closed(services: Backend[Any, Any, Any], runner: asyncio.Runner) -> Generator[None]:
    """Close them behind the block, however that ends."""
    try:
        yield
    finally:
        runner.run(services.close())
