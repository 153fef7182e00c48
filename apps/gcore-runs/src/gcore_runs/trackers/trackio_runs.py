"""A run's metrics, images and samples for Trackio."""

from collections.abc import Mapping
from typing import Any

from gcore_runs.trackers.base import Images, Rows, TrackedRun, Tracker, as_table, logged_output


class Trackio(Tracker):
    """A run of Trackio, in TRACKIO_DIR, or where TRACKIO_SERVER_URL or TRACKIO_SPACE_ID say.

    Trackio continues a run by its name, so the name ends in the first digits of the run's ID.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name = f"{run.name}-{run.run_id[:6]}"
        with logged_output():
            self._run: Any = trackio.init(
                project=run.project, name=name, resume="allow", config=dict(run.config), embed=False
            )
        self._image: Any = trackio.Image
        self._table: Any = trackio.Table
        self._finish: Any = trackio.finish

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_images(self, step: int, images: Images) -> None:
        self._run.log({name: self._image(image) for name, image in images.items()}, step=step)

    def write_samples(self, step: int, samples: Rows) -> None:
        columns, data = as_table(samples)
        self._run.log({"samples": self._table(columns=columns, data=data)}, step=step)

    def __exit__(self, *error: object) -> None:
        with logged_output():
            self._finish()
