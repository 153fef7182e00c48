"""Peak bytes of a device, by what they hold, while it trains and while it generates."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gcore_placement.planning.layouts import TrainingLayouts
from gcore_placement.workload.job import Job
from gcore_placement.workload.model_shape import ModelShape

MASTER_BYTES = 4
"""Bytes of a trained parameter, of its gradient and of each of AdamW's two moments."""
MAX_LOGITS = 1 << 24
"""Most logits of a chunk, in the trainer."""
LOGITS_COPIES = 3
"""Float32 arrays of a chunk that are alive at once: log-probabilities, and two for their gradient."""
PREFILL_TOKENS = 8192
"""Most tokens of an engine's pass over prompts."""

Bytes = Mapping[str, NDArray[np.float64]]
"""Bytes of a device by part."""


def training_memory(job: Job, layouts: TrainingLayouts, *, activations: float = 1.0) -> Bytes:
    """Return the bytes of a device at the peak of a training step.

    With P parameters of the heaviest pipeline stage on a tensor-parallel rank, and s = DP x CP ranks that share them:

    - torch (ZeRO-3, Rajbhandari et al. 2019, arXiv 1910.02054, section 5; FSDP2): weights 4 P / s, gradients 4 P / s,
      moments 8 P / s, and of what is gathered two layers, the embedding and the head, and one's gradients in float32;
    - megatron (ZeRO-1, section 5.1; its distributed optimizer): weights in the compute precision, gradients 4 P,
      float32 weights and moments 12 P / s;
    - activations by Korthikanti et al. 2022 (arXiv 2205.05198, equations 4 and 5, tensor with sequence parallelism),
      see `ModelShape.activations_per_token`: of a micro-batch's N / CP tokens (all are about as large), L / PP layers
      for each of the micro-batches that the first stage has started, at most PP (one forward, one backward); with
      recomputation the layers' inputs (table 2);
    - logits a chunk at a time, and the head's gradient in float32, which FSDP's gathered gradients are already; with
      recomputation all of one layer's activations where these are more, as logits are gone by then;
    - the reference's weights, as the policy's are held, in the compute precision.

    Args:
        layouts: of shape [num_layouts].
        activations: factor of the activations, as measured.

    Returns:
        Bytes of each part, [num_layouts] each; the parts are all there is, and add up.
    """
    whole = np.maximum(job.longest_sequence, _tokens_of_a_replica(job, layouts) / _micro_batches(job, layouts))
    tokens = whole / layouts.cp
    parts: dict[str, NDArray[np.float64]] = {}
    for model in job.trained:
        for name, size in _state(model, layouts, job.compute_bytes).items():
            parts[name] = parts.get(name, 0.0) + size
    # One model computes at a time.
    parts["gathered"] = _largest([_gathered(model, layouts, job.compute_bytes) for model in job.trained])
    kept = [_kept(model, layouts, _in_flight(job, layouts)) for model in job.trained]
    parts["activations"] = activations * job.compute_bytes * tokens * _largest(kept)
    one_layer = [model.activations_per_token / layouts.tp for model in job.trained]
    layer_bytes = np.where(layouts.recompute, activations * job.compute_bytes * tokens * _largest(one_layer), 0.0)
    logits_bytes = _logits(job.policy, layouts, tokens)
    parts["logits"] = logits_bytes
    parts["recomputed layer"] = np.maximum(layer_bytes - logits_bytes, 0.0)
    parts["reference"] = np.zeros(len(layouts))
    if job.reference:
        shared = np.where(layouts.sharded, layouts.dp * layouts.cp, 1.0)
        parts["reference"] = job.compute_bytes * _held(job.policy, layouts) / shared
    return parts


def resident_state(parts: Bytes) -> NDArray[np.float64]:
    """Return the part of `training_memory` that stays between steps unless it is moved to the host."""
    return parts["weights"] + parts["gradients"] + parts["optimizer"] + parts["reference"]


def total(parts: Bytes) -> NDArray[np.float64]:
    """Return the sum of all parts."""
    return np.sum(list(parts.values()), axis=0)


def engine_weights(model: ModelShape, tp: int, compute_bytes: int) -> float:
    """Return the bytes of a model's weights on each device of an engine."""
    return compute_bytes * model.num_parameters / tp


def engine_workspace(model: ModelShape, tp: int, compute_bytes: int) -> float:
    """Return the bytes per device of a pass over `PREFILL_TOKENS` prompt tokens: two states of a layer, and its MLP."""
    w = model.workload
    widest = max(w.intermediate_size, w.num_experts_per_tok * w.moe_intermediate_size)
    return compute_bytes * PREFILL_TOKENS * (2 * w.hidden_size + 3 * widest / tp)


def kv_bytes_per_token(model: ModelShape, tp: int, compute_bytes: int) -> float:
    """Return the bytes of a token's keys and values per device; heads are copied where there are fewer than devices."""
    return compute_bytes * model.kv_values_per_token / min(tp, model.workload.num_key_value_heads)


def _held(model: ModelShape, layouts: TrainingLayouts) -> NDArray[np.float64]:
    """Return the parameters of the heaviest stage on a tensor-parallel rank: whole layers, and embedding or head."""
    layers = np.ceil(model.workload.num_hidden_layers / layouts.pp)
    one_table = model.workload.hidden_size * (model.workload.vocab_size + 1)
    outer = np.where(layouts.pp == 1, model.num_outer_parameters, one_table)
    return (layers * model.num_layer_parameters + outer) / layouts.tp


def _state(model: ModelShape, layouts: TrainingLayouts, compute_bytes: int) -> Bytes:
    held, ranks = _held(model, layouts), layouts.dp * layouts.cp
    # Where products are in float32, weights are their own masters.
    masters = 2 * MASTER_BYTES + (MASTER_BYTES if compute_bytes != MASTER_BYTES else 0)
    return {
        "weights": np.where(layouts.sharded, MASTER_BYTES * held / ranks, compute_bytes * held),
        "gradients": MASTER_BYTES * held / np.where(layouts.sharded, ranks, 1.0),
        "optimizer": np.where(layouts.sharded, 2 * MASTER_BYTES * held, masters * held) / ranks,
    }


def _gathered(model: ModelShape, layouts: TrainingLayouts, compute_bytes: int) -> NDArray[np.float64]:
    layer, outer = model.num_layer_parameters, model.num_outer_parameters
    gathered = compute_bytes * (2 * layer + outer) + (compute_bytes + MASTER_BYTES) * max(layer, outer)
    # One rank has all its weights, and keeps a copy of them in the compute precision.
    alone = compute_bytes * model.num_parameters if compute_bytes != MASTER_BYTES else 0
    return np.where(layouts.sharded, np.where(layouts.dp * layouts.cp > 1, gathered, alone), 0.0)


def _kept(model: ModelShape, layouts: TrainingLayouts, in_flight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the activations that a token keeps until its backward pass."""
    layers = in_flight * np.ceil(model.workload.num_hidden_layers / layouts.pp)
    of_layer = np.where(layouts.recompute, model.workload.hidden_size, model.activations_per_token)
    return layers * of_layer / layouts.tp


def _in_flight(job: Job, layouts: TrainingLayouts) -> NDArray[np.float64]:
    """Return the micro-batches whose activations the first stage holds."""
    return np.minimum(layouts.pp, _micro_batches(job, layouts))


def _micro_batches(job: Job, layouts: TrainingLayouts) -> NDArray[np.float64]:
    """Return the micro-batches of a replica in a step."""
    return np.ceil(np.maximum(1.0, _tokens_of_a_replica(job, layouts) / layouts.max_tokens))


def _tokens_of_a_replica(job: Job, layouts: TrainingLayouts) -> NDArray[np.float64]:
    """Return the tokens of a replica in a step."""
    return job.training_tokens / layouts.dp


def _logits(model: ModelShape, layouts: TrainingLayouts, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    vocab_size = model.workload.vocab_size / layouts.tp
    chunk = np.minimum(MAX_LOGITS, tokens * vocab_size)
    is_gathered = layouts.sharded & (layouts.dp * layouts.cp > 1)
    head = np.where(is_gathered, 0.0, model.workload.hidden_size * vocab_size)
    return MASTER_BYTES * (LOGITS_COPIES * chunk + head)


def _largest(sizes: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.max(sizes, axis=0)
