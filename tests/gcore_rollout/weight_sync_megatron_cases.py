"""What ranks of a Megatron trainer do in the tests of new weights."""

import gc
from typing import Any

import numpy as np
import torch
from megatron_groups import leave_groups
from rank import Rank

from gcore_trainer import (
    MegatronTrainer,
    MicroBatch,
    OptimizerConfig,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
)


def megatron_steps(
    rank: Rank, path: str, layout: dict[str, Any], steps: list[MicroBatch], scored: MicroBatch
) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """The exported full tensors on rank 0 after real optimizer steps, and the log-probs of other samples then."""
    leave_groups()
    gc.collect()  # earlier trainers, and with them the threads of their groups
    trainer = MegatronTrainer(
        path,
        optimizer=OptimizerConfig(lr=1e-2),
        objective=PolicyObjective(PolicyLossConfig()),
        parallel=ParallelConfig(**layout),
    )
    for samples in steps:
        assert trainer.train_step([samples])["actor/grad_norm"] > 0
    log_probs = trainer.log_probs([scored])[0] if scored else []
    weights = dict(trainer.export_weights())
    return (weights if rank.number == 0 else {}), log_probs
