"""A run's metrics, images and samples for Weights & Biases, Trackio and SwanLab, whose clients are alike."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from gcore_runs.trackers.base import (
    Images,
    Rows,
    TrackedRun,
    Tracker,
    as_table,
    as_text,
    logged_output,
)

ErrorType: TypeAlias = type[BaseException] | None


class LoggedRun(Tracker):
    """A run of a library that logs values of any kind by name.

    Args:
        log: takes a step, and values by name.
        image: makes a value of an image.
        samples: makes a value of samples.
        finish: ends the run, with the type of the error that ended it and the error.
    """

    def __init__(
        self,
        *,
        log: Callable[[int, Mapping[str, Any]], object],
        image: Callable[[Any], Any],
        samples: Callable[[Rows], Any],
        finish: Callable[[ErrorType, object], object],
    ) -> None:
        self._log = log
        self._image = image
        self._samples = samples
        self._finish = finish

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, metrics)

    def write_images(self, step: int, images: Images) -> None:
        self._log(step, {name: self._image(image) for name, image in images.items()})

    def write_samples(self, step: int, samples: Rows) -> None:
        self._log(step, {"samples": self._samples(samples)})

    def __exit__(self, error_type: ErrorType, error: object, *traceback: object) -> None:
        self._finish(error_type, error)


def start_wandb(run: TrackedRun) -> Tracker:
    """Return a run of Weights & Biases, or its continuation if one has its ID; WANDB_MODE=offline keeps it in files.

    The horizontal axis is the metric ``step``: what belongs to one step may come in several calls.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    tracked: Any = wandb.init(
        project=run.project,
        resume="allow",
        # What the processes print is in the run's logs.
        settings=wandb.Settings(silent=True, console="off"),
        id=run.run_id,
        name=run.name,
        dir=str(run.folder),
        config=dict(run.config),
    )
    make_table: Any = wandb.Table
    tracked.define_metric("step")
    tracked.define_metric("*", step_metric="step")
    return LoggedRun(
        log=lambda step, values: tracked.log({"step": step, **values}),
        image=wandb.Image,
        samples=lambda samples: _make_table(make_table, samples),
        finish=lambda error_type, _: tracked.finish(exit_code=int(error_type is not None)),
    )


def start_trackio(run: TrackedRun) -> Tracker:
    """Return a run of Trackio, in TRACKIO_DIR, or where TRACKIO_SERVER_URL or TRACKIO_SPACE_ID say.

    Trackio continues a run by its name, so the name ends in the first digits of the run's ID.
    """
    import trackio  # pyright: ignore[reportMissingImports]

    name = f"{run.name}-{run.run_id[:6]}"
    with logged_output():
        tracked: Any = trackio.init(
            project=run.project, name=name, resume="allow", config=dict(run.config), embed=False
        )
    make_table: Any = trackio.Table
    finish: Any = trackio.finish

    def finish_quietly(error_type: ErrorType, error: object) -> None:
        del error_type, error
        with logged_output():
            finish()

    return LoggedRun(
        log=lambda step, values: tracked.log(dict(values), step=step),
        image=trackio.Image,
        samples=lambda samples: _make_table(make_table, samples),
        finish=finish_quietly,
    )


def start_swanlab(run: TrackedRun) -> Tracker:
    """Return a run of SwanLab, or its continuation if one has its ID; SWANLAB_MODE=offline keeps it in files."""
    import swanlab  # pyright: ignore[reportMissingImports]

    # What the processes print is in the run's logs, and a run cannot be asked questions.
    settings_type: Any = swanlab.Settings
    settings = settings_type(interactive=False, terminal=settings_type.Terminal(proxy_type="none"))
    with logged_output():
        tracked: Any = swanlab.init(
            project=run.project,
            name=run.name,
            resume="allow",
            settings=settings,
            id=run.run_id,
            config=dict(run.config),
            log_dir=str(run.folder / "swanlog"),
        )
    make_text: Any = swanlab.Text

    def finish(error_type: ErrorType, error: object) -> None:
        with logged_output():
            if error_type is None:
                tracked.finish(state="success")
            elif issubclass(error_type, KeyboardInterrupt):
                tracked.finish(state="aborted")
            else:
                tracked.finish(state="crashed", error=f"{error_type.__name__}: {error}")

    return LoggedRun(
        log=lambda step, values: tracked.log(dict(values), step=step),
        image=swanlab.Image,
        samples=lambda samples: [make_text(as_text(sample)) for sample in samples],
        finish=finish,
    )


def _make_table(make_table: Any, samples: Rows) -> Any:
    columns, data = as_table(samples)
    return make_table(columns=columns, data=data)
