"""The memory of one device that the trainer and the engines of a job share: side by side, or by turns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from gcore_placement.cluster import Cluster, Device, Efficiency
from gcore_placement.forecast import EngineStage, Job
from gcore_placement.planning.layouts import (
    DEFAULT_STATE,
    MASTER_BYTES,
    TrainingLayout,
    TrainingLayouts,
    TrainingState,
    embedding_bytes,
    parts_at,
    training_memory,
)
from gcore_placement.planning.options import EngineRoofline
from gcore_placement.quantities import Amount, Checked, Positive

Resident = Literal["trainer", "policy engine", "judge"]
"""A role that is on a device; the trainer has its critic, reference and teachers with it."""
PlanStage = Literal["generate", "prepare", "train", "sync"]
"""A stage of a step, by what has to be in memory: generate, the engines; prepare, models that score; train; sync, the
trainer's state and the weights of the engine that takes them over."""

ALL_RESIDENTS: tuple[Resident, ...] = ("trainer", "policy engine", "judge")
_STATE = ("weights", "gradients", "optimizer")
_FROZEN = ("reference", "teachers")
_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Checked):
    """The engines of a job on the device, all alike."""

    max_num_seqs: Positive = 256
    """Most sequences at once."""
    max_num_batched_tokens: Positive = 8192
    """Most tokens of a pass."""
    devices_per_engine: Positive = 1
    """Devices over which the model of each engine of the policy is split."""
    devices_per_judge: Positive = 1
    """Devices over which a judge's is."""
    reserve_bytes: Amount = 1.5e9
    """Bytes of CUDA graphs and of the libraries' own, for each engine."""
    copies_weights: Literal["none", "merged", "all"] = "none"
    """New weights that are whole on the device once more while the engine takes them over: merged, those that adapters
    are merged into, for an engine that takes all at once; all, for one in a process of its own."""
    takes_turns: bool | None = None
    """Whether the trainer leaves the device while the engines work, and these while the trainer does; None: if not all
    fits side by side."""
    judge_takes_turns: bool = False
    """One of the policy's engine and the judge is asleep while the other works."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change under which a job fits."""

    names: Sequence[str]
    """Names of the changes, of `REMEDIES`; all of them are needed."""
    peak_bytes: float
    """Bytes at the fullest stage, with as many keys and values as fit."""


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The memory of one device by role and by stage, in bytes."""

    device_bytes: float
    usable_bytes: float
    """Bytes that may be planned with."""
    roles: Mapping[str, Mapping[str, float]]
    """Bytes of each item of each role: trainer, reference, teachers, critic, policy engine, judge, and given others."""
    peaks: Mapping[PlanStage, float]
    """Bytes at the fullest moment of each stage."""
    host: Mapping[str, float]
    """Bytes in the host's memory by item: optimizer states and activations that are offloaded, models of the trainer
    and engines that sleep, and the copy that a checkpoint is written from."""
    kv_tokens: int
    """Capacity of the policy's engine for keys and values, in tokens."""
    judge_kv_tokens: int
    takes_turns: bool
    longest_sequence: int
    """Tokens of the longest prompt and response together, the least capacity of the engine."""
    remedies: Sequence[Remedy] = field(default=())
    """Changes under which the job fits; empty if it fits as it is."""

    @property
    def fits(self) -> bool:
        """True if no stage needs more than the usable bytes."""
        return max(self.peaks.values()) <= self.usable_bytes

    @property
    def host_bytes(self) -> float:
        """Bytes of all items in the host's memory."""
        return float(sum(self.host.values()))

    @property
    def fullest(self) -> PlanStage:
        """The stage that needs most."""
        return max(self.peaks, key=lambda stage: self.peaks[stage])

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the keys and values in the policy's engine."""
        return int(self.roles.get("policy engine", {}).get("keys and values", 0))

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of the device's memory that the policy's engine may use, as vLLM has it."""
        return self.share("policy engine") / self.device_bytes

    def share(self, role: str) -> float:
        """Return the bytes of all items of a role; 0 for one that is not there."""
        return float(sum(self.roles.get(role, {}).values()))


def plan_one_device(
    job: Job,
    layout: TrainingLayout,
    engine: EngineSettings,
    device: Device,
    *,
    state: TrainingState = DEFAULT_STATE,
    others: Mapping[str, float] | None = None,
    efficiency: Efficiency | None = None,
    residents: Collection[Resident] = ALL_RESIDENTS,
) -> DevicePlan:
    """Plan the memory of one device: the trainer's share by `training_memory`, and the engines' from the rest.

    Side by side, the engines get the memory that the peak of training leaves; by turns, all of it. Each engine gets
    keys and values for all sequences that it may run, as far as there is memory, and at least for the longest one.

    Args:
        job: the models and lengths; lengths are taken at their longest, so nothing depends on which are sampled.
        layout: the trainer's, whose parts on this device count; one that has other devices has all of these alike.
        state: the form in which the models in training are held.
        others: bytes of other models that stay on the device, by role, such as a reward model.
        efficiency: its usable share of the memory, and its factor of activations; None: the defaults.
        residents: who is on the device, as far as the job has them; on clusters devices differ.

    Returns:
        the plan; where it does not fit, with `DevicePlan.remedies`.
    """
    planner = _Planner(
        job, layout, engine, device, state, others or {}, efficiency or Efficiency(), residents
    )
    plan = planner.plan()
    return plan if plan.fits else replace(plan, remedies=planner.remedies())


@dataclass(frozen=True)
class _Planner:
    job: Job
    layout: TrainingLayout
    engine: EngineSettings
    device: Device
    state: TrainingState
    others: Mapping[str, float]
    efficiency: Efficiency
    residents: Collection[Resident]

    def plan(self) -> DevicePlan:
        """Plan with turns if they are asked for, or are needed and not excluded."""
        if self.engine.takes_turns is not None:
            return self._plan_memory(takes_turns=self.engine.takes_turns)
        side_by_side = self._plan_memory(takes_turns=False)
        has_all = True
        if "policy engine" in self.residents:
            has_all = side_by_side.kv_tokens >= self._max_tokens("generation")
        if side_by_side.fits and has_all:
            return side_by_side
        return self._plan_memory(takes_turns=True)

    def remedies(self) -> list[Remedy]:
        """Return the changes that help alone; if none does, the fewest of the first ones that help together."""
        single: list[Remedy] = []
        combined: list[Remedy] = []
        together = self
        names: list[str] = []
        for name, change in REMEDIES.items():
            alone = change(self)
            if alone == self:
                continue
            plan = alone.plan()
            if plan.fits:
                single.append(Remedy(names=(name,), peak_bytes=max(plan.peaks.values())))
            together = change(together)
            names.append(name)
            if single or combined:
                continue
            plan = together.plan()
            if plan.fits:
                combined.append(Remedy(names=tuple(names), peak_bytes=max(plan.peaks.values())))
        return single or combined

    def _plan_memory(self, *, takes_turns: bool) -> DevicePlan:
        job = self.job
        usable = self.device.memory_bytes * self.efficiency.free_memory
        parts = self._training_parts(job, self.state)
        without_critic = self._training_parts(replace(job, critic=None), self.state)
        resident = sum(parts[name] for name in _STATE + _FROZEN)
        resident_models = sum(self.others.values())
        train = sum(parts.values())
        # A pass that only scores keeps one layer's activations at a time.
        layer = job.policy.activations_per_token * job.compute_bytes * self._tokens
        scoring = 0.0
        if "trainer" in self.residents:
            scoring = max(self.efficiency.activations * layer, parts["logits"])
        engine_free = (
            usable - resident_models if takes_turns else usable - (resident_models + train)
        )
        policy, judge = self._engines(engine_free)
        engine_bytes = (sum(policy.values()), sum(judge.values()))
        engines = max(engine_bytes) if self.engine.judge_takes_turns else sum(engine_bytes)
        # Weights pass from the trainer to the engine a tensor at a time, or all at once.
        copied = self.engine.copies_weights
        has_adapters = bool(self.state.adapter_parameters)
        bucket = 0.0
        if policy:
            bucket = embedding_bytes(job)
            if copied == "all" or (has_adapters and (copied == "merged" or not takes_turns)):
                # An engine that keeps its old weights until it has all new ones takes them all at once.
                bucket = policy["weights"]
        awake_in_training = engines
        awake_in_sync = engines
        resident_in_generation = resident
        if takes_turns:
            awake_in_training = 0.0
            awake_in_sync = policy.get("weights", 0.0)
            resident_in_generation = 0.0
        peaks: dict[PlanStage, float] = {
            "generate": resident_models + engines + resident_in_generation,
            "prepare": resident_models + awake_in_training + resident + parts["gathered"] + scoring,
            "train": resident_models + awake_in_training + train,
            "sync": resident_models + resident + bucket + awake_in_sync,
        }
        kv_tokens = 0
        judge_kv_tokens = 0
        roles: dict[str, dict[str, float]] = {}
        if policy:
            roles["policy engine"] = policy
            kv_tokens = self._kv_tokens("generation", policy)
        if "trainer" in self.residents:
            roles["trainer"] = {
                name: size for name, size in without_critic.items() if name not in _FROZEN
            }
            if job.critic is not None:
                roles["critic"] = {name: parts[name] - without_critic[name] for name in _STATE}
            if job.reference:
                roles["reference"] = {"weights": parts["reference"]}
            if job.teachers:
                roles["teachers"] = {"weights": parts["teachers"]}
        if judge:
            roles["judge"] = judge
            judge_kv_tokens = self._kv_tokens("reward", judge)
        return DevicePlan(
            device_bytes=self.device.memory_bytes,
            usable_bytes=usable,
            roles=roles | {name: {"weights": size} for name, size in self.others.items()},
            peaks=peaks,
            host=self._host([policy, judge], takes_turns=takes_turns),
            kv_tokens=kv_tokens,
            judge_kv_tokens=judge_kv_tokens,
            takes_turns=takes_turns,
            longest_sequence=job.longest_sequence,
        )

    def _host(
        self, engines: Sequence[Mapping[str, float]], *, takes_turns: bool
    ) -> dict[str, float]:
        """Return the bytes in the host's memory: offloaded states and models, and sleeping engines; no gradients."""
        job = self.job
        offload = self.state.offload
        layout = self.layout
        on_device = self._training_parts(
            job, replace(self.state, offload="none", activation_offload=False)
        )
        states = on_device["optimizer"] if takes_turns else 0.0
        models = 0.0
        sleeping = 0.0
        if takes_turns or (self.engine.judge_takes_turns and all(engines)):
            sleeping = sum(engine.get("weights", 0.0) for engine in engines)
        if offload != "none" and "trainer" in self.residents:
            # Master weights and a gradient in float32, and two moments.
            states = (2 + self.state.moment_bytes(job.policy) / MASTER_BYTES) * on_device[
                "gradients"
            ]
        if takes_turns or (offload == "all" and self.has_several_models):
            models = on_device["weights"] + sum(on_device[name] for name in _FROZEN)
        offloaded = on_device["activations"] - self._training_parts(job, self.state)["activations"]
        # Master weights and two moments in float32, of which each rank has a share.
        num_shares = (
            1
            if layout.backend == "torch"
            else layout.data_parallel_size * layout.context_parallel_size
        )
        return {
            "optimizer states": states,
            "models": models,
            "engines": sleeping,
            "activations": offloaded,
            "checkpoint": 3 * on_device["gradients"] / num_shares,
        }

    @property
    def has_several_models(self) -> bool:
        """True if the trainer has models besides the policy."""
        return bool(self.job.critic is not None or self.job.reference or self.job.teachers)

    @property
    def _tokens(self) -> float:
        """Tokens of a micro-batch on this device."""
        tokens = min(self.layout.ppo_max_token_len, self.job.training_tokens)
        return max(self.job.longest_sequence, tokens) / self.layout.context_parallel_size

    def _training_parts(self, job: Job, state: TrainingState) -> dict[str, float]:
        layouts = TrainingLayouts.of(self.layout)
        if "trainer" not in self.residents:
            return dict.fromkeys(training_memory(job, layouts), 0.0)
        return parts_at(
            training_memory(job, layouts, activations=self.efficiency.activations, state=state), 0
        )

    def _engines(self, free_bytes: float) -> tuple[dict[str, float], dict[str, float]]:
        """Divide the free bytes between the engines of the policy and the judge, by the most tokens of each."""
        fixed: dict[EngineStage, dict[str, float]] = {}
        if "policy engine" in self.residents:
            fixed["generation"] = self._fixed_bytes("generation")
        if "judge" in self.residents and self.job.judge is not None:
            fixed["reward"] = self._fixed_bytes("reward")
        most_kv = {
            stage: self._max_tokens(stage) * self._roofline(stage).kv_token_bytes for stage in fixed
        }
        engines: dict[EngineStage, dict[str, float]] = {}
        for stage, items in fixed.items():
            awake: list[EngineStage] = [stage] if self.engine.judge_takes_turns else list(fixed)
            free = free_bytes - sum(sum(fixed[name].values()) for name in awake)
            part = min(1.0, max(0.0, free) / sum(most_kv[name] for name in awake))
            least = self._longest(stage) * self._roofline(stage).kv_token_bytes
            engines[stage] = {**items, "keys and values": max(least, part * most_kv[stage])}
        return engines.get("generation", {}), engines.get("reward", {})

    def _fixed_bytes(self, stage: EngineStage) -> dict[str, float]:
        roofline = self._roofline(stage)
        w = self.job.engine_role(stage)[0].workload
        share = self.engine.max_num_batched_tokens / 8192
        # Logits of the running sequences in float32, and their probabilities.
        sampling = 2.0 * 4 * self.engine.max_num_seqs * w.vocab_size
        return {
            "weights": roofline.weights_bytes,
            "workspace": roofline.workspace_bytes * share + sampling,
            "graphs and libraries": self.engine.reserve_bytes,
        }

    def _roofline(self, stage: EngineStage) -> EngineRoofline:
        tp = (
            self.engine.devices_per_engine
            if stage == "generation"
            else self.engine.devices_per_judge
        )
        cluster = Cluster(num_devices=tp, device=self.device)
        return EngineRoofline.of(
            self.job, stage, cluster=cluster, tp=tp, efficiency=self.efficiency
        )

    def _longest(self, stage: EngineStage) -> int:
        _, read, written = self.job.engine_role(stage)
        return int(np.ceil(read.longest + written.longest))

    def _max_tokens(self, stage: EngineStage) -> int:
        """Return the tokens of all sequences that the engine may run at once, at their longest."""
        return self._longest(stage) * min(
            self.engine.max_num_seqs, self.job.train_batch_size * self.job.n
        )

    def _kv_tokens(self, stage: EngineStage, items: Mapping[str, float]) -> int:
        return int(items["keys and values"] / self._roofline(stage).kv_token_bytes + 1e-6)


def _with_state(planner: _Planner, **changes: Any) -> _Planner:
    return replace(planner, state=replace(planner.state, **changes))


def _with_checkpointing(planner: _Planner) -> _Planner:
    layout = replace(planner.layout, gradient_checkpointing=True)
    return replace(_with_state(planner, checkpointed_share=1.0), layout=layout)


def _with_small_micro_batches(planner: _Planner) -> _Planner:
    fewest = min(planner.layout.ppo_max_token_len, planner.job.longest_sequence)
    return replace(planner, layout=replace(planner.layout, ppo_max_token_len=fewest))


def _with_frequent_sync(planner: _Planner) -> _Planner:
    return _with_state(planner, gradient_sync="micro_batch")


def _with_turns(planner: _Planner) -> _Planner:
    return replace(planner, engine=replace(planner.engine, takes_turns=None))


def _with_8bit_moments(planner: _Planner) -> _Planner:
    if planner.state.offload != "none" or planner.layout.backend != "torch":
        return planner
    return _with_state(planner, moments="8bit")


def _with_optimizer_offload(planner: _Planner) -> _Planner:
    if planner.state.offload == "all":
        return planner
    return _with_state(planner, offload="optimizer")


def _with_offload(planner: _Planner) -> _Planner:
    if not planner.has_several_models:
        # A model alone is always at work.
        return planner
    return _with_state(planner, offload="all")


def _with_lora(planner: _Planner) -> _Planner:
    if planner.state.adapter_parameters:
        return planner
    return _with_state(
        planner, adapter_parameters=planner.job.policy.adapter_parameters(_LORA_RANK)
    )


REMEDIES = {
    "turns": _with_turns,
    "gradient checkpointing": _with_checkpointing,
    "small micro-batches": _with_small_micro_batches,
    "frequent gradient exchange": _with_frequent_sync,
    "8-bit moments": _with_8bit_moments,
    "optimizer offload": _with_optimizer_offload,
    "full offload": _with_offload,
    "LoRA": _with_lora,
}
"""Changes that save memory, by name, those that cost least first: turns of trainer and engine; gradient checkpointing;
micro-batches of one longest sequence; gradients that ranks exchange in each of them; AdamW's moments in 8 bits;
optimizer states in the host's memory, then all but those of the model at work; LoRA of rank 16 in place of training all
parameters."""
