"""The model in fine-tuning on one rank: all of it, or this rank's shards of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gcore_trainer
from gcore_llm.finetune.config import DPORunConfig, FineTuneConfig, RewardModelRunConfig
from gcore_llm.learning.trainer_worker import join_ranks, megatron_config
from gcore_runs import BaseTrainerWorker
from gcore_trainer import MicroBatch, Objective


def objective_of(config: FineTuneConfig) -> Objective[Any]:
    """Return what a command minimises."""
    if isinstance(config, DPORunConfig):
        return gcore_trainer.DPOObjective(config.loss)
    if isinstance(config, RewardModelRunConfig):
        return gcore_trainer.RewardModelObjective(config.loss)
    return gcore_trainer.SFTObjective()


class FineTuneWorker(BaseTrainerWorker[MicroBatch]):
    """The model of `gcore-llm sft`, `dpo` or `reward-model`, as the ``actor``.

    The config's ``trainer.total_training_steps`` are those of the run.
    """

    rest: ClassVar = ("step", "loader")

    def __init__(self, config: FineTuneConfig, model: Path, checkpoints: Path) -> None:
        super().__init__(config, model, checkpoints)
        self.engine_dtype = config.dtype
        self.exports_adapters = config.exports_adapters
        self._scores = objective_of(config).scores
        self.trainers = {"actor": _build(config, model)}

    def score(
        self, role: str, micro_batches: Sequence[MicroBatch], *, with_routing: bool
    ) -> list[list[Any]]:
        """Return log-probabilities or values, [R] of each sample."""
        del with_routing
        trainer = self.trainers[role]
        if self._scores == "values":
            return trainer.values(micro_batches)
        return trainer.log_probs(micro_batches)


def _build(config: FineTuneConfig, model: Path) -> "gcore_trainer.Trainer":
    import torch

    ranks = config.trainer
    parallel = join_ranks(ranks, config.device)
    objective = objective_of(config)
    optimizer = config.optim.build(total_training_steps=ranks.total_training_steps)
    dtype = getattr(torch, config.dtype)
    checkpointing = config.enable_gradient_checkpointing
    if ranks.backend == "megatron":
        return gcore_trainer.MegatronTrainer(
            model,
            parallel=ranks.parallel,
            optimizer=optimizer,
            objective=objective,
            dtype=dtype,
            megatron=megatron_config(ranks, checkpointing, config.device),
            device=torch.device(config.device),
            lora=config.lora,
        )
    is_value_model = objective.scores == "values"
    model_class = gcore_trainer.PackedValueModel if is_value_model else gcore_trainer.PackedModel
    packed = model_class.from_pretrained(
        model,
        device=config.device,
        sharded=parallel is not None,
        compute_dtype=dtype,
        gradient_checkpointing=checkpointing,
        max_length=config.data.max_length,
        lora=config.lora,
    )
    return gcore_trainer.TorchTrainer(
        packed, optimizer=optimizer, objective=objective, parallel=parallel
    )
