"""The trackers that a run can name, each next to the training, which neither waits for them nor ends with them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread

from gcore_runs.errors import UserError
from gcore_runs.logs import one_line
from gcore_runs.trackers.base import Images, Rows, TrackedRun, Tracker
from gcore_runs.trackers.logged_runs import start_swanlab, start_trackio, start_wandb
from gcore_runs.trackers.mlflow_runs import MLflow

_CLOSE_S = 600.0
"""Seconds that the end of a run waits for what its tracker has not taken yet."""
_CLOSE_FAILED_S = 30.0
"""The same after the tracker has failed once."""

_logger = logging.getLogger(__name__)


class Background(Tracker):
    """Calls a tracker in a thread of its own, in order; its first error is said, and each one is logged.

    Args:
        tracker: the tracker; closed with this object.
        name: its name in messages.
        say: shows a line on the screen, from any thread.
    """

    def __init__(self, tracker: Tracker, *, name: str, say: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._name = name
        self._say = say
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._has_failed = False
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._calls.put(partial(self._tracker.write, step, dict(metrics)))

    def write_images(self, step: int, images: Images) -> None:
        self._calls.put(partial(self._tracker.write_images, step, images))

    def write_samples(self, step: int, samples: Rows) -> None:
        self._calls.put(partial(self._tracker.write_samples, step, samples))

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            self._try(call)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            _logger.warning("%s failed", self._name, exc_info=True)
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"warning: {self._name} failed, and the run continues without what it refuses: "
                    f"{one_line(error) or type(error).__name__}; metrics.jsonl has everything"
                )

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)
        limit_s = _CLOSE_FAILED_S if self._has_failed else _CLOSE_S
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._say(
                f"warning: {self._name} has not taken everything in {limit_s:g} s; metrics.jsonl has it"
            )
        else:
            # Where it was started: some libraries restore the handlers of signals.
            self._try(partial(self._tracker.__exit__, *error))


_TRACKERS: dict[str, tuple[Callable[[TrackedRun], Tracker], str]] = {
    "wandb": (start_wandb, "a login (wandb login, or WANDB_API_KEY), or WANDB_MODE=offline"),
    "trackio": (start_trackio, "a folder TRACKIO_DIR that can be written"),
    "mlflow": (MLflow, "MLFLOW_TRACKING_URI of a server, or the package mlflow for a database"),
    "swanlab": (
        start_swanlab,
        "a login (swanlab login, or SWANLAB_API_KEY), or SWANLAB_MODE=offline",
    ),
}
"""For each library what starts its run, and advice for a start that fails; its extra has the same name."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise `UserError` if a tracker's library is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"trainer.trackers has {name!r}; expected its library to be installed: pip install 'gcore-runs[{name}]'"
            )


def start_tracker(name: str, run: TrackedRun, say: Callable[[str], None]) -> Tracker:
    """Return the tracker of this name, with the run started or continued; `UserError` if it does not start.

    Its later errors are shown by ``say``, once, and end nothing.
    """
    start, needs = _TRACKERS[name]
    try:
        tracker = start(run)
    except Exception as error:
        raise UserError(
            f"trainer.trackers has {name!r}, which does not start: {one_line(error) or type(error).__name__}; "
            f"expected {needs}"
        ) from error
    return Background(tracker, name=name, say=say)
