"""The frame of every training: open the run, resume it, take interruptions and losses, export, report and return."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rich.console import Console

from gcore_ckpt import Checkpointer
from gcore_controller import (
    Backend,
    DeviceTurns,
    InlineBackend,
    RankCodeError,
    RankError,
    SharedTrainerGroup,
    VirtualTimeLoop,
    share_trainer,
)
from gcore_rollout import EngineDiedError, EngineStartError, RolloutError
from gcore_runs.engines import allocator_variables, engines_in_turns, lending_of
from gcore_runs.errors import UserError
from gcore_runs.logs import describe_os_error, log_to, one_line
from gcore_runs.loop.best import best_step, exported_evaluation, has_ended
from gcore_runs.loop.recorder import (
    BaseRunRecorder,
    Display,
    JobT,
    Present,
    check_signal,
    interrupted_by,
)
from gcore_runs.report.page import render_report
from gcore_runs.report.run import Kind
from gcore_runs.run_folder import (
    MetricsWriter,
    RunFolder,
    RunWarnings,
    SpanWriter,
    open_run,
    partial_path,
    read_jsonl,
    run_id,
    write_atomically,
)
from gcore_runs.settings.parsing import read_toml
from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig
from gcore_runs.settings.sections import RLTrainerConfig
from gcore_runs.trackers.background import check_trackers, start_tracker
from gcore_runs.trackers.base import TrackedRun, Tracker
from gcore_trainer import TrainerError

_REFUSALS = UserError, RolloutError, TrainerError
"""Errors of wrong input: before anything is trained, a new run that ends by one leaves no folder."""
_LOSSES = EngineStartError, EngineDiedError
"""Errors that are none of wrong input, and whose causes are in the folder's logs."""
_UNWIND_S = 10.0
"""How long an interrupted task may take to end."""
_MAX_NESTED_TASKS = 20
"""How many tasks may be around an interrupted one."""
_MAX_LOSSES = 5
"""How many times in a row services may die without a finished step in between."""


def _check_no_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserError(
        "training was called while an event loop runs, as in a notebook; expected a thread of its own: "
        "import asyncio; result = await asyncio.to_thread(train, config)"
    )


ServicesT = TypeVar("ServicesT")
ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, with its first and its last evaluation on held-out data.

    Example:
        >>> before = {"step": 0, "val/score": 0.25}
        >>> after = {"step": 200, "val/score": 0.75}
        >>> result = RunResult(run=Path("runs/gsm8k"), before=before, after=after)
        >>> result.after["val/score"] - result.before["val/score"]
        0.5
    """

    run: Path
    """The run's folder."""
    before: dict[str, float]
    """Metrics of the first evaluation, and its step; empty: nothing was held out."""
    after: dict[str, float]
    """Metrics of the last one, or of the one whose policy is exported."""
    has_signal: bool = True
    """Whether any step had a learning signal."""


class Supervisor:
    """Runs one training job from checked settings to its report.

    A command enters it, checks its inputs, opens the run, trains, exports and finishes. Inside the block Ctrl-C raises
    `KeyboardInterrupt` at any time, until a training loop takes it over::

        with Supervisor(config, app="gcore-llm", display=display) as supervisor:
            prompts = load_prompts(config)
            run = supervisor.open_run(f"{len(prompts):,} prompts")
            if supervisor.resume(config.trainer.total_training_steps) is not None:
                with supervisor.run_services(start_services(config)) as services:
                    supervisor.train(services, LLMJob(config=config, prompts=prompts), RunRecorder)
                    supervisor.export(services.learner.save_pretrained)
            return supervisor.finish(KINDS)

    Args:
        config: the run's settings, resolved; see `resolve`.
        app: distribution whose run it is, such as gcore-llm.
        display: where progress is shown; None: nowhere, but it is logged.

    Raises:
        UserError: the metrics cannot be served where ``trainer.prometheus`` says.

    Example:
        >>> config = BaseRunConfig(name="greeting", threads=1, trainer=RLTrainerConfig(tensorboard=False))
        >>> with Supervisor(config, app="my-app") as supervisor:
        ...     run = supervisor.open_run("3 rows")
        ...     with supervisor.metrics_writer(last_step=0) as writer:
        ...         writer.write(1, {"loss": 0.5})
        ...     supervisor.export(lambda path: path.mkdir())
        >>> run.export.is_dir(), read_jsonl(run.metrics)
        (True, [{'step': 1, 'loss': 0.5}])
    """

    run: RunFolder
    """The run's folder, once it is open."""

    def __init__(self, config: BaseRunConfig, *, app: str, display: Display | None = None) -> None:
        import torch

        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._app = app
        self._stack = ExitStack()
        self._trackers: list[Tracker] = []
        self._is_new = False
        self.display = display or Display(Console(quiet=True))

    def __enter__(self) -> Self:
        _check_no_running_loop()
        trainer = self._config.trainer
        with ExitStack() as stack:
            # torch reads them with its first use of CUDA's memory, and so does each process that this one starts.
            for name, value in allocator_variables(self._config).items():
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                # The runner's own handler, which replaces Python's default one and no other, waits until its task
                # awaits something: a loading model or a blocking reward may do that late, or never.
                stack.enter_context(interrupted_by(partial(signal.default_int_handler)))
            if trainer.trackers:
                check_trackers(trainer.trackers)
            if trainer.prometheus:
                from gcore_runs.trackers.prometheus import PrometheusExporter

                host, _, port = trainer.prometheus.rpartition(":")
                server = PrometheusExporter(
                    run=self._config.name, port=int(port), host=host or "127.0.0.1", app=self._app
                )
                self._trackers.append(stack.enter_context(server))
            # One event loop for all of it: an async reward may keep objects that belong to the loop of its first call.
            is_simulated = isinstance(self._config, BaseRLConfig) and self._config.is_simulated
            loop = VirtualTimeLoop if is_simulated else None
            self._runner = stack.enter_context(asyncio.Runner(loop_factory=loop))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.__exit__(error_type, error, traceback)
        if self._is_new and isinstance(error, _REFUSALS) and not isinstance(error, _LOSSES):
            run = self.run
            has_steps = run.metrics.exists() and run.metrics.stat().st_size > 0
            if not has_steps and not any(
                file.exists() for file in (run.warmup, run.model, run.checkpoints)
            ):
                shutil.rmtree(run.path, ignore_errors=True)

    def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, in the event loop of the whole run."""
        tasks: list[asyncio.Task[Any]] = []

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            return await work

        try:
            return self._runner.run(run())
        except KeyboardInterrupt:
            self._unwind(tasks)
            raise

    def _unwind(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Run tasks to their end after an interrupt, which each of them raises out of the loop again.

        Otherwise the next call that uses the loop would get it.
        """

        async def wait() -> None:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_UNWIND_S)

        for _ in range(_MAX_NESTED_TASKS):
            # RuntimeError: the loop was stopped by a task of an earlier call.
            with suppress(KeyboardInterrupt, RuntimeError):
                self._runner.run(wait())
                return

    @contextmanager
    def run_services(self, starting: Coroutine[Any, Any, ServicesT]) -> Generator[ServicesT]:
        """Await what starts services, and close them by their ``close()`` when the block ends in any way."""
        services: Any = self.run_async(starting)
        try:
            yield services
        finally:
            self.run_async(services.close())

    def take_length(self, config: BaseRunConfig) -> None:
        """Take over the number of steps of settings that were made after the data was read."""
        self._config = replace(self._config, trainer=config.trainer)

    def open_run(self, *notices: str) -> RunFolder:
        """Open the run's folder (see `gcore_runs.run_folder.open_run`), log to it until the end, and show notices."""
        self.run = open_run(self._config)
        self._is_new = self.run.is_new
        self._stack.enter_context(log_to(self.run.logs, "main"))
        lines = [f"run folder: {self.run.path}", *self.run.notices, *notices]
        if isinstance(self._config, BaseRLConfig) and self._config.runtime == "ray":
            lines.append(f"device of engines and ranks on the cluster: {self._config.device}")
        for line in lines:
            self.display.say(line)
        return self.run

    def resume(self, total: int) -> int | None:
        """Return how many of ``total`` steps are done, without the export of a shorter run; None: all, and exported.

        A run with steps to do is shown by its trackers from here on.
        """
        steps = Checkpointer(self.run.checkpoints).steps()
        first_step = steps[-1] if steps else 0
        is_early = first_step < total and self._has_ended_early(first_step)
        if (first_step >= total or is_early) and self.run.export.is_dir():
            setting = "early_stopping_patience" if is_early else "total_training_steps"
            self.display.say(
                f"complete: {first_step} of {total} steps are done; a higher trainer.{setting} continues it"
            )
            return None
        if self._config.trainer.trackers:
            self._start_trackers()
        if first_step:
            self.display.say(f"resuming after step {first_step} of {total}")
        shutil.rmtree(self.run.export, ignore_errors=True)
        return first_step

    def _start_trackers(self) -> None:
        trainer = self._config.trainer
        path = self.run.path
        config = read_toml(self.run.config)
        project = trainer.project_name
        run = TrackedRun(
            project=project, name=path.name, run_id=run_id(path), folder=path, config=config
        )
        for name in trainer.trackers:
            self._trackers.append(
                self._stack.enter_context(start_tracker(name, run, self.display.say))
            )

    def train(
        self,
        services: Backend[JobT, Any],
        job: JobT,
        recorder: Callable[..., BaseRunRecorder[JobT, Any]],
    ) -> None:
        """Run a job to its end, and continue from where its models are whenever something that can be replaced is lost.

        It resumes from the run's last checkpoint, if there is one; the services are closed by the caller. Raises
        `KeyboardInterrupt` after a checkpoint of the last finished step, and the error of what cannot be replaced.
        """
        display = self.display
        is_policy_behind = job.is_policy_behind
        job = self._resume_job(services, job, None)
        job = replace(job, is_policy_behind=is_policy_behind or job.first_step > 0)
        display.phase("training", total=job.total_steps, done=job.first_step)
        display.watch(services.stages)
        num_losses = 0
        spans = SpanWriter(self.run.spans, last_step=job.first_step)
        while True:
            loss = self._attempt(services, job, recorder, spans)
            if loss is None:
                return
            if loss.has_progressed:
                num_losses = 0
            recovery = None
            while recovery is None:
                num_losses += 1
                if num_losses > _MAX_LOSSES:
                    raise loss.error
                try:
                    recovery = self.run_async(
                        services.recover(loss.error, keeps_models=loss.present is not None)
                    )
                    job = self._resume_job(
                        services, job, loss.present if recovery.keeps_models else None
                    )
                except RankError as error:
                    if error is loss.error:
                        raise
                    # A rank was killed while the first loss was being replaced.
                    display.say(f"{loss.error}; another loss came before everything was replaced")
                    recovery = None
                    loss = _Loss(error)
            spans.resume(last_step=job.first_step, cause=recovery.cause)
            display.say(f"{recovery.message}; continuing after step {job.first_step}")

    def _attempt(
        self,
        services: Backend[JobT, Any],
        job: JobT,
        make_recorder: Callable[..., BaseRunRecorder[JobT, Any]],
        spans: SpanWriter,
    ) -> "_Loss | None":
        """Run a job once, unless it ended early before; its last step is saved if the models are still there."""
        if self._has_ended_early(job.first_step):
            self.display.say(f"the run ended early, after step {job.first_step}")
            return None
        with self.metrics_writer(last_step=job.first_step) as writer:
            try:
                recorder = make_recorder(
                    job, self.run, services.learner, writer, spans, self.display
                )
            except RankError as error:
                return _Loss(error)

            async def run() -> None:
                loop = asyncio.get_running_loop()
                task = asyncio.current_task()
                assert task is not None
                with recorder.stop.catch_interrupts(lambda: loop.call_soon_threadsafe(task.cancel)):
                    await services.run(job, recorder)

            try:
                self.run_async(run())
            except RankCodeError as error:
                # Its ranks wait for each other, and would not answer.
                return _Loss(error)
            except BaseException as error:
                with suppress(RankError):
                    recorder.save_last()
                if isinstance(error, asyncio.CancelledError) and recorder.stop.is_early:
                    return None
                # Nothing is recovered after Ctrl-C.
                if isinstance(error, asyncio.CancelledError) or recorder.stop.is_requested:
                    raise KeyboardInterrupt from None
                if not isinstance(error, Exception):
                    raise
                return _Loss(
                    error, recorder.present(), has_progressed=recorder.last_step > job.first_step
                )
        return None

    def _resume_job(self, services: Backend[JobT, Any], job: JobT, present: Present | None) -> JobT:
        """Return the job from where its models are: at the last finished step, or at the last checkpoint."""
        step, controllers = present or (0, None)
        # The ranks alone see what is on their machines.
        may_be_saved = (
            services.config.local_checkpoints.folder or Checkpointer(self.run.checkpoints).steps()
        )
        if present is None and may_be_saved:
            saved = services.learner.load()
            if saved:
                step = saved["step"]
                controllers = saved["controllers"]
        return replace(
            job,
            config=services.config,
            first_step=step,
            is_evaluated=self.is_evaluated(step, job.total_steps),
            controllers=controllers,
            is_policy_behind=True,
        )

    def metrics_writer(self, *, last_step: int) -> MetricsWriter:
        """Return a writer of the run's metrics, of the steps after ``last_step``."""
        has_board = self._config.trainer.tensorboard
        return MetricsWriter(
            self.run, last_step=last_step, tensorboard=has_board, trackers=self._trackers
        )

    def is_evaluation_due(self, step: int, total: int) -> bool:
        """Return whether held-out data are evaluated after ``step`` of ``total``."""
        return step % self._config.trainer.test_freq == 0 or step == total

    def is_evaluated(self, step: int, total: int) -> bool:
        """Return whether the evaluation after ``step`` is recorded already, or not due."""
        is_recorded = step > 0 and any(row["step"] == step for row in self._evaluations())
        return is_recorded or not self.is_evaluation_due(step, total)

    def best_policy(self) -> Path | None:
        """Return the folder of the trained parts that are exported in place of the last ones; None: there is none."""
        step = self._best_step()
        if step is None:
            return None
        self.display.say(f"exporting the policy of step {step}, the best on held-out prompts")
        return self.run.best / "trained"

    def export(self, write: Callable[[Path], object]) -> None:
        """Let ``write`` fill the export's folder, and put it in place in one step.

        Raises:
            UserError: it cannot be written, as on a full disk; the run's checkpoints are kept.
        """
        from safetensors import SafetensorError

        try:
            write_atomically(self.run.export, write)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial_path(self.run.export), ignore_errors=True)
            reason = describe_os_error(error) if isinstance(error, OSError) else one_line(error)
            raise UserError(
                f"all steps are done, but the export {self.run.export} cannot be written: {reason}; with enough space "
                "the same command writes it, from the last checkpoint"
            ) from error

    def finish(self, kinds: Mapping[str, Kind]) -> RunResult:
        """Warn if nothing was learned, and return the run's result; `UserError` if its report cannot be written."""
        run = self.run
        has_signal = check_signal(run, RunWarnings(run, self.display.say))
        try:
            render_report(run.path, kinds)
        except OSError as error:
            raise UserError(
                f"the run is complete, with its export at {run.export}, but its report cannot be written: "
                f"{describe_os_error(error)}; the command report {run.path} writes it"
            ) from error
        evaluations = self._evaluations()
        if not evaluations:
            return RunResult(run=run.path, before={}, after={}, has_signal=has_signal)
        after = exported_evaluation(evaluations, self._best_step())
        return RunResult(run=run.path, before=evaluations[0], after=after, has_signal=has_signal)

    def _best_step(self) -> int | None:
        """Return the step whose policy is exported in place of the last one; None: there is none."""
        trainer = self._config.trainer
        if not isinstance(trainer, RLTrainerConfig) or trainer.export != "best":
            return None
        return best_step(self.run)

    def _has_ended_early(self, last_step: int) -> bool:
        config = self._config
        if not isinstance(config, BaseRLConfig):
            return False
        patience = config.trainer.early_stopping_patience
        return patience > 0 and has_ended(self.run.metrics, patience, last_step=last_step)

    def _evaluations(self) -> list[dict[str, Any]]:
        """Return the metrics of all evaluations on held-out data."""
        return [
            row
            for row in read_jsonl(self.run.metrics)
            if any(name.startswith("val/") for name in row)
        ]


class _Loss(NamedTuple):
    """The end of an attempt before the last step: its error, the step that the models are at, and if it made one."""

    error: Exception
    present: Present | None = None
    has_progressed: bool = False


async def start_inline_backend(
    config: ConfigT,
    *,
    shared: Any,
    judges: Sequence[Any],
    roles: Callable[..., Any],
    start_trainer: Callable[[], SharedTrainerGroup[Any]],
    close: Callable[[], Awaitable[Any]],
) -> InlineBackend[Any, ConfigT, Any]:
    """Start the trainer group of a run whose controllers are in this process and share it; return the run's backend.

    Engines that share devices with the training ranks take turns with them, of which the trainer has the first.

    Args:
        config: of the run.
        shared: roles that all controllers have, with the ``policy``'s engine and the timers of ``devices``.
        judges: engines of judges.
        roles: the class of a controller's roles, with the fields of the shared ones and ``learner``.
        start_trainer: loads the models in training.
        close: ends the services other than the trainer group, also where the models in training do not load.
    """
    sharing = engines_in_turns(config, shared.policy, judges)
    try:
        for engine in sharing:
            await engine.sleep()
        learner = start_trainer()
    except BaseException:
        await close()
        raise
    num_ranks = config.trainer.num_processes
    turns = None
    if sharing:
        turns = DeviceTurns(
            shared.policy,
            sharing[1:],
            sleep_models=learner.sleep,
            wake_models=learner.wake,
            devices=shared.devices,
            ranks=range(num_ranks),
            lending=lending_of(config),
        )
    return InlineBackend(
        config,
        roles=shared,
        world_size=config.controllers,
        learner=learner,
        program=lambda job, recorder: share_trainer(
            learner,
            job.program(recorder),
            roles=roles,
            num_ranks=num_ranks,
            turns=turns,
        ),
        close_services=close,
        turns=turns,
    )
