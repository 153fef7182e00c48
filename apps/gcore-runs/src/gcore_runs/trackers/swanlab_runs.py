"""A run's metrics, images and samples for SwanLab."""

from collections.abc import Mapping
from typing import Any

from gcore_runs.trackers.base import Images, Rows, TrackedRun, Tracker, as_text, logged_output


class SwanLab(Tracker):
    """A run of SwanLab, or its continuation if one has its ID; SWANLAB_MODE=offline keeps it in files."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        # What the processes print is in the run's logs, and a run cannot be asked questions.
        settings_type: Any = swanlab.Settings
        settings = settings_type(
            interactive=False, terminal=settings_type.Terminal(proxy_type="none")
        )
        with logged_output():
            self._run: Any = swanlab.init(
                project=run.project,
                name=run.name,
                resume="allow",
                settings=settings,
                id=run.run_id,
                config=dict(run.config),
                log_dir=str(run.folder / "swanlog"),
            )
        self._image: Any = swanlab.Image
        self._text: Any = swanlab.Text

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_images(self, step: int, images: Images) -> None:
        self._run.log({name: self._image(image) for name, image in images.items()}, step=step)

    def write_samples(self, step: int, samples: Rows) -> None:
        self._run.log({"samples": [self._text(as_text(sample)) for sample in samples]}, step=step)

    def __exit__(
        self, error_type: type[BaseException] | None, error: object, *traceback: object
    ) -> None:
        with logged_output():
            if error_type is None:
                self._run.finish(state="success")
            elif issubclass(error_type, KeyboardInterrupt):
                self._run.finish(state="aborted")
            else:
                self._run.finish(state="crashed", error=f"{error_type.__name__}: {error}")
