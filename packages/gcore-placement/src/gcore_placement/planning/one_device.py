"""The memory of one device that the trainer and the engines of a job share: side by side, or by turns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from gcore_placement.cluster import Device, Efficiency
from gcore_placement.forecast import EngineStage, Job
from gcore_placement.planning.layouts import TrainingLayout, TrainingLayouts
from gcore_placement.planning.memory import (
    DEFAULT_STATE,
    FROZEN,
    LORA_RANK,
    PREFILL_TOKENS,
    STATE,
    EngineMemory,
    TrainingState,
    offloaded_optimizer_bytes,
    parts_at,
    training_memory,
    weight_sync_bytes,
)
from gcore_placement.quantities import Amount, CheckedQuantities, Positive

Resident = Literal["trainer", "policy engine", "judge"]
"""A role that is on a device; the trainer has its critic, reference and teachers with it."""
PlanStage = Literal["generate", "prepare", "train", "sync"]
"""A stage of a step, by what has to be in memory: generate, the engines; prepare, models that score; train; sync, the
trainer's state and the weights of the engine that takes them over. By turns gradients and the optimizer's states are on
the host while models score, and all but the policy's weights (and adapters with their states) in sync."""

ALL_RESIDENTS: tuple[Resident, ...] = ("trainer", "policy engine", "judge")
_ENGINE_STAGES: Mapping[Resident, EngineStage] = {"policy engine": "generation", "judge": "reward"}


@dataclass(frozen=True, kw_only=True)
class DeviceSetting(CheckedQuantities):
    """The roles of a job that share a device, and the settings that their memory depends on; its engines are all alike.

    Example:
        >>> policy = ModelShape(qkv_bias=True, tie_word_embeddings=True, workload=TransformerWorkload(
        ...     hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        ...     num_key_value_heads=2, head_dim=64, vocab_size=151936))
        >>> lengths = Lengths.recorded([1024])
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=64, n=8)
        >>> layout = TrainingLayout(backend="torch", tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        ...     context_parallel_size=1, data_parallel_size=1, gradient_checkpointing=True, ppo_max_token_len=8192)
        >>> setting = DeviceSetting(job=job, layout=layout, device=Device.named("A10G"))
        >>> plan_device(setting).fits
        True
        >>> round(plan_device(replace(setting, max_num_seqs=64, takes_turns=False)).gpu_memory_utilization, 2)
        0.19
    """

    job: Job
    """Lengths are taken at their longest, so nothing depends on which are sampled."""
    layout: TrainingLayout
    """The trainer's, whose parts on this device count; one that has other devices has all of these alike."""
    device: Device
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
    reads_from_ranks: bool = False
    """Engines read new weights from the devices of the training ranks, each of which keeps its part of the latest."""
    takes_turns: bool | None = None
    """Whether the trainer leaves the device while the engines work, and these while the trainer does; None: if not all
    fits side by side."""
    judge_takes_turns: bool = False
    """One of the policy's engine and the judge is asleep while the other works."""
    state: TrainingState = DEFAULT_STATE
    """The form in which the models in training are held."""
    further_roles: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes of other models that stay on the device, by role, such as a reward model."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Its usable share of the memory, and its factor of activations, count."""
    residents: Collection[Resident] = ALL_RESIDENTS
    """The roles that are on the device, as far as the job has them; on clusters devices differ."""

    @property
    def has_several_models(self) -> bool:
        """True if the trainer has models besides the policy."""
        return bool(self.job.critic is not None or self.job.reference or self.job.teachers)


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The memory of one device by role and by stage, in bytes.

    Example:
        >>> policy = ModelShape(qkv_bias=True, workload=TransformerWorkload(
        ...     hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        ...     num_key_value_heads=4, head_dim=128, vocab_size=152064))
        >>> lengths = Lengths.recorded([1024])
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=64, n=8)
        >>> layout = TrainingLayout(backend="torch", tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        ...     context_parallel_size=1, data_parallel_size=1, gradient_checkpointing=True, ppo_max_token_len=8192)
        >>> device_plan = plan_device(DeviceSetting(job=job, layout=layout, device=Device.named("H100")))
        >>> device_plan.fits
        False
        >>> list(device_plan.remedies)
        [('optimizer offload',), ('LoRA',)]
    """

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
    remedies: Mapping[Sequence[str], float] = field(default_factory=dict[Sequence[str], float])
    """Changes under which the job fits, by their names, of which all are needed: bytes at the fullest stage, with as
    many keys and values as fit. Empty if it fits as it is."""

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


REMEDIES = (
    "turns",
    "gradient checkpointing",
    "small micro-batches",
    "frequent gradient exchange",
    "8-bit moments",
    "optimizer offload",
    "full offload",
    "LoRA",
)
"""Changes that save memory, those that cost least first: turns of trainer and engine; gradient checkpointing;
micro-batches of one longest sequence; gradients that ranks exchange in each of them; AdamW's moments in 8 bits;
optimizer states in the host's memory, then all but those of the model at work; LoRA of rank 16 in place of training all
parameters."""


def plan_device(setting: DeviceSetting) -> DevicePlan:
    """Plan the memory of one device: the trainer's share by `training_memory`, and the engines' from the rest.

    Side by side, the engines get the memory that the peak of training leaves; by turns, all of it. Each engine gets
    keys and values for all sequences that it may run, as far as there is memory, and at least for the longest one.
    A plan that does not fit has `DevicePlan.remedies`.
    """
    plan = _choose_turns(setting)
    if plan.fits:
        return plan
    return replace(plan, remedies=_find_remedies(setting))


def _choose_turns(setting: DeviceSetting) -> DevicePlan:
    """Plan with turns if they are asked for, or are needed and not excluded."""
    if setting.takes_turns is not None:
        return _plan_memory(setting, takes_turns=setting.takes_turns)
    plan = _plan_memory(setting, takes_turns=False)
    has_all = True
    if "policy engine" in setting.residents:
        has_all = plan.kv_tokens >= _max_tokens(setting, "policy engine")
    if plan.fits and has_all:
        return plan
    return _plan_memory(setting, takes_turns=True)


def _find_remedies(setting: DeviceSetting) -> dict[Sequence[str], float]:
    """Return the changes that help alone; if none does, the fewest of the first ones that help together."""
    single: dict[Sequence[str], float] = {}
    combined: dict[Sequence[str], float] = {}
    together = setting
    names: list[str] = []
    for name in REMEDIES:
        alone = _change(setting, name)
        if alone == setting:
            continue
        peak_bytes = _fitting_peak(alone)
        if peak_bytes is not None:
            single[(name,)] = peak_bytes
        together = _change(together, name)
        names.append(name)
        if single or combined:
            continue
        peak_bytes = _fitting_peak(together)
        if peak_bytes is not None:
            combined[tuple(names)] = peak_bytes
    return single or combined


def _fitting_peak(setting: DeviceSetting) -> float | None:
    """Return the bytes of the fullest stage; None where it does not fit."""
    plan = _choose_turns(setting)
    return plan.peaks[plan.fullest] if plan.fits else None


def _change(setting: DeviceSetting, name: str) -> DeviceSetting:
    """Return the setting with one of `REMEDIES`; the same where it has that already, or cannot have it."""
    layout = setting.layout
    state = setting.state
    match name:
        case "turns":
            return replace(setting, takes_turns=None)
        case "gradient checkpointing":
            layout = replace(layout, gradient_checkpointing=True)
            state = replace(state, checkpointed_share=1.0)
        case "small micro-batches":
            fewest = min(layout.ppo_max_token_len, setting.job.longest_sequence)
            layout = replace(layout, ppo_max_token_len=fewest)
        case "frequent gradient exchange":
            state = replace(state, gradient_sync="micro_batch")
        case "8-bit moments":
            if state.offload == "none" and layout.backend == "torch":
                state = replace(state, moments="8bit")
        case "optimizer offload":
            if state.offload != "all":
                state = replace(state, offload="optimizer")
        case "full offload":
            # A model alone is always at work.
            if setting.has_several_models:
                state = replace(state, offload="all")
        case _:
            if not state.adapter_parameters:
                adapters = setting.job.policy.adapter_parameters(LORA_RANK)
                state = replace(state, adapter_parameters=adapters)
    return replace(setting, layout=layout, state=state)


def _engine_memory(setting: DeviceSetting, role: Resident) -> EngineMemory:
    model, _, _ = setting.job.engine_role(_ENGINE_STAGES[role])
    tp = setting.devices_per_engine
    if role == "judge":
        tp = setting.devices_per_judge
    return EngineMemory(model=model, tp=tp, compute_bytes=setting.job.compute_bytes)


def _longest_sequence(setting: DeviceSetting, role: Resident) -> int:
    _, read, written = setting.job.engine_role(_ENGINE_STAGES[role])
    return ceil(read.longest + written.longest)


def _max_tokens(setting: DeviceSetting, role: Resident) -> int:
    """Return the tokens of all sequences that an engine may run at once, at their longest."""
    job = setting.job
    num_seqs = min(setting.max_num_seqs, job.train_batch_size * job.n)
    return _longest_sequence(setting, role) * num_seqs


def _fixed_items(setting: DeviceSetting, memory: EngineMemory) -> dict[str, float]:
    """Return the bytes of an engine besides its keys and values."""
    passes = setting.max_num_batched_tokens / PREFILL_TOKENS
    # Logits of the running sequences in float32, and their probabilities.
    sampling = 2.0 * 4 * setting.max_num_seqs * memory.model.workload.vocab_size
    return {
        "weights": memory.weights_bytes,
        "workspace": memory.workspace_bytes * passes + sampling,
        "graphs and libraries": setting.reserve_bytes,
    }


def _divide_memory(
    setting: DeviceSetting, free_bytes: float
) -> tuple[dict[Resident, dict[str, float]], dict[Resident, int]]:
    """Divide the free bytes between the engines, by the most tokens of each; return their items and their tokens."""
    items: dict[Resident, dict[str, float]] = {}
    token_bytes: dict[Resident, float] = {}
    max_kv_bytes: dict[Resident, float] = {}
    for role in _ENGINE_STAGES:
        if role not in setting.residents or (role == "judge" and setting.job.judge is None):
            continue
        memory = _engine_memory(setting, role)
        items[role] = _fixed_items(setting, memory)
        token_bytes[role] = memory.kv_token_bytes
        max_kv_bytes[role] = _max_tokens(setting, role) * memory.kv_token_bytes
    fixed_bytes = {role: sum(sizes.values()) for role, sizes in items.items()}
    kv_tokens: dict[Resident, int] = {}
    for role, sizes in items.items():
        awake: list[Resident] = list(items)
        if setting.judge_takes_turns:
            awake = [role]
        free = free_bytes - sum(fixed_bytes[name] for name in awake)
        part = min(1.0, max(0.0, free) / sum(max_kv_bytes[name] for name in awake))
        least_bytes = _longest_sequence(setting, role) * token_bytes[role]
        kv_bytes = max(least_bytes, part * max_kv_bytes[role])
        sizes["keys and values"] = kv_bytes
        kv_tokens[role] = int(kv_bytes / token_bytes[role] + 1e-6)
    return items, kv_tokens


def _training_parts(setting: DeviceSetting) -> dict[str, float]:
    """Return the parts of `training_memory` on the device; all are 0 without the trainer."""
    parts = training_memory(
        setting.job,
        TrainingLayouts(setting.layout),
        activations=setting.efficiency.activations,
        state=setting.state,
    )
    if "trainer" not in setting.residents:
        return dict.fromkeys(parts, 0.0)
    return parts_at(parts, 0)


def _plan_memory(setting: DeviceSetting, *, takes_turns: bool) -> DevicePlan:
    job = setting.job
    usable = setting.efficiency.usable_bytes(setting.device)
    parts = _training_parts(setting)
    resident = sum(parts[name] for name in STATE + FROZEN)
    kept = _kept_part(setting)
    resident_models = sum(setting.further_roles.values()) + kept
    train = sum(parts.values())
    free_bytes = usable - (resident_models if takes_turns else resident_models + train)
    engines, kv_tokens = _divide_memory(setting, free_bytes)
    sizes = [sum(items.values()) for items in engines.values()]
    engine_bytes = max(sizes) if sizes and setting.judge_takes_turns else sum(sizes)
    weights = engines.get("policy engine", {}).get("weights", 0.0)
    awake_in_training = engine_bytes
    sync = resident + engine_bytes - weights
    resident_in_generation = resident
    resident_in_preparation = resident
    if takes_turns:
        awake_in_training = 0.0
        resident_in_generation = 0.0
        resident_in_preparation -= parts["gradients"] + parts["optimizer"]
        policy = _training_parts(replace(setting, job=replace(job, critic=None)))
        sync = policy["weights"]
        if setting.state.moments == "8bit":
            # A checkpoint computes moments of their 8 bits, on the device.
            sync = sum(parts[name] for name in STATE)
        elif setting.state.adapter_parameters:
            # They are exported from masters.
            sync += policy["gradients"] + policy["optimizer"]
    if "policy engine" in engines:
        at_once = _passes_at_once(setting, takes_turns=takes_turns)
        sync = weight_sync_bytes(job, sync, weights, at_once=at_once)
    peaks: dict[PlanStage, float] = {
        "generate": resident_models + engine_bytes + resident_in_generation,
        "prepare": resident_models
        + awake_in_training
        + resident_in_preparation
        + parts["gathered"]
        + _scoring_bytes(setting, parts["logits"]),
        "train": resident_models + awake_in_training + train,
        # Engines may still read the part of the version before.
        "sync": resident_models + sync + kept,
    }
    roles: dict[str, Mapping[str, float]] = {}
    if "policy engine" in engines:
        roles["policy engine"] = engines["policy engine"]
    if "trainer" in setting.residents:
        roles.update(_split_parts(setting, parts))
    if "judge" in engines:
        roles["judge"] = engines["judge"]
    if kept:
        roles["weights for engines"] = {"weights": kept}
    for name, size in setting.further_roles.items():
        roles[name] = {"weights": size}
    return DevicePlan(
        device_bytes=setting.device.memory_bytes,
        usable_bytes=usable,
        roles=roles,
        peaks=peaks,
        host=_plan_host(setting, parts, engines, takes_turns=takes_turns),
        kv_tokens=kv_tokens.get("policy engine", 0),
        judge_kv_tokens=kv_tokens.get("judge", 0),
        takes_turns=takes_turns,
        longest_sequence=job.longest_sequence,
    )


def _kept_part(setting: DeviceSetting) -> float:
    """Return the bytes of a rank's part of the weights that engines read from its device."""
    if not setting.reads_from_ranks or "trainer" not in setting.residents:
        return 0.0
    job = setting.job
    return job.compute_bytes * job.policy.num_parameters / setting.layout.num_ranks


def _passes_at_once(setting: DeviceSetting, *, takes_turns: bool) -> bool:
    """Return whether all new weights are on the device before the engine takes them."""
    copied = setting.copies_weights
    if not setting.state.adapter_parameters:
        return copied == "all"
    # An engine that keeps its old weights until it has all new ones takes them all at once.
    return copied != "none" or not takes_turns


def _scoring_bytes(setting: DeviceSetting, logits: float) -> float:
    """Return the bytes of a pass that only scores: it keeps one layer's activations at a time."""
    if "trainer" not in setting.residents:
        return 0.0
    job = setting.job
    tokens = min(setting.layout.ppo_max_token_len, job.training_tokens)
    tokens = max(job.longest_sequence, tokens) / setting.layout.context_parallel_size
    layer = job.policy.activations_per_token * job.compute_bytes * tokens
    return max(setting.efficiency.activations * layer, logits)


def _split_parts(
    setting: DeviceSetting, parts: Mapping[str, float]
) -> dict[str, Mapping[str, float]]:
    """Return the parts of the trainer's memory by the role that has them."""
    job = setting.job
    without_critic = parts
    if job.critic is not None:
        without_critic = _training_parts(replace(setting, job=replace(job, critic=None)))
    trainer = {name: size for name, size in without_critic.items() if name not in FROZEN}
    roles: dict[str, Mapping[str, float]] = {"trainer": trainer}
    if job.critic is not None:
        roles["critic"] = {name: parts[name] - without_critic[name] for name in STATE}
    if job.reference:
        roles["reference"] = {"weights": parts["reference"]}
    if job.teachers:
        roles["teachers"] = {"weights": parts["teachers"]}
    return roles


def _plan_host(
    setting: DeviceSetting,
    parts: Mapping[str, float],
    engines: Mapping[Resident, Mapping[str, float]],
    *,
    takes_turns: bool,
) -> dict[str, float]:
    """Return the bytes in the host's memory: offloaded states and models, and sleeping engines."""
    job = setting.job
    offload = setting.state.offload
    layout = setting.layout
    state = replace(setting.state, offload="none", activation_offload=False)
    on_device = _training_parts(replace(setting, state=state))
    states = on_device["optimizer"] if takes_turns else 0.0
    models = 0.0
    sleeping = 0.0
    if takes_turns or (setting.judge_takes_turns and len(engines) > 1):
        sleeping = sum(items["weights"] for items in engines.values())
    if offload != "none":
        states = offloaded_optimizer_bytes(on_device["optimizer"], job, state)
    if takes_turns or (offload == "all" and setting.has_several_models):
        models = on_device["weights"] + sum(on_device[name] for name in FROZEN)
    # Master weights and two moments in float32, of which each rank has a share.
    num_shares = 1
    if layout.backend == "megatron":
        num_shares = layout.data_parallel_size * layout.context_parallel_size
    return {
        "optimizer states": states,
        "models": models,
        "engines": sleeping,
        "activations": on_device["activations"] - parts["activations"],
        "checkpoint": 3 * on_device["gradients"] / num_shares,
    }
