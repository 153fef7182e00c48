"""The ways to train on a number of devices: their costs from shapes and data sheets, and those worth trying."""

from dataclasses import dataclass

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import TrainingLaws
from gcore_placement.forecast import Job
from gcore_placement.planning.layouts import (
    MASTER_BYTES,
    Setting,
    TrainingLayouts,
    resident_state,
    total,
    training_layouts,
    training_memory,
)
from gcore_placement.quantities import Floats

_FORWARD = 1 / 3
"""Share of the forward pass in the FLOPs of a forward and a backward pass."""
_LOGIT_PASSES = 26
"""Reads and writes of a token's logits in float32, half of them in the backward pass."""
_STATE_TRAFFIC_BYTES = 28
"""AdamW reads weight, gradient and two moments, and writes all but the gradient."""


def training_laws(job: Job, layouts: TrainingLayouts, *, cluster: Cluster, efficiency: Efficiency) -> TrainingLaws:
    """Return the laws of all layouts.

    Products and attention take their FLOPs over their shares of the peak, a third more where they are recomputed, as
    the head always is (its logits are made a chunk at a time, and again for the backward pass), and 1 + (PP - 1) / m
    times that for the pipeline's bubble at m micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).
    Reading and writing logits, `_LOGIT_PASSES` times, takes long where a vocabulary is large and a model small. Added
    to each token, and not hidden by any of this:

    - TP with sequence parallelism: four gathers or scatters of the token's state in each layer's forward pass, and as
      many in its backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2);
    - CP: each rank gets all others' keys and values, forward and backward, and their gradients;
    - PP: the state and its gradient cross each stage's border.

    To each step are added: the gradients' scatter and the weights' gather (ZeRO-1), or, as far as products do not hide
    them (`Efficiency.overlap`), the gathers of all weights, forward and backward, and the gradients' scatter of ZeRO-3
    in each micro-batch (Rajbhandari et al. 2019, arXiv 1910.02054, section 7); AdamW's traffic; and
    `Efficiency.micro_batch_s`.
    """
    tp, pp, cp, ranks, num_devices = layouts.tp, layouts.pp, layouts.cp, layouts.dp * layouts.cp, layouts.num_devices
    memory_rate = cluster.device.memory_bytes_per_s * efficiency.memory
    flop_s = 1 / (cluster.device.flops_per_s * efficiency.training)
    attention_flop_s = 1 / (cluster.device.flops_per_s * efficiency.attention)
    micro_batches = np.ceil(np.maximum(1.0, job.training_tokens / (layouts.dp * layouts.max_tokens)))
    bubble = 1 + (pp - 1) / micro_batches
    passes = np.where(layouts.recompute, 3.0, 2.0)

    def rate(sizes: Floats) -> Floats:
        """Return the bytes per second of each device in groups of these sizes."""
        return np.array([cluster.link_bytes_per_s(int(size)) for size in sizes]) * efficiency.links

    base = per_token = per_pair = computed = np.zeros(len(layouts))
    for model in job.trained:
        w = model.workload
        again = np.where(layouts.recompute, 1.0, model.head_flops_per_token / w.flops_per_token)
        flops = (1 + _FORWARD * again) * w.flops_per_token
        computing = bubble * (flops * flop_s + MASTER_BYTES * _LOGIT_PASSES * w.vocab_size / memory_rate)
        pairs = bubble * (1 + _FORWARD * layouts.recompute) * w.flops_per_attended_pair * attention_flop_s
        own_s = (computing * job.training_tokens + pairs * job.training_pairs) / num_devices

        state_bytes = float(w.hidden_size * job.compute_bytes)
        kv_bytes = 2.0 * w.key_value_size * job.compute_bytes
        # In a group of g ranks, each waits while (g - 1) / g of a message of the group's tokens is on its link.
        tensor_s = passes * 4 * w.num_hidden_layers * state_bytes * (tp - 1) / rate(tp)
        context_s = (passes + 1) * w.num_hidden_layers * kv_bytes * (cp - 1) / rate(tp * cp)
        pipeline_s = 2 * state_bytes * (pp - 1) / rate(tp * cp * pp)

        parameters = model.num_parameters / (tp * pp)
        adam_s = _STATE_TRAFFIC_BYTES * parameters / ranks / memory_rate
        zero_1_s = (MASTER_BYTES + job.compute_bytes) * parameters * (ranks - 1) / ranks / rate(num_devices)
        gathered_bytes = (2 * job.compute_bytes + MASTER_BYTES) * model.num_parameters
        zero_3_s = micro_batches * (gathered_bytes * (num_devices - 1) / num_devices / rate(num_devices))

        computed = computed + flops
        per_token = per_token + computing + bubble * (tensor_s + context_s + pipeline_s)
        per_pair = per_pair + pairs
        base = base + (adam_s + np.where(layouts.sharded, 0.0, zero_1_s))
        base = base + np.where(layouts.sharded, efficiency.together_s(zero_3_s, own_s) - own_s, 0.0)
        base = base + micro_batches * efficiency.micro_batch_s
    return TrainingLaws(
        base_s=base,
        per_token_s=per_token,
        per_pair_s=per_pair,
        forward_share=_FORWARD * sum(m.workload.flops_per_token for m in job.trained) / computed / len(job.trained),
        num_forward_passes=job.num_forward_passes,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingChoice:
    """A layout, and whether its state leaves the devices while engines work."""

    layout: int
    """Index among the layouts."""
    offload: bool
    seconds: float
    """Seconds of a step's preparation and training, and of moving the state."""
    state_bytes: float
    """State of each device."""


class TrainingOptions:
    """All layouts of a number of devices. Arrays are [num_layouts].

    Attributes:
        seconds: Seconds of a step's preparation and training.
        moving_s: Seconds to bring the state from the host's memory and back.
    """

    def __init__(self, setting: Setting, num_devices: int) -> None:
        job, cluster, efficiency, correction = setting.job, setting.cluster, setting.efficiency, setting.correction
        self.layouts = training_layouts(job, cluster, num_devices)
        self.memory = training_memory(job, self.layouts, activations=efficiency.activations)
        self.total_bytes, self.state_bytes = total(self.memory), resident_state(self.memory)
        self.laws = correction.training(training_laws(job, self.layouts, cluster=cluster, efficiency=efficiency))
        self.seconds = self.laws.seconds(tokens=job.training_tokens, pairs=job.training_pairs, num_devices=num_devices)
        rate = cluster.device.host_bytes_per_s * efficiency.host
        self.moving_s = correction.factor("training") * (2 * self.state_bytes / rate)

    def choices(self, usable_bytes: float, host_memory_bytes: float) -> list[TrainingChoice]:
        """Return the layouts to try: the fastest that fits and moves its state to the host, and those that fit and keep
        it where no other is both faster and smaller."""
        found: list[TrainingChoice] = []
        fits = self.total_bytes <= usable_bytes
        with_moving = np.where(fits & (self.state_bytes <= host_memory_bytes), self.seconds + self.moving_s, np.inf)
        if np.isfinite(with_moving).any():
            found.append(self._choice(int(with_moving.argmin()), offload=True))
        smallest = np.inf
        order = np.lexsort((self.state_bytes, self.seconds))
        for index in order[fits[order]].tolist():
            if self.state_bytes[index] < smallest:
                smallest = self.state_bytes[index]
                found.append(self._choice(index, offload=False))
        return found

    def _choice(self, index: int, *, offload: bool) -> TrainingChoice:
        return TrainingChoice(
            layout=index,
            offload=offload,
            seconds=float(self.seconds[index] + (self.moving_s[index] if offload else 0.0)),
            state_bytes=float(self.state_bytes[index]),
        )
