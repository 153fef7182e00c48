"""The processes of a run's training ranks: their logs, their errors, and the way of their weights to the engines."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gcore_ckpt import CheckpointError
from gcore_controller import TrainerSpec, TrainerWorker
from gcore_runs.errors import UserError
from gcore_runs.logs import log_to, logs_of
from gcore_trainer import TrainerError


def rank_spec(
    make_worker: Callable[[str], TrainerWorker[Any]],
    *,
    num_ranks: int,
    device: str,
    num_threads: int,
    checkpoints: Path,
    preload: Sequence[str] = (),
) -> TrainerSpec:
    """Return how the training ranks of a run are started; see `TrainerSpec` for the arguments.

    Args:
        checkpoints: folder of the run's checkpoints.
    """
    return TrainerSpec(
        make_worker=make_worker,
        num_ranks=num_ranks,
        device=device,
        num_threads=num_threads,
        enter_process=partial(_log, logs_of(checkpoints)),
        put_weights=_put_weights,
        expected_errors=(CheckpointError, TrainerError, UserError),
        preload=preload,
    )


def _log(logs: Path, rank: int) -> None:
    log_to(logs, "trainer", rank, redirect=True)


def _put_weights(weights: Any) -> Any:
    from gcore_rollout import WeightReferences

    return WeightReferences.put(weights)
