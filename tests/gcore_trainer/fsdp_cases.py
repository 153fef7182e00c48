"""What the ranks do in `test_fsdp.py`: `TorchTrainer` sharded by FSDP2 over the first ranks."""

import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe
from numpy.typing import NDArray
from rank import Rank

from gcore_trainer import (
    MicroBatch,
    Objective,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    TorchParallel,
    TorchTrainer,
    compile_layers,
)
from gcore_trainer.torch import optimizer as optimizers
from gcore_trainer.torch.activations import offload_activations
from gcore_trainer.torch.host_memory import local
from gcore_trainer.torch.optimizer import gather_full_tensor

PRELOADED = (
    torch._dynamo,
    torch.distributed.fsdp,
    transformers.models.auto.modeling_auto,
    transformers.models.llama.modeling_llama,
    transformers.models.qwen2.modeling_qwen2,
    transformers.models.qwen3.modeling_qwen3,
    transformers.models.qwen3_moe.modeling_qwen3_moe,
)
"""What a rank would import on its first use; imported here, once."""


def make_trainer(
    path: str,
    objective: Objective[Any],
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    **options: Any,
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


def record_and_train(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    steps: list[list[list[MicroBatch]]],
) -> tuple[list[NDArray[np.int16]], list[dict[str, float]]]:
    """The experts of this replica's samples of the first step, and metrics of training on the others."""
    trainer = make_trainer(path, objective, optimizer, parallel)
    first, *others = [replicas[trainer.data_parallel_rank] for replicas in steps]
    found = trainer.log_probs_and_routing(first)
    return [experts for batch in found for _, experts in batch], [
        trainer.train_step(batch) for batch in others
    ]


def train_compiled(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    optimizer: OptimizerConfig,
    steps: list[list[list[MicroBatch]]],
) -> tuple[list[dict[str, float]], int]:
    """Metrics of each step of a model with compiled and checkpointed layers, and the number of graphs."""
    torch._dynamo.utils.counters.clear()
    packed = PackedModel.from_pretrained(path, gradient_checkpointing=True)
    with warnings.catch_warnings():
        # Dynamo looks at the gradients of all tensors.
        warnings.simplefilter("ignore")
        compile_layers(packed, backend="eager")
        parallel = TorchParallel.join(ParallelConfig())
        trainer = TorchTrainer(packed, optimizer=optimizer, objective=objective, parallel=parallel)
        metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return metrics, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_with_naps(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    optimizer: OptimizerConfig,
    steps: list[list[list[MicroBatch]]],
    offload: bool,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int]:
    """Train in bfloat16, asleep between any two calls; return metrics, weights and the bytes held asleep."""
    packed = PackedModel.from_pretrained(path, compute_dtype=torch.bfloat16)
    parallel = TorchParallel.join(ParallelConfig())
    # Shards of few values keep exact moments; these are all small.
    with mock.patch.object(optimizers, "_SMALLEST", 300):
        trainer = TorchTrainer(
            packed, optimizer=optimizer, objective=objective, parallel=parallel, offload=offload
        )
    if optimizer.name == "adamw_8bit":
        assert len(trainer._optimizer.stored_tensors()["values"]) > 10  # pyright: ignore[reportPrivateUsage]  # what is in memory
    metrics: list[dict[str, float]] = []
    held = 0
    for replicas in steps:
        own = replicas[trainer.data_parallel_rank]
        # It leaves the root module's parameters whole.
        trainer.log_probs(own)
        before = _shards(trainer)
        trainer.sleep(keep_weights=True)
        trainer.log_probs(own)
        trainer.sleep()
        held = max(
            held, sum(local(p).untyped_storage().nbytes() for p in packed.model.parameters())
        )
        # Shards in host memory; 8-bit moments wake for it.
        for name, shard in _shards(trainer).items():
            assert torch.equal(shard, before[name]), name
        trainer.wake()
        metrics.append(trainer.train_step(own))
        # It writes what it reads, also where a state's tensors are copies.
        trainer.load_state(trainer.state())
    return metrics, dict(trainer.export_weights()), held


def _shards(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards of a trainer's state, by group and name."""
    shards: dict[str, torch.Tensor] = {}
    for group, tensors in trainer.state().items():
        if isinstance(tensors, dict):
            for name, tensor in tensors.items():
                shards[f"{group} {name}"] = local(tensor).clone()
    return shards


def gradients_of(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    parallel: ParallelConfig,
    steps: list[list[list[MicroBatch]]],
    options: dict[str, Any],
) -> list[tuple[dict[str, torch.Tensor], int]]:
    """The whole gradient of each step without an update, and how often it was reduced and scattered."""
    packed = PackedModel.from_pretrained(path, sharded=True, **options)
    if options.get("activation_offload"):
        # Those of a tiny model are small.
        del packed.root.forward
        offload_activations(packed.root, smallest_bytes=0)
    frozen = OptimizerConfig(lr=1e-12, weight_decay=0.0, grad_clip=1e9)
    trainer = TorchTrainer(
        packed, optimizer=frozen, objective=objective, parallel=TorchParallel.join(parallel)
    )
    found: list[tuple[dict[str, torch.Tensor], int]] = []
    # The name that FSDP calls it by, in torch 2.13 and before.
    name = next(
        n
        for n in ("reduce_scatter_single", "reduce_scatter_tensor")
        if hasattr(torch.distributed, n)
    )
    reduce_scatter = getattr(torch.distributed, name)
    for replicas in steps:
        count = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return reduce_scatter(*args, **kwargs)

        setattr(torch.distributed, name, counted)
        try:
            trainer.train_step(replicas[trainer.data_parallel_rank])
        finally:
            setattr(torch.distributed, name, reduce_scatter)
        gradients = {n: p.grad for n, p in packed.named_parameters().items() if p.grad is not None}
        found.append(({n: gather_full_tensor(g).clone() for n, g in gradients.items()}, count))
    return found
