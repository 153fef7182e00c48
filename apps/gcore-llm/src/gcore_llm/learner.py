"""The models in training: the policy, and the critic and reference where the algorithm has them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gcore_ckpt import Checkpointer
from gcore_llm.config import TrainConfig
from gcore_llm.performance import memory
from gcore_runs.errors import UserError
from gcore_runs.services import SavedLearner
from gcore_trainer import LoRAConfig, MicroBatch, OptimizerConfig

if TYPE_CHECKING:
    import torch

    from gcore_rollout import DigestedWeights
    from gcore_trainer import FrozenModel, Objective, TorchParallel, Trainer

Role = Literal["actor", "critic", "reference"]
State = dict[str, Any]


class ComputingLearner(Protocol):
    """What the models in training compute.

    Of the calls, several may be made at once: one runs after the other.
    """

    @property
    def num_replicas(self) -> int:
        """A number of micro-batches that this divides loads the policy's data-parallel replicas evenly."""
        ...

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities under the actor or reference, or the critic's values, [R] of each sample."""
        ...

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """The actor's log-probabilities [R] of each sample, and the experts that its tokens passed through."""
        ...

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One update of the actor or the critic; its metrics."""
        ...


class Learner(ComputingLearner, SavedLearner, Protocol):
    """The models in training, in this process or behind it."""

    def export_weights(self) -> Iterable[tuple[str, "torch.Tensor"]]:
        """The policy's weights, one at a time and once; with digests, if they are to be compared with an engine's."""
        ...


def has_critic(config: TrainConfig) -> bool:
    """Whether the algorithm needs one."""
    return config.algorithm.estimator.needs_critic


def has_reference(config: TrainConfig) -> bool:
    """Whether the algorithm needs the initial policy."""
    return bool(config.actor.loss.kl_loss_coef or config.algorithm.kl_ctrl.kl_coef)


def needs_old_log_probs(config: TrainConfig) -> bool:
    """Whether the trainer's own log-probs are used beside the ratio: by a correction, or by the KL in the reward."""
    return config.algorithm.rollout_correction.is_active or bool(config.algorithm.kl_ctrl.kl_coef)


class LocalLearner:
    """The models in this process: all of them, or, where torch.distributed runs, this rank's part.

    All ranks make the same calls, with the micro-batches of their replicas.
    """

    def __init__(self, config: TrainConfig, model: Path, checkpoints: Path) -> None:
        parallel = _join(config) if config.trainer.num_processes > 1 or config.trainer.backend == "megatron" else None
        self._trainers: dict[Role, Trainer] = {"actor": _build_actor(config, model, parallel)}
        if has_critic(config):
            critic = Path(config.critic.model) if config.critic.model else model
            self._trainers["critic"] = _build_critic(config, critic, parallel)
        if config.actor.router_replay != "disabled" and not self._trainers["actor"].num_routers:
            raise UserError(
                f"actor.router_replay is {config.actor.router_replay!r}: the model in {model} has no routers, "
                "'disabled' is needed"
            )
        self._reference = _build_reference(config, model, parallel) if has_reference(config) else None
        self._device = config.device
        self._dtype = config.dtype
        self._checkpointer = Checkpointer(checkpoints, keep=config.trainer.max_ckpt_to_keep)

    @property
    def num_updates(self) -> int:
        return sum(trainer.step for trainer in self._trainers.values())

    @property
    def num_replicas(self) -> int:
        return self.replicas("actor")[1]

    @property
    def roles(self) -> list[Role]:
        """The models there are."""
        return [*self._trainers, *(["reference"] if self._reference else [])]

    def replicas(self, role: Role) -> tuple[int, int]:
        """This rank's data-parallel rank in a role, and how many there are."""
        model = self._model(role)
        return model.data_parallel_rank, model.data_parallel_size

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        if role == "reference":
            assert self._reference is not None
            return self._reference.scores(micro_batches)
        trainer = self._trainers[role]
        return trainer.log_probs(micro_batches) if role == "actor" else trainer.values(micro_batches)

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        return self._trainers["actor"].log_probs_and_routing(micro_batches)

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        metrics = self._trainers[role].train_step(micro_batches)
        if role == "critic":
            metrics = {name.replace("actor/", "critic/"): value for name, value in metrics.items()}
        return metrics | memory(self._device)

    def export_weights(self) -> "DigestedWeights":
        import torch

        from gcore_rollout import DigestedWeights

        # Some parameters stay in float32 in engines of another type.
        dtypes = [torch.float32, getattr(torch, self._dtype)]
        return DigestedWeights(self._trainers["actor"].export_weights(), dtypes=dtypes)

    def save_pretrained(self, path: Path) -> None:
        self._trainers["actor"].save_pretrained(path)

    def save(self, step: int, rest: State) -> None:
        self._checkpointer.save(step, {**rest, **self._states()})

    def load(self) -> State:
        template = self._states()
        loaded = self._checkpointer.load({"step": None, "controllers": None, **template})
        for role, trainer in self._trainers.items():
            # Tensors were filled where they are.
            trainer.load_state({**trainer.state(), **_numbers(loaded[_KEYS[role]])})
        return {name: loaded[name] for name in ("step", "controllers")}

    def close(self) -> None:
        self._checkpointer.close()

    def _states(self) -> State:
        return {_KEYS[role]: _for_checkpoint(trainer.state()) for role, trainer in self._trainers.items()}

    def _model(self, role: Role) -> "Trainer | FrozenModel":
        if role == "reference":
            assert self._reference is not None
            return self._reference
        return self._trainers[role]


_KEYS: dict[Role, str] = {"actor": "trainer", "critic": "critic"}
"""Where a checkpoint has each trainer's state."""


def _for_checkpoint(state: State) -> State:
    """A trainer's state in gcore-ckpt's words."""
    from gcore_ckpt import Shard, Shards

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return Shards([Shard(global_shape=p.global_shape, offset=p.offset, tensor=p.tensor) for p in value])
        return value

    return convert(state)


def _numbers(state: State) -> State:
    return {name: value for name, value in state.items() if not isinstance(value, dict)}


def _join(config: TrainConfig) -> "TorchParallel | None":
    from gcore_trainer import TorchParallel

    parallel = config.trainer.parallel
    if config.trainer.backend == "megatron":
        # What runs beside Megatron, the reference, is sharded over all ranks.
        parallel = type(parallel)()
    return TorchParallel.join(parallel, device_type=config.device.split(":")[0])


def _model_options(config: TrainConfig) -> dict[str, Any]:
    import torch

    return {
        "device": config.device,
        "compute_dtype": getattr(torch, config.dtype),
        "gradient_checkpointing": config.actor.enable_gradient_checkpointing,
        "max_length": config.data.max_length,
    }


def _scheduled(optimizer: OptimizerConfig, config: TrainConfig) -> OptimizerConfig:
    """With the number of updates of the whole run, where it is not given."""
    if optimizer.total_training_steps:
        return optimizer
    batch, actor = config.data.train_batch_size, config.actor
    updates = -(-batch // (actor.ppo_mini_batch_size or batch)) * actor.ppo_epochs
    return replace(optimizer, total_training_steps=config.trainer.total_training_steps * updates)


def _build_actor(config: TrainConfig, model: Path, parallel: "TorchParallel | None") -> "Trainer":
    from gcore_trainer import PolicyObjective

    longest = config.actor.loss.max_response_length or config.data.max_response_length
    objective = PolicyObjective(replace(config.actor.loss, max_response_length=longest))
    if config.trainer.backend == "megatron":
        optimizer = _scheduled(config.actor.optim, config)
        return _build_megatron(config, model, optimizer, objective, lora=config.actor.lora)
    from gcore_trainer import PackedModel, TorchTrainer

    packed = PackedModel.from_pretrained(
        model, temperature=config.rollout.temperature, lora=config.actor.lora, **_model_options(config)
    )
    return TorchTrainer(
        packed, optimizer=_scheduled(config.actor.optim, config), objective=objective, parallel=parallel
    )


def _build_critic(config: TrainConfig, model: Path, parallel: "TorchParallel | None") -> "Trainer":
    from gcore_trainer import ValueObjective

    longest = config.critic.loss.max_response_length or config.data.max_response_length
    objective = ValueObjective(replace(config.critic.loss, max_response_length=longest))
    if config.trainer.backend == "megatron":
        return _build_megatron(config, model, _scheduled(config.critic.optim, config), objective)
    from gcore_trainer import PackedValueModel, TorchTrainer

    packed = PackedValueModel.from_pretrained(model, **_model_options(config))
    return TorchTrainer(
        packed, optimizer=_scheduled(config.critic.optim, config), objective=objective, parallel=parallel
    )


def _build_megatron(
    config: TrainConfig,
    model: Path,
    optimizer: OptimizerConfig,
    objective: "Objective[Any]",
    *,
    lora: LoRAConfig | None = None,
) -> "Trainer":
    import torch

    from gcore_trainer import MegatronTrainer

    return MegatronTrainer(
        model,
        parallel=config.trainer.parallel,
        optimizer=optimizer,
        objective=objective,
        temperature=config.rollout.temperature,
        dtype=getattr(torch, config.dtype),
        recompute=config.actor.enable_gradient_checkpointing,
        lora=lora,
        device=torch.device(config.device),
    )


def _build_reference(config: TrainConfig, model: Path, parallel: "TorchParallel | None") -> "FrozenModel":
    from gcore_trainer import FrozenModel, PackedModel

    packed = PackedModel.from_pretrained(model, temperature=config.rollout.temperature, **_model_options(config))
    return FrozenModel(packed, parallel=parallel)
