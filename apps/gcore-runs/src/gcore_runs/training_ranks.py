"""The models in training on one rank, as far as apps have them alike: checkpoints, weights, and the start of ranks."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from gcore_ckpt import Checkpointer, CheckpointError, Shard, Shards
from gcore_controller import State, TrainerSpec
from gcore_runs.engines import allocator_variables
from gcore_runs.errors import UserError
from gcore_runs.logs import log_to, logs_of
from gcore_runs.run_folder import run_id
from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig
from gcore_trainer import LoRAWeights, TrainerError

if TYPE_CHECKING:
    from gcore_ckpt import TieredCheckpointer
    from gcore_rollout import DigestedWeights

BatchT = TypeVar("BatchT", bound=Sequence[Any])


class BaseTrainerWorker(ABC, Generic[BatchT]):
    """A `gcore_controller.TrainerWorker` whose trainers share checkpoints; apps say how models score and learn.

    It is made from the run's config, the folder of the model to start from, and that of the checkpoints.

    Example:
        >>> class LMWorker(BaseTrainerWorker[list[Any]]):
        ...     engine_dtype = "float32"
        ...
        ...     def score(self, role, micro_batches, *, with_routing):
        ...         return self.trainers[role].score(micro_batches)
        >>> spec = LMWorker.spec(BaseRunConfig(threads=4), Path("model"), Path("checkpoints"))
        >>> spec.num_ranks, spec.num_threads
        (1, 4)
    """

    trainers: Mapping[str, Any]
    """Trainers of the models that learn, by role; the policy is the ``actor``."""
    engine_dtype: str
    """Data type of the engines, as torch names it."""
    rest: ClassVar[tuple[str, ...]] = ("step", "controllers")
    """Keys of a checkpoint besides those of the models."""
    exports_adapters: bool = False
    """Whether the policy's adapters are exported, and not the model with the adapters merged into it."""
    is_one_at_a_time: bool = False
    """Whether the device has one model at a time: the one that is in use."""
    _is_asleep: bool = False
    _is_complete: bool = False
    """Whether the last step of the run is saved."""

    def __init__(self, config: BaseRunConfig, model: Path, checkpoints: Path) -> None:
        del model
        self._tiers = _tiers(config, checkpoints)
        self._checkpointer = self._tiers or Checkpointer(
            checkpoints, keep=config.trainer.max_ckpt_to_keep
        )
        self._last_step = config.trainer.total_training_steps

    @property
    def num_updates(self) -> int:
        return sum(trainer.step for trainer in self.trainers.values())

    @property
    def models(self) -> Mapping[str, Any]:
        """The models by role; each knows the replica that this rank belongs to."""
        return self.trainers

    @property
    def roles(self) -> Sequence[str]:
        return [*self.models]

    def replica(self, role: str) -> tuple[int, int]:
        return self.models[role].data_parallel_rank, self.models[role].data_parallel_size

    @abstractmethod
    def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool
    ) -> list[list[Any]]:
        """See `TrainerWorker.score`."""

    def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        return self.trainers[role].train_step(micro_batches)

    def export_weights(self, *, averaged: bool = False) -> "DigestedWeights":
        import torch

        from gcore_rollout import DigestedWeights, divide_weights

        self._wake_policy()
        options = {"averaged": True} if averaged else {}
        weights = self.trainers["actor"].export_weights(**options)
        divided = iter
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            num_ranks = torch.distributed.get_world_size()
            divided = partial(
                divide_weights, rank=torch.distributed.get_rank(), num_ranks=num_ranks
            )
        # Some parameters stay in float32 in engines of another type.
        dtypes = [torch.float32, getattr(torch, self.engine_dtype)]
        if not isinstance(weights, LoRAWeights):
            return DigestedWeights(divided(weights), dtypes=dtypes)
        from gcore_rollout import UnmergedWeights

        unmerged = UnmergedWeights(
            frozen=lambda: divided(weights.frozen()),
            adapters=lambda: divided(weights.adapters().items()),
            scaling=weights.config.scaling,
        )
        return DigestedWeights(divided(weights), dtypes=dtypes, unmerged=unmerged)

    def save_pretrained(self, path: Path) -> None:
        self._wake_policy()
        if self.exports_adapters:
            self.trainers["actor"].save_adapters(path)
        else:
            self.trainers["actor"].save_pretrained(path)

    def save(self, step: int, rest: State) -> None:
        state = {**rest, **self._states()}
        self._is_complete = step == self._last_step
        if self._tiers is None:
            self._checkpointer.save(step, state)
        else:
            self._tiers.save(step, state, to_all=self._is_complete)

    def load(self) -> State:
        self.wake()
        if not self._checkpointer.steps():
            return {}
        states = {role: trainer.state() for role, trainer in self.trainers.items()}
        template = {_key(role): _for_checkpoint(state) for role, state in states.items()}
        loaded = self._checkpointer.load({**dict.fromkeys(self.rest), **template})
        for role, trainer in self.trainers.items():
            self.use(role)
            # Tensors were filled where they are.
            numbers = {
                name: value
                for name, value in loaded[_key(role)].items()
                if not isinstance(value, dict)
            }
            trainer.load_state({**states[role], **numbers})
        return {name: loaded[name] for name in self.rest}

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the device's memory of all models until `wake`; with ``keep_weights`` of all but the policy's weights.

        The policy's weights also wake when they are exported or saved in a folder.
        """
        # First: an interrupt may leave some of them awake.
        self._is_asleep = True
        for role, model in self.models.items():
            if keep_weights and role == "actor":
                model.sleep(keep_weights=True)
            else:
                model.sleep()

    def wake(self) -> None:
        """Undo `sleep`; of models that are on the device one at a time, each wakes when it is used."""
        if self._is_asleep and not self.is_one_at_a_time:
            for model in self.models.values():
                model.wake()
        self._is_asleep = False

    def _wake_policy(self) -> None:
        """Wake the policy's weights, and no other model."""
        if self.is_one_at_a_time:
            self.wake()
            self.use("actor")
        else:
            self.models["actor"].wake()

    def use(self, role: str) -> None:
        """Let the device have the model of a role alone, if it has one at a time."""
        if self.is_one_at_a_time:
            if self._is_asleep:
                raise TrainerError(
                    "the models are asleep; expected a call of wake() before they compute"
                )
            for model_role, model in self.models.items():
                if model_role != role:
                    model.sleep()
            if role in self.models:
                self.models[role].wake()

    def close(self) -> None:
        self._checkpointer.close()
        if self._tiers is not None and self._is_complete:
            self._tiers.delete_local()

    def _states(self) -> State:
        return {
            _key(role): _for_checkpoint(trainer.state()) for role, trainer in self.trainers.items()
        }

    @classmethod
    def _on_device(cls, config: Any, model: Path, checkpoints: Path, device: str) -> Self:
        import torch

        torch.manual_seed(config.seed)
        return cls(replace(config, device=device), model, checkpoints)

    @classmethod
    def spec(
        cls,
        config: BaseRunConfig,
        model: Path,
        checkpoints: Path,
        *,
        preload: Sequence[str] = (),
    ) -> TrainerSpec:
        """Return how the training ranks of a run are started; local ranks also need the modules of ``preload``."""
        checkpoints = checkpoints.absolute()
        put_weights = _put_weights
        if isinstance(config, BaseRLConfig):
            is_direct = config.reads_from_ranks and find_spec("nixl") is not None
            put_weights = partial(_put_weights, is_direct=is_direct)
            if config.ray.weight_sync == "delta":
                put_weights = _put_deltas()
        return TrainerSpec(
            make_worker=partial(cls._on_device, config, model.absolute(), checkpoints),
            num_ranks=config.trainer.num_processes,
            device=config.device,
            num_threads=config.threads,
            enter_process=partial(_enter_rank, config, logs_of(checkpoints)),
            put_weights=put_weights,
            write_weights=_write_weights,
            open_memory=_open_memory,
            expected_errors=(CheckpointError, TrainerError, UserError),
            heartbeat_timeout_s=config.trainer.heartbeat_timeout_s,
            preload=[cls.__module__, *preload],
        )


def _tiers(config: BaseRunConfig, checkpoints: Path) -> "TieredCheckpointer | None":
    """Return what saves to the folders of the machines and, less often, to that of the run; None: not asked for."""
    if not isinstance(config, BaseRLConfig) or not config.local_checkpoints.folder:
        return None
    from gcore_ckpt import Tier, TieredCheckpointer

    setting = config.local_checkpoints.folder
    folder = Path(os.path.expandvars(setting)).absolute()
    if "$" in str(folder):
        raise UserError(
            f"local_checkpoints.folder is {setting!r}, in which this rank's environment leaves {str(folder)!r}; "
            "expected variables that are set on every machine"
        )
    # Of this run alone: another one of the same name may have been there.
    folder /= f"{config.name}-{run_id(checkpoints.parent)}"
    tiers = [
        Tier(folder, every=1, keep=2, replicas=1),
        Tier(checkpoints, every=config.trainer.save_freq, keep=config.trainer.max_ckpt_to_keep),
    ]
    return TieredCheckpointer(tiers, machine=f"{socket.gethostname()}:{folder}")


def _key(role: str) -> str:
    """Return the key of a trainer's state in a checkpoint."""
    return "trainer" if role == "actor" else role


def _for_checkpoint(value: Any) -> Any:
    """Return a trainer's state with the shards as gcore-ckpt represents them."""
    if isinstance(value, dict):
        return {name: _for_checkpoint(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return Shards(
            [Shard(global_shape=p.global_shape, offset=p.offset, tensor=p.tensor) for p in value]
        )
    return value


def _enter_rank(config: BaseRunConfig, logs: Path, rank: int) -> None:
    log_to(logs, "trainer", rank, redirect=True)
    # A rank on Ray has an environment of its own.
    os.environ.update(allocator_variables(config))
    if config.device.startswith("cuda"):
        from gcore_runs.loop.cpu_binding import bind_to_gpus

        bind_to_gpus(rank)


def _put_weights(
    weights: Any, *, version: int, base_version: int | None, is_direct: bool = False
) -> Any:
    from gcore_rollout import WeightReferences

    del version, base_version  # all of them, whatever was sent before
    return WeightReferences.put(weights, is_direct=is_direct)


def _put_deltas() -> Any:
    from gcore_rollout import DeltaSender

    # Each rank gets one of its own.
    return DeltaSender().put


def _write_weights(weights: Any, path: Path) -> Any:
    from gcore_rollout import write_part

    return write_part(weights, path)


def _open_memory() -> Any:
    from gcore_rollout import SharedWeights

    return SharedWeights()
