"""The frame of every training loop: open the run, resume it, take interruptions, export, report and return."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rich.console import Console

from gcore_ckpt import Checkpointer
from gcore_runs.display import Display
from gcore_runs.errors import UserError, said
from gcore_runs.logs.writing import log_to
from gcore_runs.loop.interrupt import at_once
from gcore_runs.loop.learning_signal import check_signal
from gcore_runs.metrics.writer import MetricsWriter, metrics_server
from gcore_runs.run_folder import Result, RunFolder, open_run, read_jsonl, write_atomically
from gcore_runs.run_warnings import RunWarnings
from gcore_runs.settings.run_config import BaseRunConfig


class Closable(Protocol):
    """Services that were started for a run."""

    async def close(self) -> None: ...


ClosableT = TypeVar("ClosableT", bound=Closable)
T = TypeVar("T")


class Supervisor:
    """Runs one training job from checked settings to its report.

    A command enters it, checks its inputs, opens the run, trains, exports and finishes::

        with Supervisor(config, app="gcore-llm", display=display) as supervisor:
            prompts = load_prompts(config)
            run = supervisor.open_run(f"{len(prompts):,} prompts")
            first_step = supervisor.resume(config.trainer.total_training_steps)
            if first_step is not None:
                ...
                supervisor.export(model.save_pretrained)
            return supervisor.finish(KINDS)

    Inside the block Ctrl-C raises `KeyboardInterrupt` at any time, until a training loop takes it over.

    Args:
        config: the run's settings, resolved; see `resolve`.
        app: distribution whose run it is, such as gcore-llm.
        display: where progress is shown; None: nowhere, but it is logged.

    Attributes:
        display: Where progress is shown.
        run: The run's folder, once it is open.

    Raises:
        UserError: the metrics cannot be served where ``trainer.prometheus_port`` says.
    """

    run: RunFolder

    def __init__(self, config: BaseRunConfig, *, app: str, display: Display | None = None) -> None:
        import torch

        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._app = app
        self._stack = ExitStack()
        self.display = display or Display(Console(quiet=True))

    def __enter__(self) -> Self:
        trainer = self._config.trainer
        server = metrics_server(
            run=self._config.name, port=trainer.prometheus_port, host=trainer.prometheus_host, app=self._app
        )
        with ExitStack() as stack:
            stack.enter_context(at_once())
            self._prometheus = stack.enter_context(server)
            # One event loop for all of it: an async reward may keep objects that belong to the loop of its first call.
            self._runner = stack.enter_context(asyncio.Runner())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, in the event loop of the whole run."""
        return self._runner.run(work)

    @contextmanager
    def started(self, starting: Coroutine[Any, Any, ClosableT]) -> Generator[ClosableT]:
        """Await what starts services, and close them when the block ends in any way."""
        services = self.run_async(starting)
        try:
            yield services
        finally:
            self.run_async(services.close())

    def open_run(self, *notices: str) -> RunFolder:
        """Open the run's folder, and log to it until the end.

        Args:
            notices: lines to show next, about the data.

        Raises:
            UserError: see `gcore_runs.run_folder.open_run`.
        """
        self.run = open_run(self._config)
        self._stack.enter_context(log_to(self.run.logs, "main"))
        for line in (f"run folder: {self.run.path}", *notices):
            self.display.say(line)
        return self.run

    def resume(self, total: int) -> int | None:
        """Return how many of ``total`` steps are done; None: all, and the model is exported.

        The export of a shorter run is removed.
        """
        steps = Checkpointer(self.run.checkpoints).steps()
        first_step = steps[-1] if steps else 0
        if first_step >= total and self.run.export.is_dir():
            self.display.say(
                f"complete: {first_step} of {total} steps are done; a higher trainer.total_training_steps continues it"
            )
            return None
        if first_step:
            self.display.say(f"resuming after step {first_step} of {total}")
        shutil.rmtree(self.run.export, ignore_errors=True)
        return first_step

    def metrics_writer(self, *, last_step: int) -> MetricsWriter:
        """Return a writer of the run's metrics, of the steps after ``last_step``."""
        return MetricsWriter(
            self.run, last_step=last_step, tensorboard=self._config.trainer.tensorboard, prometheus=self._prometheus
        )

    def is_evaluation_due(self, step: int, total: int) -> bool:
        """Return whether held-out data are evaluated after ``step`` of ``total``."""
        return step % self._config.trainer.test_freq == 0 or step == total

    def is_evaluated(self, step: int, total: int) -> bool:
        """Return whether the evaluation after ``step`` is recorded already, or not due."""
        if not self.is_evaluation_due(step, total):
            return True
        return step > 0 and any(row["step"] == step and _is_evaluation(row) for row in read_jsonl(self.run.metrics))

    def export(self, write: Callable[[Path], object]) -> None:
        """Let ``write`` fill the export's folder, and put it in place in one step."""
        write_atomically(self.run.export, write)

    def finish(self, write_report: Callable[[Path], object]) -> Result:
        """Warn if nothing was learned, write the report, and return the run's result.

        Raises:
            UserError: the report cannot be written; everything else is there.
        """
        run = self.run
        has_signal = check_signal(run, RunWarnings(run, self.display))
        try:
            write_report(run.path)
        except OSError as error:
            raise UserError(
                f"the run is complete, with its export at {run.export}, but its report cannot be written: "
                f"{said(error)}; the command report {run.path} writes it"
            ) from error
        evaluations = [row for row in read_jsonl(run.metrics) if _is_evaluation(row)]
        before, after = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
        return Result(run=run.path, before=before, after=after, has_signal=has_signal)


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(name.startswith("val/") for name in row)
