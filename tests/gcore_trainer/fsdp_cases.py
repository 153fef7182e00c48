"""What the ranks do in `test_fsdp.py`: `TorchTrainer` sharded by FSDP2 over the first ranks."""

from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
from rank import Rank

from gcore_trainer import MicroBatch, OptimizerConfig
from gcore_trainer.objectives import Objective
from gcore_trainer.packed_model import PackedModel, PackedValueModel
from gcore_trainer.parallel import ParallelConfig
from gcore_trainer.torch_parallel import TorchParallel
from gcore_trainer.torch_trainer import TorchTrainer

PRELOADED = (
    torch._dynamo,
    torch.distributed.fsdp,
    transformers.models.auto.modeling_auto,
    transformers.models.llama.modeling_llama,
    transformers.models.qwen2.modeling_qwen2,
    transformers.models.qwen3.modeling_qwen3,
)
"""What a rank would import on its first use; imported here, once."""


def make_trainer(
    path: str, objective: Objective[Any], optimizer: OptimizerConfig, parallel: ParallelConfig, **options: Any
) -> TorchTrainer:
    """This rank's, over the whole world."""
    kind = PackedModel if objective.scores == "tokens" else PackedValueModel
    return TorchTrainer(
        kind.from_pretrained(path, **options),
        optimizer=optimizer,
        objective=objective,
        parallel=TorchParallel.join(parallel),
    )


def train(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    steps: list[list[list[MicroBatch]]],
    options: dict[str, Any],
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of each step, and the weights in the end. `steps` holds each replica's micro-batches."""
    trainer = make_trainer(path, objective, optimizer, parallel, **options)
    metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return metrics, dict(trainer.export_weights())
