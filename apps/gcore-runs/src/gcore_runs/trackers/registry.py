"""The trackers that a run can name in trainer.trackers."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from gcore_runs.errors import UserError
from gcore_runs.logs import one_line
from gcore_runs.trackers.background import Background
from gcore_runs.trackers.base import TrackedRun, Tracker


class _Adapter(NamedTuple):
    library: str
    """Module that has to be there; the extra that installs it has the tracker's name."""
    module: str
    """Module of this folder."""
    class_name: str
    """Class in it, made from a `TrackedRun`."""
    needs: str
    """Advice for a start that fails."""


_ADAPTERS = {
    "wandb": _Adapter(
        "wandb",
        "weights_and_biases",
        "WandB",
        "a login (wandb login, or WANDB_API_KEY), or WANDB_MODE=offline",
    ),
    "trackio": _Adapter(
        "trackio", "trackio_runs", "Trackio", "a folder TRACKIO_DIR that can be written"
    ),
    "mlflow": _Adapter(
        "mlflow",
        "mlflow_runs",
        "MLflow",
        "MLFLOW_TRACKING_URI of a server, or the package mlflow for a database",
    ),
    "swanlab": _Adapter(
        "swanlab",
        "swanlab_runs",
        "SwanLab",
        "a login (swanlab login, or SWANLAB_API_KEY), or SWANLAB_MODE=offline",
    ),
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise `UserError` if a tracker's library is not installed."""
    for name in names:
        if find_spec(_ADAPTERS[name].library) is None:
            raise UserError(
                f"trainer.trackers has {name!r}; expected its library to be installed: pip install 'gcore-runs[{name}]'"
            )


def start_tracker(name: str, run: TrackedRun, say: Callable[[str], None]) -> Tracker:
    """Return the tracker of this name, with the run started or continued; `UserError` if it does not start.

    Its later errors are shown by ``say``, once, and end nothing.
    """
    adapter = _ADAPTERS[name]
    try:
        tracker: Tracker = getattr(
            import_module(f"gcore_runs.trackers.{adapter.module}"), adapter.class_name
        )(run)
    except Exception as error:
        raise UserError(
            f"trainer.trackers has {name!r}, which does not start: {one_line(error) or type(error).__name__}; "
            f"expected {adapter.needs}"
        ) from error
    return Background(tracker, name=name, say=say)
