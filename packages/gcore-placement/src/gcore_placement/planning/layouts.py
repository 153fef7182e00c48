"""Layouts of training over devices, and the peak bytes of a device under them."""

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from itertools import product
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.forecast import Correction, Job
from gcore_placement.quantities import Amount, Checked, Floats, Positive
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A job on a cluster, and the laws that compare its layouts."""

    cluster: Cluster
    job: Job
    efficiency: Efficiency
    correction: Correction
    """Correction of all laws, by measurements."""
    most_num_seqs: int
    """Most sequences of an engine at once."""
    engine_devices: int | None = None
    """Devices of each engine; None: any number that an engine can have."""
    runnable: bool = False
    """Only plans that gcore-llm can run; see `plan`."""
    state: "TrainingState" = field(default_factory=lambda: DEFAULT_STATE)
    """The form in which the models in training are held."""

    @property
    def usable_bytes(self) -> float:
        """Usable memory of each device."""
        return self.cluster.device.memory_bytes * self.efficiency.free_memory


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


MASTER_BYTES = 4
"""Bytes of a float32 number: a master weight, a gradient, and each of AdamW's two moments."""
_BLOCK = 256
"""Values of an 8-bit moment that share a scale."""
_LOGITS_COPIES = 2
"""Float32 arrays of a chunk's logits at once, in addition to one in the compute precision."""

Offload = Literal["none", "optimizer", "all"]
Moments = Literal["float32", "8bit", "muon"]

Bytes = Mapping[str, Floats]
"""Bytes of a device by part."""


@dataclass(frozen=True, kw_only=True)
class TrainingState(Checked):
    """The form in which the models in training are held, besides their layout; the defaults are the trainer's."""

    offload: Offload = "none"
    """States held in the host's memory: optimizer, the master weights and moments; all, also weights and gradients of
    the models that are not at work, so that the device has those of one model at a time, in training its own."""
    moments: Moments = "float32"
    """AdamW's two moments; 8bit: a byte each, and a float32 scale for every 256 of them, 2.03 bytes a parameter in
    place of 8 (Dettmers et al. 2022, arXiv 2110.02861). muon: one of the matrices of hidden layers, and AdamW's of
    embeddings, head and experts."""
    adapter_parameters: Amount = 0
    """Trained parameters of the policy with LoRA, where all others are frozen and have neither gradients nor moments;
    0: all are trained. A critic trains all of its own."""
    checkpointed_share: Amount = 1.0
    """Share of the layers that keep only their input, in layouts with gradient checkpointing."""
    activation_offload: bool = False
    """Inputs of checkpointed layers wait in the host's memory; two are on the device at a time."""
    gradient_sync: Literal["micro_batch", "update"] = "micro_batch"
    """When ranks of the torch backend exchange gradients; update: in the last micro-batch, and until then each has all
    gradients, in float32."""
    fsdp_size: Amount = 0
    """Ranks of the torch backend that share parameters and moments, of which other ranks have copies; 0: all do."""
    max_logits: Positive = 1 << 28
    """Most logits of a chunk of the head: the trainer's budget on a GPU; on a CPU it is 2^24."""

    def moment_bytes(self, model: ModelShape) -> float:
        """Return the bytes of the mean parameter's moments; biases and norms count as matrices."""
        match self.moments:
            case "8bit":
                return 2 * (1 + MASTER_BYTES / _BLOCK)
            case "muon":
                experts = (
                    model.workload.num_moe_layers
                    * model.workload.num_experts
                    * model.num_expert_parameters
                )
                with_adam = 0 if self.adapter_parameters else model.num_outer_parameters + experts
                return MASTER_BYTES * (1 + with_adam / model.num_parameters)
            case "float32":
                return 2 * MASTER_BYTES


DEFAULT_STATE = TrainingState()


def training_memory(
    job: Job,
    layouts: TrainingLayouts,
    *,
    activations: float = 1.0,
    state: TrainingState = DEFAULT_STATE,
    fills_budget: bool = False,
) -> Bytes:
    """Return the bytes of each part of a device's memory at the peak of a training step, [num_layouts]; they add up.

    With P parameters of the heaviest pipeline stage on a tensor-parallel rank, s = DP x CP ranks that share them, and
    c bytes of a number in the compute precision:

    - weights c P, gradients 4 P (they are summed in float32), and the optimizer's 8 P of moments with 4 P of float32
      master weights where c is 2: 16 P in float32, 18 P in bfloat16; with 8-bit moments 10 P and 12 P, with Muon
      about 12 P and 14 P;
    - torch (ZeRO-3, Rajbhandari et al. 2019, arXiv 1910.02054, section 5; FSDP2) has 1 / s of all of these, with
      s = ``fsdp_size`` where that is set (HSDP), and of what is gathered two layers, the embedding and the head, and
      one's gradients in float32; with gradients that are exchanged once an update 4 P more, from its first micro-batch
      to its last;
    - megatron (ZeRO-1, section 5.1; its distributed optimizer) has 1 / s of the optimizer's;
    - with LoRA frozen weights c P, and gradients, masters and moments of the adapters alone;
    - activations by Korthikanti et al. 2022 (arXiv 2205.05198, equations 4 and 5, tensor with sequence parallelism),
      see `ModelShape.activations_per_token`, which is linear in tokens: attention keeps neither scores nor a mask;
      times the factor ``activations``: of a micro-batch's N / CP tokens, L / PP layers for each of the at most PP
      micro-batches that the first stage has started (one forward, one backward); with recomputation the layers' inputs
      (table 2);
    - logits a chunk at a time, and the head's gradient in float32, which FSDP's gathered gradients are already; with
      recomputation all of one layer's activations where these are more, as logits are gone by then;
    - the weights of the reference and of teachers, as the policy's are held, in the compute precision.

    A micro-batch has N tokens in a mean step, or, with ``fills_budget``, at most in any step.
    """
    ranks = layouts.dp * layouts.cp
    compute_bytes = job.compute_bytes
    is_gathered = layouts.sharded & (ranks > 1)
    replica_tokens = job.training_tokens / job.num_updates / layouts.dp
    micro_batches = np.ceil(np.maximum(1.0, replica_tokens / layouts.max_tokens))
    tokens = np.maximum(job.longest_sequence, replica_tokens / micro_batches) / layouts.cp
    if fills_budget:
        prompts = job.train_batch_size / job.num_updates
        rank_tokens = (
            prompts
            * (job.prompt_lengths.longest + job.n * job.response_lengths.longest)
            / layouts.dp
        )
        tokens = (
            np.maximum(job.longest_sequence, np.minimum(layouts.max_tokens, rank_tokens))
            / layouts.cp
        )
    # The first stage holds the activations of so many micro-batches.
    in_flight = np.minimum(layouts.pp, micro_batches)
    # Where products are in float32, weights are their own masters.
    master_bytes = MASTER_BYTES if compute_bytes != MASTER_BYTES else 0
    optimizer = np.zeros(len(layouts))
    weights: list[Floats] = []
    gradients: list[Floats] = []
    gathered: list[Floats] = []
    unsynced: list[Floats] = []
    activation_values: list[Floats] = []
    waits = is_gathered & (micro_batches > 1) & (state.gradient_sync == "update")
    sharing = np.where(layouts.sharded, np.minimum(state.fsdp_size or ranks, ranks), ranks)
    of_shard = np.where(layouts.sharded, sharing, 1.0)
    for number, model in enumerate(job.trained):
        # Experts that are divided over more ranks are on fewer that share their moments.
        trained = held_parameters(model, layouts)
        stepped = _tensor_parallel_parameters(model, layouts)
        frozen = 0.0
        if state.adapter_parameters and not number:
            # Adapters, which experts have none of, are weights besides the frozen ones.
            frozen = trained
            trained = stepped * (state.adapter_parameters / model.num_parameters)
            stepped = trained
        weights.append(compute_bytes * (frozen + trained) / of_shard)
        gradients.append(MASTER_BYTES * trained / of_shard)
        unsynced.append(np.where(waits, MASTER_BYTES * trained, 0.0))
        optimizer = optimizer + (state.moment_bytes(model) + master_bytes) * stepped / sharing
        layer = model.num_layer_parameters
        outer = model.num_outer_parameters
        together = compute_bytes * (2 * layer + outer) + (compute_bytes + MASTER_BYTES) * max(
            layer, outer
        )
        gathered.append(np.where(is_gathered, together, 0.0))
        layers = in_flight * np.ceil(model.workload.num_hidden_layers / layouts.pp)
        checkpointed = layouts.recompute * state.checkpointed_share * layers
        inputs = np.minimum(2.0, checkpointed) if state.activation_offload else checkpointed
        values = (
            layers - checkpointed
        ) * model.activations_per_token + inputs * model.workload.hidden_size
        activation_values.append(values / layouts.tp)
    one_layer = [model.activations_per_token / layouts.tp for model in job.trained]
    layer_bytes = np.where(
        layouts.recompute, activations * compute_bytes * tokens * np.max(one_layer, axis=0), 0.0
    )
    vocab_size = job.policy.workload.vocab_size / layouts.tp
    head = np.where(
        is_gathered | bool(state.adapter_parameters),
        0.0,
        job.policy.workload.hidden_size * vocab_size,
    )
    chunk = np.minimum(state.max_logits, tokens * vocab_size)
    logits = (MASTER_BYTES * _LOGITS_COPIES + compute_bytes) * chunk + MASTER_BYTES * head
    reference = np.zeros(len(layouts))
    if job.reference:
        reference = compute_bytes * held_parameters(job.policy, layouts) / of_shard
    teachers = np.zeros(len(layouts))
    for teacher in job.teachers:
        teachers = teachers + compute_bytes * held_parameters(teacher, layouts) / of_shard
    if state.offload != "none":
        optimizer = np.zeros(len(layouts))
    in_memory = np.sum
    if state.offload == "all":
        # Only the model at work has its weights and gradients on the device.
        in_memory = np.max
        reference = np.zeros(len(layouts))
        teachers = np.zeros(len(layouts))
    # One model computes at a time.
    return {
        "weights": in_memory(weights, axis=0),
        "gradients": in_memory(gradients, axis=0),
        "optimizer": optimizer,
        "gathered": np.max(gathered, axis=0),
        "unsynced gradients": np.max(unsynced, axis=0),
        "activations": activations * compute_bytes * tokens * np.max(activation_values, axis=0),
        "logits": logits,
        "recomputed layer": np.maximum(layer_bytes - logits, 0.0),
        "reference": reference,
        "teachers": teachers,
    }


def embedding_bytes(job: Job) -> float:
    """Return the bytes of the policy's embedding, the largest tensor of a weight sync."""
    return float(
        job.compute_bytes * job.policy.workload.hidden_size * job.policy.workload.vocab_size
    )


def resident_state(parts: Bytes) -> Floats:
    """Return the part of `training_memory` that stays between steps unless it is moved to the host."""
    return (
        parts["weights"]
        + parts["gradients"]
        + parts["optimizer"]
        + parts["reference"]
        + parts["teachers"]
    )


def total(parts: Bytes) -> Floats:
    """Return the sum of all parts."""
    return np.sum(list(parts.values()), axis=0)


def parts_at(parts: Bytes, index: int) -> dict[str, float]:
    """Return the bytes of each part at an index."""
    return {name: float(sizes[index]) for name, sizes in parts.items()}


def held_parameters(model: ModelShape, layouts: TrainingLayouts) -> Floats:
    """Return the parameters of each rank of the heaviest stage, with experts divided over expert-parallel ranks."""
    w = model.workload
    experts = w.num_moe_layers * w.num_experts * model.num_expert_parameters / w.num_hidden_layers
    on_stage = np.ceil(w.num_hidden_layers / layouts.pp) * experts
    moved = np.where(layouts.ep > 1, on_stage / layouts.ep - on_stage / layouts.tp, 0.0)
    return _tensor_parallel_parameters(model, layouts) + moved


def _tensor_parallel_parameters(model: ModelShape, layouts: TrainingLayouts) -> Floats:
    """Return the parameters of each tensor-parallel rank of the heaviest stage: whole layers, and embedding or head."""
    layers = np.ceil(model.workload.num_hidden_layers / layouts.pp)
    one_table = model.workload.hidden_size * (model.workload.vocab_size + 1)
    outer = np.where(layouts.pp == 1, model.num_outer_parameters, one_table)
    return (layers * model.num_layer_parameters + outer) / layouts.tp
