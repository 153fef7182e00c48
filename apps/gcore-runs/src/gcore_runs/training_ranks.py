"""The start of a run's training ranks: their logs, their errors, and the way of their weights to the engines."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_ckpt import CheckpointError
from gcore_controller import TrainerSpec, TrainerWorker
from gcore_runs.errors import UserError
from gcore_runs.logs import log_to, logs_of
from gcore_trainer import TrainerError


def rank_spec(make_worker: Callable[[str], TrainerWorker[Any]], *, checkpoints: Path, **options: Any) -> TrainerSpec:
    """Return how the training ranks of a run are started.

    Args:
        make_worker: builds the models of a rank on a device.
        checkpoints: folder of the run's checkpoints.
        options: the other fields of `TrainerSpec`.
    """
    return TrainerSpec(
        make_worker=make_worker,
        enter_process=partial(_log, logs_of(checkpoints)),
        put_weights=_put_weights,
        expected_errors=(CheckpointError, TrainerError, UserError),
        **options,
    )


def _log(logs: Path, rank: int) -> None:
    log_to(logs, "trainer", rank, redirect=True)


def _put_weights(weights: Any) -> Any:
    from gcore_rollout import WeightReferences

    return WeightReferences.put(weights)
