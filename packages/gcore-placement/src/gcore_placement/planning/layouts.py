"""Layouts of training and engines over devices."""

from dataclasses import dataclass, fields
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster
from gcore_placement.workload.job import Job
from gcore_placement.workload.model_shape import ModelShape

Backend = Literal["torch", "megatron"]

_MOST_CONTEXT_PARALLEL = 8
_TOKENS_IN_LONGEST = (1, 2, 4, 8)
"""Token budgets of a micro-batch to try, in longest sequences."""


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """The layout of training. Sizes have verl's and Megatron's names."""

    backend: Backend
    """torch: parameters, gradients and moments are sharded over all ranks (FSDP, ZeRO-3). megatron: moments are, over
    data- and context-parallel ranks (distributed optimizer, ZeRO-1)."""
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    gradient_checkpointing: bool
    """Keep only the input of each layer for the backward pass."""
    ppo_max_token_len: int
    """Most tokens of a micro-batch, over all context-parallel ranks."""

    def __str__(self) -> str:
        sizes = (
            f"TP {self.tensor_model_parallel_size} PP {self.pipeline_model_parallel_size} "
            f"CP {self.context_parallel_size} DP {self.data_parallel_size}"
        )
        return f"{self.backend} {sizes}, {'recompute, ' if self.gradient_checkpointing else ''}" + (
            f"{self.ppo_max_token_len} tokens a micro-batch"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLayouts:
    """Many layouts at once: all fields are of shape [num_layouts], whole numbers as float64, or booleans."""

    sharded: NDArray[np.bool_]
    """ZeRO-3: the torch backend."""
    tp: NDArray[np.float64]
    pp: NDArray[np.float64]
    cp: NDArray[np.float64]
    dp: NDArray[np.float64]
    recompute: NDArray[np.bool_]
    max_tokens: NDArray[np.float64]

    def __len__(self) -> int:
        return self.tp.size

    def __getitem__(self, index: int) -> TrainingLayout:
        return TrainingLayout(
            backend="torch" if self.sharded[index] else "megatron",
            tensor_model_parallel_size=int(self.tp[index]),
            pipeline_model_parallel_size=int(self.pp[index]),
            context_parallel_size=int(self.cp[index]),
            data_parallel_size=int(self.dp[index]),
            gradient_checkpointing=bool(self.recompute[index]),
            ppo_max_token_len=int(self.max_tokens[index]),
        )

    @classmethod
    def of(cls, *layouts: TrainingLayout) -> "TrainingLayouts":
        """Build the arrays of these layouts."""
        return _from_rows(
            [
                (
                    layout.backend == "torch",
                    layout.tensor_model_parallel_size,
                    layout.pipeline_model_parallel_size,
                    layout.context_parallel_size,
                    layout.data_parallel_size,
                    layout.gradient_checkpointing,
                    layout.ppo_max_token_len,
                )
                for layout in layouts
            ]
        )

    @property
    def num_devices(self) -> NDArray[np.float64]:
        return self.tp * self.pp * self.cp * self.dp


def training_layouts(job: Job, cluster: Cluster, num_devices: int) -> TrainingLayouts:
    """Return all ways to train on so many devices, including those that do not fit into memory.

    Tensor-parallel ranks divide heads and stay within a node; pipeline stages divide the layers; the torch backend has
    neither. There are no more data-parallel ranks than prompts, whose responses stay together. Micro-batches hold the
    longest sequence, once or several times.
    """
    tp_sizes = [
        tp
        for tp in _powers(cluster.devices_per_node)
        if not cluster.devices_per_node % tp and all(divides_heads(model, tp) for model in job.trained)
    ]
    pp_sizes = [pp for pp in _divisors(num_devices) if not any(m.workload.num_hidden_layers % pp for m in job.trained)]
    cp_sizes = _powers(_MOST_CONTEXT_PARALLEL)
    longest = job.longest_sequence
    rows: list[tuple[float, ...]] = []
    for tp, pp, cp in product(tp_sizes, pp_sizes, cp_sizes):
        dp, rest = divmod(num_devices, tp * pp * cp)
        if rest or dp > job.train_batch_size:
            continue
        for sharded in (True, False) if tp * pp == 1 else (False,):
            rows += [
                (sharded, tp, pp, cp, dp, recompute, times * longest)
                for recompute, times in product((False, True), _TOKENS_IN_LONGEST)
            ]
    return _from_rows(rows)


def engine_sizes(model: ModelShape, cluster: Cluster, num_devices: int) -> list[int]:
    """Return tensor-parallel sizes of an engine: powers of two that divide the heads, in a node or over whole ones."""
    sizes = _powers(min(num_devices, model.workload.num_attention_heads))
    return [
        tp
        for tp in sizes
        if divides_heads(model, tp) and (tp <= cluster.devices_per_node or not tp % cluster.devices_per_node)
    ]


def divides_heads(model: ModelShape, tp: int) -> bool:
    """Return whether ``tp`` ranks share the heads evenly; key-value heads may be copied if fewer than ranks."""
    heads, kv_heads = model.workload.num_attention_heads, model.workload.num_key_value_heads
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _from_rows(rows: list[tuple[float, ...]]) -> TrainingLayouts:
    columns = np.array(rows, dtype=np.float64).reshape(-1, len(fields(TrainingLayouts))).T
    sharded, tp, pp, cp, dp, recompute, max_tokens = columns
    return TrainingLayouts(
        sharded=sharded.astype(bool),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        recompute=recompute.astype(bool),
        max_tokens=max_tokens,
    )


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
