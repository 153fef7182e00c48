"""The engines and training layouts of a job: their costs, by shapes and data sheets, and their memory."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self

import numpy as np

from gcore_placement.cluster import ADAMW_TRAFFIC_BYTES, Cluster, Efficiency
from gcore_placement.costs import EngineLaws, TrainingLaws, times
from gcore_placement.forecast import (
    Correction,
    EngineStage,
    Job,
    last_judgement_s,
    training_seconds,
    waves_seconds,
)
from gcore_placement.planning.layouts import (
    Backend,
    EngineLayout,
    TrainingLayouts,
    count_micro_batches,
    divides_heads,
    powers,
    training_layouts,
)
from gcore_placement.planning.memory import (
    DEFAULT_STATE,
    MASTER_BYTES,
    Bytes,
    EngineMemory,
    TrainingState,
    offloaded_optimizer_bytes,
    resident_state,
    total,
    training_memory,
)
from gcore_placement.quantities import Floats

_FLOPS_PER_WEIGHT = 2


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
    runnable: bool = False
    """Only plans that gcore-llm can run; see `plan`."""
    state: TrainingState = DEFAULT_STATE
    """The form in which the models in training are held."""

    @property
    def usable_bytes(self) -> float:
        """Usable memory of each device."""
        return self.efficiency.usable_bytes(self.cluster.device)


@dataclass(frozen=True, kw_only=True)
class EngineRoofline(EngineMemory):
    """One replica of a model on `tp` devices of a cluster, with its seconds."""

    cluster: Cluster
    efficiency: Efficiency

    @classmethod
    def of(
        cls, job: Job, stage: EngineStage, *, cluster: Cluster, tp: int, efficiency: Efficiency
    ) -> Self:
        """Return a replica of a stage's model."""
        model, _, _ = job.engine_role(stage)
        return cls(
            model=model,
            cluster=cluster,
            tp=tp,
            compute_bytes=job.compute_bytes,
            efficiency=efficiency,
        )

    def laws(self, max_num_seqs: Floats) -> EngineLaws:
        """Return the replica's laws for several maxima of running sequences, each linear in the number that runs.

        A law goes through `decode_s` at one sequence and at its most. Between them `decode_s` of a dense model is at
        most as high; that of a mixture of experts can be higher, for few sequences meet many experts.
        """
        one_s = float(self.decode_s(np.ones(1))[0])
        per_sequence_s = (self.decode_s(max_num_seqs) - one_s) / np.maximum(1.0, max_num_seqs - 1)
        return EngineLaws(
            devices_per_replica=self.tp,
            max_num_seqs=max_num_seqs,
            decode_base_s=np.maximum(0.0, one_s - per_sequence_s),
            decode_per_sequence_s=per_sequence_s,
            decode_per_context_token_s=self.kv_token_bytes * self._byte_s,
            prefill_per_token_s=self._products_s(self.efficiency.prefill) + self._sums_s,
        )

    def decode_s(self, num_seqs: Floats) -> Floats:
        """Return the seconds of a decoding step of `num_seqs` sequences, without reading their keys and values.

        The weights are read (of experts, those that a token goes to) and multiplied by, see `Efficiency.overlap`; two
        sums over the devices in each layer; and the overhead of a step. The result has the shape of `num_seqs`.
        """
        reading_s = (
            self.compute_bytes * self.model.parameters_read(num_seqs) / self.tp * self._byte_s
        )
        computing_s = num_seqs * self._products_s(self.efficiency.decode)
        starts_s = (
            2 * self.model.workload.num_hidden_layers * self.efficiency.all_reduce_s
            if self.tp > 1
            else 0.0
        )
        overhead_s = self.efficiency.decode_step_s + num_seqs * self.efficiency.decode_sequence_s
        overhead_s = (
            overhead_s + self.model.workload.num_moe_layers * self.efficiency.decode_mixture_s
        )
        return (
            self.efficiency.together_s(reading_s, computing_s)
            + starts_s
            + num_seqs * self._sums_s
            + overhead_s
        )

    @property
    def _byte_s(self) -> float:
        return 1 / (self.cluster.device.memory_bytes_per_s * self.efficiency.memory)

    def _products_s(self, share: float) -> float:
        """Return the seconds of a token's matrix products."""
        flops = _FLOPS_PER_WEIGHT * self.model.num_multiplied_parameters
        return flops / (self.tp * self.cluster.device.flops_per_s * share)

    @property
    def _sums_s(self) -> float:
        """The seconds of a token's two sums in each layer, over a ring."""
        workload = self.model.workload
        size_bytes = 2 * workload.num_hidden_layers * workload.hidden_size * self.compute_bytes
        rate = self.cluster.link_bytes_per_s(self.tp) * self.efficiency.links
        return 2 * size_bytes * (self.tp - 1) / self.tp / rate


_MEMORY_STEPS = 128
"""Free memory is rounded down to this share of a device's, so that few tables serve all layouts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Engines:
    """Engines of one size on 1, 2, ... replicas. Arrays end in that axis, [num_replicas]."""

    tp: int
    weights_bytes: float
    memory: Bytes
    laws: EngineLaws
    waves_s: Floats
    """[num_waves, num_replicas] seconds."""
    last_s: Floats
    """Seconds of the last judgement; 0 for a policy."""

    def layout(self, num_replicas: int) -> EngineLayout:
        """Return the layout of `num_replicas`."""
        return EngineLayout(
            num_engines=num_replicas,
            devices_per_engine=self.tp,
            max_num_seqs=int(self.laws.max_num_seqs[num_replicas - 1]),
        )


class EngineOptions:
    """The possible engines of a stage: the policy's, or the judge's."""

    def __init__(self, setting: Setting, stage: EngineStage) -> None:
        self._setting = setting
        self._stage: EngineStage = stage
        self.model, self._read, self._written = setting.job.engine_role(stage)
        self._roofline = partial(
            EngineRoofline.of,
            setting.job,
            stage,
            cluster=setting.cluster,
            efficiency=setting.efficiency,
        )
        self._build = cache(self._engines)

    def sizes(self, num_devices: int) -> list[int]:
        """Return all tensor-parallel sizes, including those that do not fit into memory.

        They are powers of two that divide the heads, in a node or, where the plan need not be runnable, over whole
        ones.
        """
        node = self._setting.cluster.devices_per_node
        max_tp = min(num_devices, self.model.workload.num_attention_heads)
        if self._setting.runnable:
            max_tp = min(max_tp, node)
        sizes: list[int] = []
        for tp in powers(max_tp):
            fits_nodes = tp <= node or not tp % node
            if fits_nodes and divides_heads(self.model, tp):
                sizes.append(tp)
        return sizes

    def of(self, num_devices: int, free_bytes: float) -> list[Engines]:
        """Return the engines that fit into `free_bytes` of each of `num_devices`, smallest first."""
        steps = int(free_bytes / self._setting.cluster.device.memory_bytes * _MEMORY_STEPS)
        by_size = [self._build(tp, steps) for tp in self.sizes(num_devices)]
        return [engines for engines in by_size if engines is not None]

    def least_bytes(self, tp: int) -> float:
        """Return the bytes that each device of an engine needs: weights, workspace, and the longest sequence."""
        roofline = self._roofline(tp=tp)
        return (
            roofline.weights_bytes
            + roofline.workspace_bytes
            + self._longest * roofline.kv_token_bytes
        )

    @property
    def _longest(self) -> float:
        return self._read.longest + self._written.longest

    def _engines(self, tp: int, memory_steps: int) -> Engines | None:
        job = self._setting.job
        cluster = self._setting.cluster
        roofline = self._roofline(tp=tp)
        free_bytes = memory_steps / _MEMORY_STEPS * cluster.device.memory_bytes
        sequence_bytes = roofline.sequence_bytes(self._read, self._written)
        free_for_kv = free_bytes - roofline.weights_bytes - roofline.workspace_bytes
        max_num_seqs = min(self._setting.most_num_seqs, int(free_for_kv / sequence_bytes))
        if max_num_seqs < 1 or free_bytes < self.least_bytes(tp):
            return None
        replicas = np.arange(1, cluster.num_devices // tp + 1, dtype=np.float64)
        # No engine is sized for more sequences than it gets.
        replica_seqs = np.ceil(job.wave_prompts.max() * job.n / replicas)
        laws = roofline.laws(np.clip(replica_seqs, 1, max_num_seqs))
        laws = times(laws, self._setting.correction.factor(self._stage))
        last_s = np.zeros(replicas.size)
        if self._stage == "reward":
            last_s = last_judgement_s(laws, job)
        return Engines(
            tp=tp,
            weights_bytes=roofline.weights_bytes,
            memory={
                "weights": np.full(replicas.size, roofline.weights_bytes),
                "workspace": np.full(replicas.size, roofline.workspace_bytes),
                "KV cache": np.maximum(
                    laws.max_num_seqs * sequence_bytes, self._longest * roofline.kv_token_bytes
                ),
            },
            laws=laws,
            waves_s=waves_seconds(laws, job, self._stage, replicas),
            last_s=last_s,
        )


_FORWARD = 1 / 3
"""Share of the forward pass in the FLOPs of a forward and a backward pass."""
_LOGIT_PASSES = 26
"""Reads and writes of a token's logits in float32, half of them in the backward pass."""


def training_laws(
    job: Job,
    layouts: TrainingLayouts,
    *,
    cluster: Cluster,
    efficiency: Efficiency,
    state: TrainingState = DEFAULT_STATE,
) -> TrainingLaws:
    """Return the laws of all layouts.

    Products, experts and attention take their FLOPs over their shares of the peak, a third more where they are
    recomputed, as the head always is (its logits are made a chunk at a time, and again for the backward pass), and
    1 + (PP - 1) / m times that for the pipeline's bubble at m micro-batches (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2.1), m those of an update. Experts compute whole tiles, see `TransformerWorkload.expert_tiles`.
    Reading and writing logits takes long where a vocabulary is large and a model small. Added to each token, and not
    hidden by any of this:

    - TP with sequence parallelism: four gathers or scatters of the token's state in each layer's forward pass, and as
      many in its backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2);
    - CP: each rank gets all others' keys and values, forward and backward, and their gradients;
    - PP: the state and its gradient cross each stage's border;
    - EP: the state goes to each of the token's experts and back in each pass.

    Added to each update: AdamW's traffic, and the gradients' scatter and the weights' gather (ZeRO-1); to each of its
    micro-batches, at least one, `Efficiency.micro_batch_s`, and, as far as products do not hide them, the gathers of
    all weights and the gradients' scatter of ZeRO-3 (Rajbhandari et al. 2019, arXiv 1910.02054, section 7).

    With LoRA the policy's frozen weights have no gradients: a third of the products of a forward and backward pass, the
    scatter and AdamW's traffic are left to the adapters. An optimizer in the host's memory gets all gradients and gives
    the weights back over the link to the host, and updates at `Efficiency.host_update_s`.
    """
    tp = layouts.tp
    pp = layouts.pp
    cp = layouts.cp
    ranks = layouts.ranks
    num_devices = layouts.num_devices
    memory_rate = cluster.device.memory_bytes_per_s * efficiency.memory
    flop_s = 1 / (cluster.device.flops_per_s * efficiency.training)
    expert_flop_s = 1 / (cluster.device.flops_per_s * efficiency.experts)
    attention_flop_s = 1 / (cluster.device.flops_per_s * efficiency.attention)
    updates = job.num_updates
    replica_tokens, micro_batches = count_micro_batches(job, layouts)
    rank_tokens = replica_tokens / micro_batches / cp
    bubble = 1 + (pp - 1) / micro_batches
    passes = np.where(layouts.recompute, 3.0, 2.0)

    def rate(sizes: Floats) -> Floats:
        """Return the bytes per second of each device in groups of these sizes."""
        return np.array([cluster.link_bytes_per_s(int(size)) for size in sizes]) * efficiency.links

    base = per_token = per_pair = computed = np.zeros(len(layouts))
    for number, model in enumerate(job.trained_models):
        w = model.workload
        is_frozen = bool(state.adapter_parameters) and not number
        first_share = 1 - _FORWARD if is_frozen else 1.0
        recomputed_share = np.where(
            layouts.recompute, 1.0, model.head_flops_per_token / w.flops_per_token
        )
        flops = (first_share + _FORWARD * recomputed_share) * w.flops_per_token
        tiles = w.expert_tiles(rank_tokens * np.where(layouts.ep > 1, layouts.ep / tp, 1.0))
        expert_flops = (first_share + _FORWARD * layouts.recompute) * w.expert_flops_per_token
        slow_s = expert_flops * (tiles * expert_flop_s - flop_s)
        logits_s = MASTER_BYTES * _LOGIT_PASSES * w.vocab_size / memory_rate
        computing = bubble * (flops * flop_s + slow_s + logits_s)
        pairs = (
            bubble
            * (1 + _FORWARD * layouts.recompute)
            * w.flops_per_attended_pair
            * attention_flop_s
        )
        model_s = (computing * job.training_tokens + pairs * job.training_pairs) / num_devices

        state_bytes = float(w.hidden_size * job.compute_bytes)
        kv_bytes = float(w.key_value_size * job.compute_bytes)
        # In a group of g ranks, each waits while (g - 1) / g of a message of the group's tokens is on its link.
        tensor_s = passes * 4 * w.num_hidden_layers * state_bytes * (tp - 1) / rate(tp)
        context_s = (passes + 1) * w.num_hidden_layers * kv_bytes * (cp - 1) / rate(tp * cp)
        pipeline_s = 2 * state_bytes * (pp - 1) / rate(tp * cp * pp)

        # Each token's state goes to its experts and comes back.
        sent_bytes = 2 * w.num_experts_per_tok * state_bytes
        exchange_s = (
            passes * w.num_moe_layers * sent_bytes * (1 - 1 / layouts.ep) / rate(layouts.ep)
        )
        expert_s = np.where(layouts.ep > 1, exchange_s, 0.0)

        num_trained = state.adapter_parameters if is_frozen else model.num_parameters
        parameters = num_trained / (tp * pp)
        adam_s = ADAMW_TRAFFIC_BYTES * parameters / ranks / memory_rate
        if state.offload != "none":
            moved_s = (MASTER_BYTES + job.compute_bytes) / (
                cluster.device.host_bytes_per_s * efficiency.host
            )
            adam_s = parameters / ranks * (moved_s + efficiency.host_update_s)
        zero_1_s = (
            (MASTER_BYTES + job.compute_bytes)
            * parameters
            * (ranks - 1)
            / ranks
            / rate(num_devices)
        )
        gathered_bytes = 2 * job.compute_bytes * model.num_parameters + MASTER_BYTES * num_trained
        zero_3_s = micro_batches * (
            gathered_bytes * (num_devices - 1) / num_devices / rate(num_devices)
        )

        computed = computed + flops
        per_token = per_token + computing + bubble * (tensor_s + context_s + pipeline_s + expert_s)
        per_pair = per_pair + pairs
        base = base + updates * (adam_s + np.where(layouts.sharded, 0.0, zero_1_s))
        base = base + np.where(
            layouts.sharded, efficiency.together_s(updates * zero_3_s, model_s) - model_s, 0.0
        )
        base = base + updates * micro_batches * efficiency.micro_batch_s
    return TrainingLaws(
        base_s=base,
        per_token_s=per_token,
        per_pair_s=per_pair,
        forward_share=_FORWARD
        * sum(m.workload.flops_per_token for m in job.trained_models)
        / computed
        / len(job.trained_models),
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
    host_bytes: float
    """Bytes in the host's memory of each device, also while it trains."""


class TrainingOptions:
    """All layouts of a number of devices, with the seconds of a step's preparation and training: [num_layouts]."""

    def __init__(self, setting: Setting, num_devices: int) -> None:
        self._setting = setting
        job = setting.job
        cluster = setting.cluster
        efficiency = setting.efficiency
        correction = setting.correction
        backends: tuple[Backend, ...] = ("torch",) if setting.runnable else ("torch", "megatron")
        self.layouts = training_layouts(job, cluster, num_devices, backends=backends)
        # A run meets steps with more than the mean work.
        state = setting.state
        self.memory = training_memory(
            job,
            self.layouts,
            activations=efficiency.activations,
            state=state,
            fills_budget=setting.runnable,
        )
        self.total_bytes = total(self.memory)
        self.state_bytes = resident_state(self.memory)
        self.host_bytes = np.zeros(len(self.layouts))
        """Bytes in the host's memory at all times, of an optimizer that is offloaded."""
        if state.offload != "none":
            on_devices = training_memory(job, self.layouts, state=replace(state, offload="none"))
            self.host_bytes = offloaded_optimizer_bytes(on_devices["optimizer"], job, state)
        laws = training_laws(job, self.layouts, cluster=cluster, efficiency=efficiency, state=state)
        self.laws = correction.training(laws)
        preparation_s, training_s = training_seconds(
            self.laws, job.training_tokens, job.training_pairs, num_devices
        )
        self.seconds = preparation_s + training_s
        rate = cluster.device.host_bytes_per_s * efficiency.host
        self.moving_s = correction.factor("training") * (2 * self.state_bytes / rate)
        """Seconds to bring the state from the host's memory and back."""
        self.offloaded_s = self.seconds + self.moving_s
        """Seconds of layouts whose state moves to the host while engines work."""

    def choices(self) -> list[TrainingChoice]:
        """Return the layouts to try.

        Of those that fit: the fastest that moves its state to the host, and each that keeps its state on the devices,
        unless another is both faster and smaller.
        """
        choices: list[TrainingChoice] = []
        fits = self.total_bytes <= self._setting.usable_bytes
        in_host = fits & (
            self.state_bytes + self.host_bytes <= self._setting.cluster.host_memory_bytes
        )
        if in_host.any():
            offloaded_s = np.where(in_host, self.offloaded_s, np.inf)
            choices.append(self._choice(int(offloaded_s.argmin()), offload=True))
        smallest = np.inf
        order = np.lexsort((self.state_bytes, self.seconds))
        for index in order[fits[order]].tolist():
            if self.state_bytes[index] < smallest:
                smallest = self.state_bytes[index]
                choices.append(self._choice(index, offload=False))
        return choices

    def _choice(self, index: int, *, offload: bool) -> TrainingChoice:
        seconds = self.offloaded_s if offload else self.seconds
        return TrainingChoice(
            layout=index,
            offload=offload,
            seconds=float(seconds[index]),
            state_bytes=float(self.state_bytes[index]),
            host_bytes=float(self.host_bytes[index]),
        )
