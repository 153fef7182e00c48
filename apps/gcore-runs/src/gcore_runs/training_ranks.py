"""The models in training on one rank, as far as apps have them alike: checkpoints, weights, and the start of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gcore_ckpt import Checkpointer, CheckpointError
from gcore_controller import State, TrainerSpec, TrainerWorker
from gcore_runs.errors import UserError
from gcore_runs.logs import log_to, logs_of
from gcore_runs.settings.run_config import BaseRLConfig
from gcore_trainer import TrainerError

if TYPE_CHECKING:
    from gcore_rollout import DigestedWeights

BatchT = TypeVar("BatchT", bound=Sequence[Any])
ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)


class BaseTrainerWorker(ABC, Generic[BatchT]):
    """A `gcore_controller.TrainerWorker` whose trainers share checkpoints; apps say how models score and learn.

    Args:
        config: the run's.
        checkpoints: folder of the checkpoints.
        trainers: of the models that learn, by role; the policy is the ``actor``.
        others: further roles, with the models whose replicas they have.
        engine_dtype: data type of the engines, as torch names it.
    """

    def __init__(
        self,
        config: BaseRLConfig,
        checkpoints: Path,
        trainers: Mapping[str, Any],
        *,
        others: Mapping[str, Any],
        engine_dtype: str,
    ) -> None:
        self.trainers = trainers
        self._models = {**trainers, **others}
        self._engine_dtype = engine_dtype
        self._checkpointer = Checkpointer(checkpoints, keep=config.trainer.max_ckpt_to_keep)

    @property
    def num_updates(self) -> int:
        return sum(trainer.step for trainer in self.trainers.values())

    @property
    def roles(self) -> Sequence[str]:
        return [*self._models]

    def replica(self, role: str) -> tuple[int, int]:
        model = self._models[role]
        return model.data_parallel_rank, model.data_parallel_size

    @abstractmethod
    def score(self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool) -> list[list[Any]]:
        """See `TrainerWorker.score`."""

    @abstractmethod
    def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """See `TrainerWorker.train_step`."""

    def export_weights(self, *, averaged: bool = False) -> "DigestedWeights":
        """Return the weights of the policy that samples, or their average if the trainer has one."""
        import torch

        from gcore_rollout import DigestedWeights

        options = {"averaged": True} if averaged else {}
        # Some parameters stay in float32 in engines of another type.
        dtypes = [torch.float32, getattr(torch, self._engine_dtype)]
        return DigestedWeights(self.trainers["actor"].export_weights(**options), dtypes=dtypes)

    def save_pretrained(self, path: Path) -> None:
        self.trainers["actor"].save_pretrained(path)

    def save(self, step: int, rest: State) -> None:
        self._checkpointer.save(step, {**rest, **self._states()})

    def load(self) -> State:
        loaded = self._checkpointer.load({"step": None, "controllers": None, **self._states()})
        for role, trainer in self.trainers.items():
            # Tensors were filled where they are.
            numbers = {name: value for name, value in loaded[_key(role)].items() if not isinstance(value, dict)}
            trainer.load_state({**trainer.state(), **numbers})
        return {name: loaded[name] for name in ("step", "controllers")}

    def close(self) -> None:
        self._checkpointer.close()

    def _states(self) -> State:
        return {_key(role): _for_checkpoint(trainer.state()) for role, trainer in self.trainers.items()}


def _key(role: str) -> str:
    """Return the key of a trainer's state in a checkpoint."""
    return "trainer" if role == "actor" else role


def _for_checkpoint(value: Any) -> Any:
    """Return a trainer's state with the shards as gcore-ckpt represents them."""
    from gcore_ckpt import Shard, Shards

    if isinstance(value, dict):
        return {name: _for_checkpoint(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return Shards([Shard(global_shape=p.global_shape, offset=p.offset, tensor=p.tensor) for p in value])
    return value


def rank_spec(
    worker: Callable[[ConfigT, Path, Path], TrainerWorker[Any]],
    config: ConfigT,
    model: Path,
    checkpoints: Path,
    *,
    num_threads: int | None = None,
    preload: Sequence[str] = (),
) -> TrainerSpec:
    """Return how the training ranks of a run are started.

    Args:
        worker: builds the models of a rank; it is given the config, ``model`` and ``checkpoints``.
        config: the run's.
        model: folder to start from.
        checkpoints: folder of the run's checkpoints.
        num_threads: of torch in each rank; None: they share the threads of the run.
        preload: modules that all local ranks need, besides that of ``worker``.
    """
    checkpoints = checkpoints.absolute()
    num_ranks = config.trainer.num_processes
    return TrainerSpec(
        make_worker=partial(_make_worker, worker, config, model.absolute(), checkpoints),
        num_ranks=num_ranks,
        device=config.device,
        num_threads=num_threads or max(1, config.threads // num_ranks),
        enter_process=partial(_log, logs_of(checkpoints)),
        put_weights=_put_weights,
        expected_errors=(CheckpointError, TrainerError, UserError),
        preload=[worker.__module__, *preload],
    )


def _make_worker(
    worker: Callable[[ConfigT, Path, Path], TrainerWorker[Any]],
    config: ConfigT,
    model: Path,
    checkpoints: Path,
    device: str,
) -> TrainerWorker[Any]:
    import torch

    torch.manual_seed(config.seed)
    return worker(replace(config, device=device), model, checkpoints)


def _log(logs: Path, rank: int) -> None:
    log_to(logs, "trainer", rank, redirect=True)


def _put_weights(weights: Any) -> Any:
    from gcore_rollout import WeightReferences

    return WeightReferences.put(weights)
