"""Writer of a run's metrics: to metrics.jsonl, and to TensorBoard and Prometheus if the settings say so."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gcore_runs.run_folder import RunFolder, append_json, read_jsonl, write_jsonl

if TYPE_CHECKING:
    from gcore_runs.metrics.prometheus import PrometheusExporter


def metrics_server(*, run: str, port: int, host: str, app: str) -> "AbstractContextManager[PrometheusExporter | None]":
    """Return a context that serves a run's metrics for Prometheus; an empty one if ``port`` is 0.

    Raises:
        UserError: they cannot be served at that address.
    """
    if not port:
        return nullcontext()
    from gcore_runs.metrics.prometheus import PrometheusExporter

    return PrometheusExporter(run=run, port=port, host=host, app=app)


class MetricsWriter:
    """Appends a row for each step after ``last_step``; rows of later steps, which are run again, are removed."""

    def __init__(
        self, run: RunFolder, *, last_step: int, tensorboard: bool, prometheus: "PrometheusExporter | None" = None
    ) -> None:
        self._path = run.metrics
        rows = [row for row in read_jsonl(run.metrics) if row["step"] <= last_step] if last_step else []
        write_jsonl(run.metrics, rows)
        self._prometheus = prometheus
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run.tensorboard), purge_step=last_step + 1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        append_json(self._path, {"step": step, **metrics})
        if self._prometheus is not None:
            self._prometheus.update(step, metrics)
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._board.close()
