"""A run's metrics and images for Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_runs.errors import UserError, one_line
from gcore_runs.trackers.base import Images, Tracker


class WandB(Tracker):
    """A run of Weights & Biases, or its continuation if one has this ``run_id``; WANDB_MODE=offline keeps it in files.

    The horizontal axis is the metric ``step``, so that steps which a resumed run repeats are shown again.

    Raises:
        UserError: wandb is not installed, or does not start, for example without a login.
    """

    def __init__(self, project: str, *, name: str, run_id: str, folder: Path, config: Mapping[str, Any]) -> None:
        setting = f"trainer.wandb_project is {project!r}"
        try:
            import wandb  # pyright: ignore[reportMissingImports]
            from wandb.errors import Error  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError(f"{setting}, but 'wandb' is not installed: pip install 'gcore-runs[wandb]'") from None
        # What the processes print is in the run's logs.
        settings = wandb.Settings(silent=True, console="off")
        own: dict[str, Any] = {"id": run_id, "name": name, "dir": str(folder), "config": dict(config)}
        try:
            self._run: Any = wandb.init(project=project, resume="allow", settings=settings, **own)
        except Error as error:
            raise UserError(
                f"{setting}, but wandb does not start: {one_line(error)}; expected a login (wandb login, or "
                "WANDB_API_KEY), or WANDB_MODE=offline"
            ) from None
        self._image: Any = wandb.Image
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def write_images(self, step: int, images: Images) -> None:
        self._run.log({"step": step, **{name: self._image(image) for name, image in images.items()}})

    def __exit__(self, kind: object, *error: object) -> None:
        self._run.finish(exit_code=int(kind is not None))
