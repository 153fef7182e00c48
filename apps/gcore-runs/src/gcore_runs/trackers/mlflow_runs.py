"""A run's metrics, images and samples for MLflow."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_runs.settings.checks import flatten
from gcore_runs.trackers.base import Images, Rows, TrackedRun, Tracker, as_table

_TAG = "gcore.run_id"
_MAX_VALUES = 100
"""Most metrics or parameters of one request."""
_MAX_PARAM_CHARS = 500


class MLflow(Tracker):
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment that is the project; or its continuation.

    Names have ``_at_`` in place of ``@``, and ``_`` in place of other characters that MLflow does not take.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient()
        self._metric: Any = Metric
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        earlier = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run.run_id}'")
        if earlier:
            self._run_id: str = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        created = self._client.create_run(experiment_id, run_name=run.name, tags={_TAG: run.run_id})
        self._run_id = created.info.run_id
        params: list[Any] = []
        for name, value in flatten(run.config).items():
            # MLflow has no tables without entries.
            if value != {}:
                params.append(Param(_name(name), str(value)[:_MAX_PARAM_CHARS]))
        for batch in _batches(params):
            self._client.log_batch(self._run_id, params=batch)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [
            self._metric(_name(name), float(value), now_ms, step) for name, value in metrics.items()
        ]
        for batch in _batches(values):
            self._client.log_batch(self._run_id, metrics=batch)

    def write_images(self, step: int, images: Images) -> None:
        for name, image in images.items():
            self._client.log_image(self._run_id, image, key=_name(name), step=step)

    def write_samples(self, step: int, samples: Rows) -> None:
        columns, data = as_table(samples)
        self._client.log_dict(
            self._run_id, {"columns": columns, "data": data}, f"samples/step-{step:06}.json"
        )

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        status = "FINISHED"
        if error_type is not None:
            status = "KILLED" if issubclass(error_type, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(self._run_id, status=status)


def _batches(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[start : start + _MAX_VALUES] for start in range(0, len(values), _MAX_VALUES)]


def _name(name: str) -> str:
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))
