"""Layouts of training over devices."""

from collections.abc import Collection
from dataclasses import astuple, dataclass
from itertools import product
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster
from gcore_placement.forecast import Job
from gcore_placement.quantities import Floats
from gcore_placement.workload.model_shape import ModelShape

Backend = Literal["torch", "megatron"]

_MOST_CONTEXT_PARALLEL = 8
_TOKENS_IN_LONGEST = (1, 2, 4, 8)
"""Token budgets of a micro-batch to try, in longest sequences."""


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """The layout of training; sizes have verl's and Megatron's names."""

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
    def num_ranks(self) -> int:
        """All ranks."""
        return prod(astuple(self)[1:5])

    @property
    def sizes(self) -> str:
        """The backend and the sizes of its groups, as text."""
        tp, pp, cp, dp = astuple(self)[1:5]
        experts = (
            f" EP {self.expert_model_parallel_size}" if self.expert_model_parallel_size > 1 else ""
        )
        return f"{self.backend} TP {tp} PP {pp} CP {cp} DP {dp}{experts}"

    def __str__(self) -> str:
        recompute = "recompute, " if self.gradient_checkpointing else ""
        return f"{self.sizes}, {recompute}{self.ppo_max_token_len} tokens a micro-batch"


@dataclass(frozen=True, eq=False)
class TrainingLayouts:
    """Many layouts at once: all fields are of shape [num_layouts], whole numbers as float64, or booleans."""

    sharded: NDArray[np.bool_]
    """ZeRO-3: the torch backend."""
    tp: Floats
    pp: Floats
    cp: Floats
    dp: Floats
    recompute: NDArray[np.bool_]
    max_tokens: Floats
    ep: Floats

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
            expert_model_parallel_size=int(self.ep[index]),
        )

    @classmethod
    def of(cls, *layouts: TrainingLayout) -> "TrainingLayouts":
        """Build the arrays of these layouts."""
        return _from_rows([(layout.backend == "torch", *astuple(layout)[1:]) for layout in layouts])

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
    backends: Collection[Backend] = ("torch", "megatron"),
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
        if node % tp == 0 and all(divides_heads(m, tp) for m in job.trained)
    ]
    divisors = [pp for pp in range(1, num_devices + 1) if num_devices % pp == 0]
    pp_sizes = [
        pp for pp in divisors if all(m.workload.num_hidden_layers % pp == 0 for m in job.trained)
    ]
    rows: list[tuple[float, ...]] = []
    for tp, pp, cp in product(tp_sizes, pp_sizes, powers(_MOST_CONTEXT_PARALLEL)):
        dp, rest = divmod(num_devices, tp * pp * cp)
        if rest or dp > job.train_batch_size:
            continue
        sharding: list[bool] = []
        if "torch" in backends and tp * pp == 1:
            sharding.append(True)
        if "megatron" in backends:
            sharding.append(False)
        for sharded, recompute, times in product(sharding, (False, True), _TOKENS_IN_LONGEST):
            rows.append((sharded, tp, pp, cp, dp, recompute, times * job.longest_sequence, 1))
    return _from_rows(rows)


def divides_heads(model: ModelShape, tp: int) -> bool:
    """Return whether ``tp`` ranks share the heads evenly; key-value heads may be copied if fewer than ranks."""
    heads = model.workload.num_attention_heads
    kv_heads = model.workload.num_key_value_heads
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def powers(limit: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [2**k for k in range(limit.bit_length())]


def _from_rows(rows: list[tuple[float, ...]]) -> TrainingLayouts:
    """Build layouts from rows whose columns are the fields of `TrainingLayouts`."""
    sharded, tp, pp, cp, dp, recompute, max_tokens, ep = (
        np.array(rows, dtype=np.float64).reshape(-1, 8).T
    )
    return TrainingLayouts(
        sharded.astype(bool), tp, pp, cp, dp, recompute.astype(bool), max_tokens, ep
    )


def count_micro_batches(job: Job, layouts: TrainingLayouts) -> tuple[Floats, Floats]:
    """Return the tokens of a replica in a mean update, and their number of micro-batches: both [num_layouts]."""
    tokens = job.training_tokens / job.num_updates / layouts.dp
    return tokens, np.ceil(np.maximum(1.0, tokens / layouts.max_tokens))
