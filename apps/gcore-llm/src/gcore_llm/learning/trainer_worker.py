"""The models in training on one rank: the policy, and the critic and reference where the algorithm has them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gcore_ckpt import Checkpointer
from gcore_controller import InProcessTrainerGroup, LocalTrainerGroup, SharedTrainerGroup, TrainerSpec
from gcore_llm.config import TrainConfig
from gcore_llm.learning.preparation import memory, sample_flops, workload_of
from gcore_runs.errors import UserError
from gcore_runs.training_ranks import rank_spec
from gcore_trainer import MicroBatch

if TYPE_CHECKING:
    from gcore_rollout import DigestedWeights
    from gcore_trainer import FrozenModel, TorchParallel, Trainer

Role = Literal["actor", "critic", "reference"]
State = dict[str, Any]


def has_critic(config: TrainConfig) -> bool:
    """Return whether the algorithm needs a critic."""
    return config.algorithm.estimator.needs_critic


def has_reference(config: TrainConfig) -> bool:
    """Return whether the algorithm needs the initial policy."""
    return bool(config.actor.loss.kl_loss_coef or config.algorithm.kl_ctrl.kl_coef)


def needs_old_log_probs(config: TrainConfig) -> bool:
    """Return whether a correction or the KL in the reward needs the trainer's own log-probs."""
    return config.algorithm.rollout_correction.is_active or bool(config.algorithm.kl_ctrl.kl_coef)


class LLMTrainerWorker:
    """A `gcore_controller.TrainerWorker` of language models: all of them, or this rank's shards of them.

    Args:
        config: the run's.
        model: Hugging Face folder to start from.
        checkpoints: folder of the checkpoints.

    Raises:
        UserError: the model does not fit the settings.
    """

    def __init__(self, config: TrainConfig, model: Path, checkpoints: Path) -> None:
        parallel = _join(config) if config.trainer.num_processes > 1 or config.trainer.backend == "megatron" else None
        self._trainers: dict[Role, Trainer] = {"actor": _build(config, "actor", model, parallel)}
        if has_critic(config):
            critic = Path(config.critic.model) if config.critic.model else model
            self._trainers["critic"] = _build(config, "critic", critic, parallel)
        if config.actor.router_replay != "disabled" and not self._trainers["actor"].num_routers:
            raise UserError(
                f"actor.router_replay is {config.actor.router_replay!r}; expected 'disabled', because the model in "
                f"{model} has no routers"
            )
        self._reference = _build_reference(config, model, parallel) if has_reference(config) else None
        self._device = config.device
        self._dtype = config.dtype
        self._checkpointer = Checkpointer(checkpoints, keep=config.trainer.max_ckpt_to_keep)

    @property
    def num_updates(self) -> int:
        return sum(trainer.step for trainer in self._trainers.values())

    @property
    def roles(self) -> list[Role]:
        return [*self._trainers, *(["reference"] if self._reference else [])]

    def replica(self, role: str) -> tuple[int, int]:
        model = self._reference if role == "reference" else self._trainers[cast("Role", role)]
        assert model is not None
        return model.data_parallel_rank, model.data_parallel_size

    def score(self, role: str, micro_batches: Sequence[MicroBatch], *, with_routing: bool) -> list[list[Any]]:
        """Return log-probabilities or the critic's values, [R] of each sample; ``with_routing`` pairs with experts."""
        if role == "reference":
            assert self._reference is not None
            return self._reference.scores(micro_batches)
        if role == "critic":
            return self._trainers["critic"].values(micro_batches)
        actor = self._trainers["actor"]
        return actor.log_probs_and_routing(micro_batches) if with_routing else actor.log_probs(micro_batches)

    def train_step(self, role: str, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        metrics = self._trainers[cast("Role", role)].train_step(micro_batches)
        if role == "critic":
            metrics = {name.replace("actor/", "critic/"): value for name, value in metrics.items()}
        return metrics | memory(self._device)

    def export_weights(self, *, averaged: bool = False) -> "DigestedWeights":
        import torch

        from gcore_rollout import DigestedWeights

        assert not averaged
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


def trainer_spec(config: TrainConfig, model: Path, checkpoints: Path, *, num_threads: int) -> TrainerSpec:
    """Return how the ranks of a run's models are started, each with ``num_threads`` threads of torch."""
    megatron = ["gcore_trainer.megatron.trainer"] if config.trainer.backend == "megatron" else []
    checkpoints = checkpoints.absolute()
    return rank_spec(
        partial(_make_worker, config, model.absolute(), checkpoints),
        num_ranks=config.trainer.num_processes,
        device=config.device,
        num_threads=num_threads,
        checkpoints=checkpoints,
        preload=[__name__, *_PRELOADED, *megatron],
    )


def start_trainer(config: TrainConfig, model: Path, checkpoints: Path) -> SharedTrainerGroup[MicroBatch]:
    """Load the models in training, in this process or on ranks in local processes."""
    if config.trainer.num_processes == 1 and config.trainer.backend == "torch":
        return InProcessTrainerGroup(LLMTrainerWorker(config, model, checkpoints))
    workload = workload_of(model)
    spec = trainer_spec(config, model, checkpoints, num_threads=config.threads)
    return LocalTrainerGroup(spec, cost_of=partial(sample_flops, workload))


def ray_trainer_spec(config: TrainConfig, model: Path, checkpoints: Path) -> TrainerSpec:
    """Return how the ranks are started on Ray, where they share the threads."""
    num_threads = max(1, config.threads // config.sizes.ranks)
    return trainer_spec(config, model, checkpoints, num_threads=num_threads)


_PRELOADED = ["gcore_trainer.trainer", "gcore_trainer.torch.frozen_model", "torch._dynamo"]


def _make_worker(config: TrainConfig, model: Path, checkpoints: Path, device: str) -> LLMTrainerWorker:
    import torch

    torch.manual_seed(config.seed)
    return LLMTrainerWorker(replace(config, device=device), model, checkpoints)


_KEYS: dict[Role, str] = {"actor": "trainer", "critic": "critic"}
"""The key of each trainer's state in a checkpoint."""


def _for_checkpoint(state: State) -> State:
    """Return a trainer's state with the shards as gcore-ckpt represents them."""
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
        # The reference does not run on Megatron; it is sharded over all ranks.
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


def _build(config: TrainConfig, role: Role, model: Path, parallel: "TorchParallel | None") -> "Trainer":
    """Make the trainer of the actor or the critic."""
    import torch

    from gcore_trainer import (
        MegatronTrainer,
        PackedModel,
        PackedValueModel,
        PolicyObjective,
        TorchTrainer,
        ValueObjective,
    )

    is_actor = role == "actor"
    own = config.actor if is_actor else config.critic
    longest = own.loss.max_response_length or config.data.max_response_length
    objective_class: Any = PolicyObjective if is_actor else ValueObjective
    objective = objective_class(replace(own.loss, max_response_length=longest))
    optimizer, actor, batch = own.optim, config.actor, config.data.train_batch_size
    if not optimizer.total_training_steps:
        updates = -(-batch // (actor.ppo_mini_batch_size or batch)) * actor.ppo_epochs
        optimizer = replace(optimizer, total_training_steps=config.trainer.total_training_steps * updates)
    options: dict[str, Any] = {"lora": actor.lora, "temperature": config.rollout.temperature} if is_actor else {}
    if config.trainer.backend == "megatron":
        options.setdefault("temperature", config.rollout.temperature)
        return MegatronTrainer(
            model,
            parallel=config.trainer.parallel,
            optimizer=optimizer,
            objective=objective,
            dtype=getattr(torch, config.dtype),
            recompute=actor.enable_gradient_checkpointing,
            device=torch.device(config.device),
            **options,
        )
    packed_class: Any = PackedModel if is_actor else PackedValueModel
    packed = packed_class.from_pretrained(model, **_model_options(config), **options)
    return TorchTrainer(packed, optimizer=optimizer, objective=objective, parallel=parallel)


def _build_reference(config: TrainConfig, model: Path, parallel: "TorchParallel | None") -> "FrozenModel":
    from gcore_trainer import FrozenModel, PackedModel

    packed = PackedModel.from_pretrained(model, temperature=config.rollout.temperature, **_model_options(config))
    return FrozenModel(packed, parallel=parallel)
