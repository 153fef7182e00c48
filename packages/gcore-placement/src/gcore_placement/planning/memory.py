"""The memory law: bytes of a device for each form of training, and for an engine. Every plan takes its bytes from here.

Arrays over layouts are [num_layouts]; see `TrainingLayouts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gcore_placement.costs import Number
from gcore_placement.forecast import Job
from gcore_placement.planning.layouts import TrainingLayouts, count_micro_batches
from gcore_placement.quantities import Amount, CheckedQuantities, Floats, Lengths, Positive
from gcore_placement.workload.model_shape import ModelShape

MASTER_BYTES = 4
"""Bytes of a float32 number: a master weight, a gradient, and each of AdamW's two moments."""
_BLOCK = 256
"""Values of an 8-bit moment that share a scale."""
_LOGITS_COPIES = 2
"""Float32 arrays of a chunk's logits at once, in addition to one in the compute precision."""
LORA_RANK = 16
"""Rank of the adapters where none is given."""
PREFILL_TOKENS = 8192
"""Most tokens of an engine's pass over prompts."""
STATE = ("weights", "gradients", "optimizer")
"""Parts of `training_memory` that are the states of the models in training."""
FROZEN = ("reference", "teachers")
"""Parts that are the weights of models that only score."""

Offload = Literal["none", "optimizer", "all"]
Moments = Literal["float32", "8bit", "muon"]

Bytes = Mapping[str, Floats]
"""Bytes of a device by part."""


@dataclass(frozen=True, kw_only=True)
class TrainingState(CheckedQuantities):
    """The form in which the models in training are held, besides their layout; the defaults are the trainer's.

    Example:
        >>> policy = ModelShape(qkv_bias=True, tie_word_embeddings=True, workload=TransformerWorkload(
        ...     hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        ...     num_key_value_heads=2, head_dim=64, vocab_size=151936))
        >>> TrainingState().moment_bytes(policy)
        8
        >>> TrainingState(moments="8bit").moment_bytes(policy)
        2.03125
    """

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
    recomputes_mlps: bool = False
    """MLPs and experts of the other layers keep only their input: selective recomputation of the megatron backend."""
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


def state_bytes(
    frozen: Number,
    trained: Number,
    stepped: Number,
    *,
    compute_bytes: int,
    moment_bytes: float = 2 * MASTER_BYTES,
) -> tuple[Number, Number, Number]:
    """Return the bytes of a model's weights, gradients and optimizer, before ranks divide them.

    Weights are in the compute precision, gradients in float32; the optimizer has moments, AdamW's by default, and
    float32 master weights unless the weights are in float32 themselves.

    Args:
        frozen: parameters that are not trained.
        trained: parameters with gradients.
        stepped: those of them that the optimizer steps.
    """
    master_bytes = 0 if compute_bytes == MASTER_BYTES else MASTER_BYTES
    return (
        compute_bytes * (frozen + trained),
        MASTER_BYTES * trained,
        (moment_bytes + master_bytes) * stepped,
    )


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
      recomputation all of one layer's activations (of one MLP's, where only these are recomputed) where these are
      more, as logits are gone by then;
    - the weights of the reference and of teachers, as the policy's are held, in the compute precision.

    A micro-batch has N tokens in a mean step, or, with ``fills_budget``, at most in any step.
    """
    compute_bytes = job.compute_bytes
    ranks = layouts.ranks
    is_gathered = layouts.sharded & (ranks > 1)
    replica_tokens, micro_batches = count_micro_batches(job, layouts)
    mean_tokens = replica_tokens / micro_batches
    if fills_budget:
        prompts = job.train_batch_size / job.num_updates
        group_tokens = job.prompt_lengths.longest + job.n * job.response_lengths.longest
        mean_tokens = np.minimum(layouts.max_tokens, prompts * group_tokens / layouts.dp)
    tokens = np.maximum(job.longest_sequence, mean_tokens) / layouts.cp
    # The first stage holds the activations of so many micro-batches.
    in_flight = np.minimum(layouts.pp, micro_batches)
    waits = is_gathered & (micro_batches > 1) & (state.gradient_sync == "update")
    sharing = np.where(layouts.sharded, np.minimum(state.fsdp_size or ranks, ranks), ranks)
    weight_shards = np.where(layouts.sharded, sharing, 1.0)
    optimizer = np.zeros(len(layouts))
    weights: list[Floats] = []
    gradients: list[Floats] = []
    gathered: list[Floats] = []
    unsynced: list[Floats] = []
    values: list[Floats] = []
    for number, model in enumerate(job.trained_models):
        # Experts that are divided over more ranks are on fewer that share their moments.
        trained = held_parameters(model, layouts)
        stepped = _tensor_parallel_parameters(model, layouts)
        frozen = np.zeros(len(layouts))
        if state.adapter_parameters and not number:
            # Adapters, which experts have none of, are weights besides the frozen ones.
            frozen = trained
            trained = stepped * (state.adapter_parameters / model.num_parameters)
            stepped = trained
        weight_bytes, gradient_bytes, optimizer_bytes = state_bytes(
            frozen,
            trained,
            stepped,
            compute_bytes=compute_bytes,
            moment_bytes=state.moment_bytes(model),
        )
        weights.append(weight_bytes / weight_shards)
        gradients.append(gradient_bytes / weight_shards)
        unsynced.append(gradient_bytes * waits)
        optimizer = optimizer + optimizer_bytes / sharing
        layer = model.num_layer_parameters
        outer = model.num_outer_parameters
        together = compute_bytes * (2 * layer + outer)
        together += (compute_bytes + MASTER_BYTES) * max(layer, outer)
        gathered.append(np.where(is_gathered, float(together), 0.0))
        layers = in_flight * np.ceil(model.workload.num_hidden_layers / layouts.pp)
        checkpointed = layouts.recompute * state.checkpointed_share * layers
        inputs = np.minimum(2.0, checkpointed) if state.activation_offload else checkpointed
        kept = model.activations_per_token
        kept -= state.recomputes_mlps * model.mlp_activations_per_token
        whole_layers = (layers - checkpointed) * kept
        values.append((whole_layers + inputs * model.workload.hidden_size) / layouts.tp)
    largest_layer = max(model.activations_per_token for model in job.trained_models)
    largest_mlp = max(model.mlp_activations_per_token for model in job.trained_models)
    largest = np.where(layouts.recompute, largest_layer, state.recomputes_mlps * largest_mlp)
    recomputed = largest / layouts.tp
    recomputed_bytes = activations * compute_bytes * tokens * recomputed
    vocab_size = job.policy.workload.vocab_size / layouts.tp
    chunk = np.minimum(state.max_logits, tokens * vocab_size)
    logits = (MASTER_BYTES * _LOGITS_COPIES + compute_bytes) * chunk
    if not state.adapter_parameters:
        head = job.policy.workload.hidden_size * vocab_size
        logits = logits + MASTER_BYTES * np.where(is_gathered, 0.0, head)
    reference = np.zeros(len(layouts))
    teachers = np.zeros(len(layouts))
    if job.reference:
        reference = compute_bytes * held_parameters(job.policy, layouts) / weight_shards
    for teacher in job.teachers:
        teachers = teachers + compute_bytes * held_parameters(teacher, layouts) / weight_shards
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
        "activations": activations * compute_bytes * tokens * np.max(values, axis=0),
        "logits": logits,
        "recomputed layer": np.maximum(recomputed_bytes - logits, 0.0),
        "reference": reference,
        "teachers": teachers,
    }


def offloaded_optimizer_bytes(optimizer: Number, job: Job, state: TrainingState) -> Number:
    """Return the bytes in the host's memory of an offloaded optimizer: masters and gradients in float32, and moments.

    ``optimizer`` are its bytes on the device without offload, which `state_bytes` gives.
    """
    moments = state.moment_bytes(job.policy)
    _, _, on_device = state_bytes(
        0.0, 1.0, 1.0, compute_bytes=job.compute_bytes, moment_bytes=moments
    )
    return (2 * MASTER_BYTES + moments) / on_device * optimizer


def weight_sync_bytes(
    job: Job, resident_bytes: float, engine_bytes: float, *, at_once: bool
) -> float:
    """Return the bytes of a device while weights pass from its training rank to its engine.

    They pass a tensor at a time, of which the policy's embedding is the largest, or all at once.
    """
    w = job.policy.workload
    passing = engine_bytes if at_once else job.compute_bytes * w.hidden_size * w.vocab_size
    return resident_bytes + engine_bytes + passing


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """The bytes of an engine on each of the `tp` devices over which its model is split."""

    model: ModelShape
    tp: int
    compute_bytes: int

    @property
    def weights_bytes(self) -> float:
        return self.compute_bytes * self.model.num_parameters / self.tp

    @property
    def workspace_bytes(self) -> float:
        """Bytes of a pass over `PREFILL_TOKENS` prompt tokens: two states of a layer, and its MLP."""
        w = self.model.workload
        experts = w.num_experts_per_tok * w.moe_intermediate_size + w.shared_experts_size
        widest = max(w.intermediate_size, experts)
        return self.compute_bytes * PREFILL_TOKENS * (2 * w.hidden_size + 3 * widest / self.tp)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token's keys and values; heads that are fewer than devices are copied, as are latent states."""
        num_shares = min(self.tp, self.model.workload.num_cached_heads)
        return self.compute_bytes * self.model.kv_values_per_token / num_shares

    def sequence_bytes(self, prompt_lengths: Lengths, response_lengths: Lengths) -> float:
        """Return the bytes of keys and values per running sequence, at the worst moment of a step.

        Either all have started together and those that are left hold most; or sequences end and start steadily, and one
        caught at random has E[L^2] / 2 E[L] tokens of its response.
        """
        steady = prompt_lengths.mean + response_lengths.mean_square / (2 * response_lengths.mean)
        return max(steady, response_lengths.most_alive(prompt_lengths.mean)) * self.kv_token_bytes


def resident_state(parts: Bytes) -> Floats:
    """Return the part of `training_memory` that stays between steps unless it is moved to the host."""
    return np.sum([parts[name] for name in STATE + FROZEN], axis=0)


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
