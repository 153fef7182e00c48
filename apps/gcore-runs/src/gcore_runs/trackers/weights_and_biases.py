"""A run's metrics, images and samples for Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from gcore_runs.trackers.base import Images, Rows, TrackedRun, Tracker, as_table


class WandB(Tracker):
    """A run of Weights & Biases, or its continuation if one has its ID; WANDB_MODE=offline keeps it in files.

    The horizontal axis is the metric ``step``: what belongs to one step may come in several calls.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project=run.project,
            resume="allow",
            # What the processes print is in the run's logs.
            settings=wandb.Settings(silent=True, console="off"),
            id=run.run_id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
        )
        self._image: Any = wandb.Image
        self._table: Any = wandb.Table
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def write_images(self, step: int, images: Images) -> None:
        self._run.log(
            {"step": step, **{name: self._image(image) for name, image in images.items()}}
        )

    def write_samples(self, step: int, samples: Rows) -> None:
        columns, data = as_table(samples)
        self._run.log({"step": step, "samples": self._table(columns=columns, data=data)})

    def __exit__(self, error_type: object, *error: object) -> None:
        self._run.finish(exit_code=int(error_type is not None))
