"""Layouts of engines and of training over devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

import numpy as np

from gcore_placement.cluster import Cluster
from gcore_placement.forecast import Job
from gcore_placement.quantities import CheckedQuantities, Floats, Positive
from gcore_placement.workload.model_shape import ModelShape

Backend = Literal["torch", "megatron"]

_MOST_CONTEXT_PARALLEL = 8
_TOKENS_IN_LONGEST = (1, 2, 4, 8)
"""Token budgets of a micro-batch to try, in longest sequences."""


@dataclass(frozen=True, kw_only=True)
class EngineLayout(CheckedQuantities):
    """The engines of a role, all alike.

    Example:
        >>> EngineLayout(num_engines=2, devices_per_engine=4).num_devices
        8
    """

    num_engines: Positive
    devices_per_engine: Positive = 1
    max_num_seqs: Positive = 256
    """Most sequences of each at once, also by the memory for their keys and values."""

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self.num_engines * self.devices_per_engine

    def to_dict(self) -> dict[str, int]:
        """Return plain data, for JSON, by the names of a plan's file."""
        return {
            "tensor_model_parallel_size": self.devices_per_engine,
            "num_replicas": self.num_engines,
            "num_devices": self.num_devices,
            "max_num_seqs": self.max_num_seqs,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """The layout of training; sizes have verl's and Megatron's names.

    Example:
        >>> layout = TrainingLayout(backend="megatron", tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
        ...     context_parallel_size=1, data_parallel_size=4, gradient_checkpointing=True, ppo_max_token_len=8192)
        >>> layout.num_ranks
        8
        >>> print(layout)
        megatron TP 2 PP 1 CP 1 DP 4, recompute, 8192 tokens a micro-batch
    """

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
    expert_model_parallel_size: int = 1
    """Ranks of a pipeline stage that divide the experts of a mixture; these are then not divided over tensor-parallel
    ranks."""

    @property
    def group_sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the tensor-, pipeline-, context- and data-parallel groups."""
        return (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
            self.data_parallel_size,
        )

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return prod(self.group_sizes)

    @property
    def sizes(self) -> str:
        """The backend and the sizes of its groups, as text."""
        tp, pp, cp, dp = self.group_sizes
        text = f"{self.backend} TP {tp} PP {pp} CP {cp} DP {dp}"
        if self.expert_model_parallel_size > 1:
            text += f" EP {self.expert_model_parallel_size}"
        return text

    def __str__(self) -> str:
        recompute = "recompute, " if self.gradient_checkpointing else ""
        return f"{self.sizes}, {recompute}{self.ppo_max_token_len} tokens a micro-batch"


class TrainingLayouts:
    """Many layouts at once: arrays [num_layouts] of whole numbers as float64, or of booleans."""

    def __init__(self, *layouts: TrainingLayout) -> None:
        self._layouts = layouts
        rows: list[tuple[float, ...]] = []
        for layout in layouts:
            further = (layout.expert_model_parallel_size, layout.ppo_max_token_len)
            rows.append(layout.group_sizes + further)
        columns: Floats = np.array(rows, dtype=np.float64).reshape(-1, 6).T
        self.tp, self.pp, self.cp, self.dp, self.ep, self.max_tokens = columns
        self.sharded = np.array([layout.backend == "torch" for layout in layouts], dtype=bool)
        """ZeRO-3: the torch backend."""
        self.recompute = np.array([layout.gradient_checkpointing for layout in layouts], dtype=bool)

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, index: int) -> TrainingLayout:
        return self._layouts[index]

    @property
    def num_devices(self) -> Floats:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def ranks(self) -> Floats:
        """Ranks that share a model's states: those of data and of context parallelism."""
        return self.dp * self.cp


def training_layouts(
    job: Job,
    cluster: Cluster,
    num_devices: int,
    *,
    backends: Sequence[Backend] = ("torch", "megatron"),
) -> TrainingLayouts:
    """Return all training layouts of `num_devices`, including those that do not fit into memory.

    Tensor-parallel ranks stay within a node; the torch backend has neither them nor pipeline stages. There are no more
    data-parallel ranks than prompts, whose responses stay together. Micro-batches hold the longest sequence, once or
    several times.
    """
    node = cluster.devices_per_node
    tp_sizes = [
        tp
        for tp in powers(node)
        if node % tp == 0 and all(divides_heads(m, tp) for m in job.trained_models)
    ]
    divisors = [pp for pp in range(1, num_devices + 1) if num_devices % pp == 0]
    pp_sizes = [
        pp
        for pp in divisors
        if all(m.workload.num_hidden_layers % pp == 0 for m in job.trained_models)
    ]
    layouts: list[TrainingLayout] = []
    for tp, pp, cp in product(tp_sizes, pp_sizes, powers(_MOST_CONTEXT_PARALLEL)):
        dp, rest = divmod(num_devices, tp * pp * cp)
        if rest or dp > job.train_batch_size:
            continue
        for backend, recompute, times in product(backends, (False, True), _TOKENS_IN_LONGEST):
            if backend == "torch" and tp * pp > 1:
                continue
            layout = TrainingLayout(
                backend=backend,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
                data_parallel_size=dp,
                gradient_checkpointing=recompute,
                ppo_max_token_len=times * job.longest_sequence,
            )
            layouts.append(layout)
    return TrainingLayouts(*layouts)


def divides_heads(model: ModelShape, tp: int) -> bool:
    """Return whether ``tp`` ranks share the heads evenly; key-value heads may be copied if fewer than ranks."""
    heads = model.workload.num_attention_heads
    kv_heads = model.workload.num_key_value_heads
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def powers(limit: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [2**k for k in range(limit.bit_length())]


def count_micro_batches(job: Job, layouts: TrainingLayouts) -> tuple[Floats, Floats]:
    """Return the tokens of a replica in a mean update, and their number of micro-batches: both [num_layouts]."""
    tokens = job.training_tokens / job.num_updates / layouts.dp
    return tokens, np.ceil(np.maximum(1.0, tokens / layouts.max_tokens))
