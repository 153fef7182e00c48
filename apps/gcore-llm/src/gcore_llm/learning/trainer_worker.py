"""The models in training on one rank: the policy; critic, reference and teachers where the algorithm has them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gcore_trainer
from gcore_controller import InProcessTrainerGroup, LocalTrainerGroup, SharedTrainerGroup
from gcore_llm.config import TrainConfig
from gcore_llm.learning.preparation import memory, sample_flops, workload_of
from gcore_llm.sections import ActorOptimConfig
from gcore_runs import BaseTrainerWorker, model_folder
from gcore_runs.settings.run_config import BaseRunConfig
from gcore_runs.settings.sections import RanksConfig
from gcore_trainer import MicroBatch


def has_critic(config: TrainConfig) -> bool:
    """Return whether the algorithm needs a critic."""
    return config.algorithm.estimator.needs_critic


def has_reference(config: TrainConfig) -> bool:
    """Return whether the algorithm needs the initial policy."""
    return bool(config.actor.loss.kl_loss_coef or config.algorithm.kl_ctrl.kl_coef)


def needs_old_log_probs(config: TrainConfig) -> bool:
    """Return whether a correction, the KL in the reward or the estimator needs the trainer's own log-probs."""
    algorithm = config.algorithm
    return (
        algorithm.rollout_correction.is_active
        or bool(algorithm.kl_ctrl.kl_coef)
        or algorithm.estimator.needs_squared_norms
    )


SHARP_ACTOR = "actor at half the temperature"
"""Role of the policy's log-probs of which sums of squared probabilities are made."""


def check_libraries(config: TrainConfig) -> None:
    """Raise `gcore_trainer.TrainerError` if an optional library that training needs is not installed."""
    names = {config.actor.optim.name}
    if has_critic(config):
        names.add(config.critic_optimizer.name)
    if "adamw_8bit" in names:
        gcore_trainer.check_extras(optimizer_names=names)


class LLMTrainerWorker(BaseTrainerWorker[MicroBatch]):
    """The language models in training: all of them, or this rank's shards of them.

    Raises:
        UserError: the model does not fit the settings.
    """

    def __init__(self, config: TrainConfig, model: Path, checkpoints: Path) -> None:
        check_libraries(config)
        super().__init__(config, model, checkpoints)
        self._device = config.device
        self.engine_dtype = config.dtype
        self.exports_adapters = config.actor.exports_adapters
        parallel = join_ranks(config.trainer, config.device)
        self.is_one_at_a_time = config.actor.offload == "all"
        self._frozen: dict[str, gcore_trainer.FrozenModel] = {}
        self.trainers = {"actor": _build(config, "actor", model, parallel)}
        if has_critic(config):
            self.use("critic")
            self.trainers["critic"] = _build(
                config, "critic", model_folder(config.critic.model or str(model)), parallel
            )
        if has_reference(config):
            self.use("reference")
            # The initial policy has the adapters that it starts from.
            lora = config.actor.lora if config.actor.lora_adapter_path else None
            self._frozen["reference"] = _build_frozen(config, model, parallel, lora)
        for role, teacher in config.distillation.roles.items():
            self.use(role)
            self._frozen[role] = _build_frozen(config, model_folder(teacher), parallel)

    @property
    def models(self) -> dict[str, Any]:
        return {**self.trainers, **self._frozen}

    def score(
        self, role: str, micro_batches: Sequence[MicroBatch], *, with_routing: bool
    ) -> list[list[Any]]:
        """Return log-probabilities or the critic's values, [R] of each sample; ``with_routing`` pairs with experts."""
        if role == SHARP_ACTOR:
            self.use("actor")
            return self.trainers["actor"].log_probs(micro_batches, temperature_scale=0.5)
        self.use(role)
        if role in self._frozen:
            if role != "reference":
                # The experts of samples are the policy's, and teachers are other models.
                micro_batches = [
                    [replace(sample, routed_experts=None) for sample in batch]
                    for batch in micro_batches
                ]
            return self._frozen[role].scores(micro_batches)
        trainer = self.trainers[role]
        if role == "critic":
            return trainer.values(micro_batches)
        if with_routing:
            return trainer.log_probs_and_routing(micro_batches)
        return trainer.log_probs(micro_batches)

    def train_step(self, role: str, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        self.use(role)
        metrics = self.trainers[role].train_step(micro_batches)
        if role == "critic":
            metrics = {name.replace("actor/", "critic/"): value for name, value in metrics.items()}
        return metrics | memory(self._device)


def start_trainer(
    config: TrainConfig, model: Path, checkpoints: Path
) -> SharedTrainerGroup[MicroBatch]:
    """Load the models in training, in this process or on ranks in local processes."""
    # The calls of agents are answered in this process, also while it trains.
    rollout = config.rollout
    continues = rollout.partial_rollout is not False or config.trainer.schedule != "sync"
    is_asked = rollout.has_several_turns and continues
    return start_ranks(
        LLMTrainerWorker, config, config.trainer, model, checkpoints, in_thread=is_asked
    )


def start_ranks(
    worker: type[BaseTrainerWorker[MicroBatch]],
    config: BaseRunConfig,
    ranks: RanksConfig,
    model: Path,
    checkpoints: Path,
    *,
    in_thread: bool = False,
) -> SharedTrainerGroup[MicroBatch]:
    """Start workers of one kind, by the config of a run: in this process, or on ranks in local processes.

    ``in_thread``: this process's event loop runs while its own worker computes.
    """
    if ranks.num_processes == 1 and ranks.backend == "torch":
        return InProcessTrainerGroup(worker(config, model, checkpoints), in_thread=in_thread)
    preload = ["gcore_trainer.trainer", "gcore_trainer.torch.frozen_model", "torch._dynamo"]
    if ranks.backend == "megatron":
        preload.append("gcore_trainer.megatron.trainer")
    spec = worker.spec(config, model, checkpoints, preload=preload)
    return LocalTrainerGroup(spec, cost_of=partial(sample_flops, workload_of(model)))


def join_ranks(ranks: RanksConfig, device: str) -> "gcore_trainer.TorchParallel | None":
    """Join the other ranks, in the process of one; None: there are no others."""
    if ranks.num_processes == 1 and ranks.backend == "torch":
        return None
    device_type = device.split(":")[0]
    parallel = ranks.parallel
    if ranks.backend == "megatron":
        for name, value in gcore_trainer.MegatronConfig.environment(
            ranks.parallel, device_type
        ).items():
            os.environ.setdefault(name, value)
        # The reference does not run on Megatron; there it is sharded over all ranks.
        parallel = gcore_trainer.ParallelConfig()
    return gcore_trainer.TorchParallel.join(parallel, device_type=device_type)


ray_trainer_spec = LLMTrainerWorker.spec
"""How the ranks are started on Ray, where they share the threads."""


def _model_options(
    config: TrainConfig, parallel: "gcore_trainer.TorchParallel | None"
) -> dict[str, Any]:
    import torch

    return {
        "device": config.device,
        "sharded": parallel is not None,
        "compute_dtype": getattr(torch, config.dtype),
        "gradient_checkpointing": is_checkpointed(config.actor.has_checkpointing, config.device),
        "checkpointed_layers": config.actor.checkpointed_layers,
        "activation_offload": config.actor.activation_offload,
        "max_length": config.data.max_length,
    }


def is_checkpointed(setting: "bool | Literal['auto']", device: str) -> "bool | Literal['auto']":
    """Return a setting of gradient checkpointing, which is never automatic on CPU."""
    if setting == "auto" and device == "cpu":
        return False
    return setting


def megatron_config(
    ranks: RanksConfig, setting: "bool | Literal['auto']", device: str
) -> "gcore_trainer.MegatronConfig":
    """Return the settings of Megatron-Core, with those of gradient checkpointing where it has none of its own."""
    config = ranks.megatron_config
    setting = is_checkpointed(setting, device)
    if config.recompute_granularity != "auto" or setting == "auto":
        return config
    return replace(config, recompute_granularity="full" if setting else "none")


def _build(
    config: TrainConfig,
    role: Literal["actor", "critic"],
    model: Path,
    parallel: "gcore_trainer.TorchParallel | None",
) -> "gcore_trainer.Trainer":
    """Make the trainer of the actor or the critic."""
    import torch

    actor = config.actor
    is_actor = role == "actor"
    objective: gcore_trainer.Objective[Any]
    longest = config.data.max_response_length
    if is_actor:
        optim: ActorOptimConfig = actor.optim
        lora = actor.lora
        longest = actor.loss.max_response_length or longest
        options = config.algorithm.loss_options(actor.loss.loss_mode)
        loss = replace(actor.loss, max_response_length=longest)
        objective = gcore_trainer.PolicyObjective(loss, options)
    else:
        optim = config.critic_optimizer
        lora = None
        objective = gcore_trainer.ValueObjective(
            replace(config.critic.loss, max_response_length=longest)
        )
    temperature = config.rollout.temperature
    batch = config.data.train_batch_size
    updates = -(-batch // (actor.ppo_mini_batch_size or batch)) * actor.ppo_epochs
    optimizer = optim.build(total_training_steps=config.trainer.total_training_steps * updates)
    offload = actor.offload != "none"
    if config.trainer.backend == "megatron":
        return gcore_trainer.MegatronTrainer(
            model,
            parallel=config.trainer.parallel,
            optimizer=optimizer,
            objective=objective,
            dtype=getattr(torch, config.dtype),
            megatron=megatron_config(config.trainer, actor.has_checkpointing, config.device),
            device=torch.device(config.device),
            temperature=temperature,
            lora=lora,
            offload=offload,
        )
    options = _model_options(config, parallel)
    if is_actor:
        packed = gcore_trainer.PackedModel.from_pretrained(
            model, temperature=temperature, lora=lora, **options
        )
    else:
        packed = gcore_trainer.PackedValueModel.from_pretrained(model, **options)
    if actor.compile:
        gcore_trainer.compile_layers(packed)
    return gcore_trainer.TorchTrainer(
        packed, optimizer=optimizer, objective=objective, parallel=parallel, offload=offload
    )


def _build_frozen(
    config: TrainConfig,
    model: Path,
    parallel: "gcore_trainer.TorchParallel | None",
    lora: "gcore_trainer.LoRAConfig | None" = None,
) -> "gcore_trainer.FrozenModel":
    options = _model_options(config, parallel)
    packed = gcore_trainer.PackedModel.from_pretrained(
        model, temperature=config.rollout.temperature, lora=lora, **options
    )
    if config.actor.compile:
        gcore_trainer.compile_layers(packed)
    return gcore_trainer.FrozenModel(packed, parallel=parallel)
