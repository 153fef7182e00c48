"""The memory of the GPU that trainer, engine and reward models of a run share: planned, said, and refused if short."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gcore_llm.config import TrainConfig
from gcore_llm.forecast import planner_job
from gcore_llm.learning.device_places import engine_gpus, training_gpus
from gcore_llm.learning.preparation import workload_of
from gcore_placement import (
    STRATEGIES,
    Device,
    DevicePlan,
    EngineSettings,
    ModelShape,
    PlacementError,
    Resident,
    TrainingLayout,
    TrainingState,
    plan_one_device,
)
from gcore_runs import UserError, available_host_bytes, count_parameters, model_folder
from gcore_runs.simulation.forecast import model_shape
from gcore_trainer import LARGE_MODEL, SHARE_OF_GRADIENTS

_GB = 1e9
_LARGE_DEVICE_BYTES = 70 * 2**30
_ASLEEP: Mapping[str, tuple[str, ...]] = {
    "generate": ("trainer", "critic", "reference", "teachers"),
    "prepare": ("policy engine", "judge"),
    "train": ("policy engine", "judge"),
    "sync": ("judge",),
}
"""Roles that are not on the GPU at a stage, where trainer and engines take turns."""
_HELD = ("weights", "gradients", "optimizer")
"""Items that are on the GPU while weights pass to the engine."""
_MOMENTS: Mapping[str, Literal["float32", "8bit", "muon"]] = {"adamw": "float32", "adamw_8bit": "8bit", "muon": "muon"}
_PARTS = 8
"""Gradient checkpointing that is auto is tried for so many parts of the layers."""


def plan_memory(
    config: TrainConfig, model: Path, device: Device, residents: Collection[Resident] | None = None
) -> DevicePlan:
    """Plan the memory of a GPU for a run of a model's folder; see `plan_one_device`. Only headers of files are read.

    With several ranks each has a GPU of its own, and the plan is of the first, which has the first engine, too; with
    ``residents``, of a GPU of a map that has these.
    """
    rollout, judged = config.rollout, config.reward_model
    job = planner_job(config, model, shape_of)
    others: dict[str, float] = {}
    if judged.kind == "classifier" and residents is None:
        others["reward model"] = float(job.compute_bytes * count_parameters(Path(judged.path)))
    is_auto = rollout.colocated == "auto" and config.can_take_turns and residents is None and not config.lends_ranks
    is_mapped, strategy = residents is not None, config.strategy
    engine = EngineSettings(
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens or _batched_tokens(config, device),
        copies_weights=_copied(config),
        devices_per_engine=rollout.tensor_parallel_size,
        devices_per_judge=judged.judge.tensor_parallel_size,
        takes_turns=None if is_auto else config.takes_turns or config.lends_ranks,
        judge_takes_turns=is_mapped and config.judge[1] is not None and STRATEGIES[strategy].is_time_shared,
    )
    layout, state = training_layout(config, job.policy), _state(config, job.policy, device)
    everyone: Collection[Resident] = ("trainer", "policy engine", "judge")
    return plan_one_device(
        job, layout, engine, device, state=state, others=others, residents=everyone if residents is None else residents
    )


def _batched_tokens(config: TrainConfig, device: Device) -> int:
    """Return the most tokens of a pass of the engine where they are not set: vLLM's of a GPU, and those of `hf`."""
    return 16_384 if config.rollout.engine == "hf" or device.memory_bytes >= _LARGE_DEVICE_BYTES else 8192


def _copied(config: TrainConfig) -> Literal["none", "merged", "all"]:
    """Return which new weights are whole on the GPU once more; from several ranks they come by the host."""
    if config.trainer.num_processes > 1:
        return "none"
    return "all" if config.rollout.num_processes else "merged" if config.rollout.engine == "vllm" else "none"


def fitted(config: TrainConfig, model: Path, device: Device) -> tuple[TrainConfig, DevicePlan]:
    """Plan a run. Gradient checkpointing that is auto computes as few layers again as the memory allows.

    What is kept instead is no reason for trainer and engine to take turns, nor for fewer keys and values.
    """
    actor = config.actor
    if actor.enable_gradient_checkpointing != "auto":
        return config, plan_memory(config, model, device)
    is_whole = config.trainer.backend == "megatron" or actor.checkpointed_layers < 1
    num_layers = 1 if is_whole else shape_of(model).workload.num_hidden_layers
    shares = sorted({-(-num_layers * part // _PARTS) / num_layers for part in range(_PARTS + 1)})

    def with_share(share: float) -> tuple[TrainConfig, DevicePlan]:
        layers = actor.checkpointed_layers if share == 1 else share or 1.0
        own = replace(config, actor=replace(actor, enable_gradient_checkpointing=share > 0, checkpointed_layers=layers))
        return own, plan_memory(own, model, device)

    _, most = with_share(1.0)
    if not most.fits:
        return config, plan_memory(config, model, device)
    return next(
        (own, plan)
        for own, plan in map(with_share, shares)
        if plan.fits and plan.takes_turns == most.takes_turns and plan.kv_tokens >= most.kv_tokens
    )


def planned(config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """Return a run's settings with its engine's share of the GPU, and with turns if they are needed; say both shares.

    Settings stay as they are where trainer and engine have different GPUs, and for the embedded model, which is tiny.

    Raises:
        UserError: the run does not fit into the GPU's memory.
    """
    model = model_folder(config.model)
    if not config.model or not _shares_gpu(config):
        return config
    device = present_device(config.device)
    is_auto = config.actor.enable_gradient_checkpointing == "auto"
    config, plan = fitted(config, model, device)
    check_fits(config.model, model, plan, device)
    check_host_fits(config, plan, available_host_bytes())
    for line in [*summary(plan, device), *checkpointing(config, is_auto=is_auto)]:
        say(line)
    rollout = config.rollout
    rollout = replace(rollout, colocated=plan.takes_turns and not config.lends_ranks)
    if "gpu_memory_utilization" in rollout.kind.own_options and rollout.gpu_memory_utilization is None:
        rollout = replace(rollout, gpu_memory_utilization=plan.gpu_memory_utilization)
    if "kv_cache_bytes" in rollout.kind.engine_options:
        rollout = replace(rollout, engine_options={"kv_cache_bytes": plan.kv_cache_bytes, **rollout.engine_options})
    return replace(config, rollout=rollout)


def _shares_gpu(config: TrainConfig) -> bool:
    """Return whether an engine of the policy is on a GPU of the trainer."""
    import torch

    if config.runtime != "inline" or config.rollout.is_on_servers or not config.device.startswith("cuda"):
        return False
    if config.lends_ranks:
        return True
    count = torch.cuda.device_count()
    ranks, rollout = training_gpus(config, count), config.rollout
    engines = engine_gpus(
        count, rollout.num_processes * rollout.tensor_parallel_size, ranks, takes_turns=rollout.colocated is True
    )
    return not ranks.isdisjoint(engines or [torch.device(config.device).index or 0])


def check_fits(name: str, model: Path, plan: DevicePlan, device: Device, larger: Sequence[str] = ()) -> None:
    """Raise `UserError` with the numbers, and what would fit, if a plan does not fit.

    ``larger`` are settings of more devices under which it would.
    """
    if plan.fits:
        return
    stage = plan.fullest
    shares = "; ".join(
        f"{role}: " + ", ".join(f"{item} {size / _GB:.1f}" for item, size in items.items() if size >= _GB / 20)
        for role, items in _present(plan, stage).items()
    )
    settings = {
        "turns": "rollout.colocated auto with trainer.schedule sync",
        "gradient checkpointing": "actor.enable_gradient_checkpointing true",
        "small micro-batches": f"actor.ppo_max_token_len {plan.longest_sequence}",
        "frequent gradient exchange": "trainer.parallel.gradient_sync micro_batch",
        "8-bit moments": "actor.optim.name adamw_8bit",
        "optimizer offload": "actor.offload optimizer",
        "full offload": "actor.offload all",
        "LoRA": "actor.lora_rank 16",
    }
    fitting = [
        f"{' and '.join(settings[name] for name in remedy.names)} ({remedy.peak_bytes / _GB:.1f} GB)"
        for remedy in plan.remedies
    ]
    advice = (
        f"these would fit: {'; '.join([*larger, *fitting])}"
        if fitting or larger
        else "no setting makes it fit; a larger GPU or a smaller model would"
    )
    count = shape_of(model).num_parameters / _GB
    raise UserError(
        f"model is {name!r} ({count:.2f} B parameters), whose stage {stage!r} needs "
        f"{plan.peaks[stage] / _GB:.1f} GB; expected at most {plan.usable_bytes / _GB:.1f} of the "
        f"{plan.device_bytes / _GB:.1f} GB of {device.name} (GB: {shares}); {advice}"
    )


def _present(plan: DevicePlan, stage: str) -> Mapping[str, Mapping[str, float]]:
    """Return what is in memory at a stage, as far as the plan has it by item."""
    if not plan.takes_turns:
        return plan.roles
    found = {role: items for role, items in plan.roles.items() if role not in _ASLEEP[stage]}
    if stage != "sync":
        return found
    found = {role: {name: items[name] for name in _HELD if name in items} for role, items in found.items()}
    rest = plan.peaks["sync"] - sum(sum(items.values()) for items in found.values())
    return {**found, "new weights": {"on their way": rest}}


def summary(plan: DevicePlan, device: Device) -> list[str]:
    """Return lines with the shares of a device, for the start of a run."""
    shares = ", ".join(f"{role} {plan.share(role) / _GB:.1f} GB" for role in plan.roles)
    how = "take turns on it (rollout.colocated)" if plan.takes_turns else "are in it side by side"
    return [
        f"memory of {device.name}, {plan.usable_bytes / _GB:.1f} of {plan.device_bytes / _GB:.1f} GB to plan with: "
        f"{shares}; trainer and engine {how}",
        f"the engine may use {plan.gpu_memory_utilization:.0%} of the memory: keys and values of {plan.kv_tokens:,} "
        f"tokens, {plan.kv_tokens // plan.longest_sequence:,} of the longest sequences ({plan.longest_sequence:,})",
        f"in the host's memory, for each rank and engine: {plan.host_bytes / _GB:.1f} GB ({_host_items(plan.host)})",
    ]


def checkpointing(config: TrainConfig, *, is_auto: bool) -> list[str]:
    """Return a line with the layers that gradient checkpointing which was auto computes again, if there are any."""
    actor = config.actor
    if not is_auto or actor.enable_gradient_checkpointing is not True:
        return []
    return [
        f"gradient checkpointing of {actor.checkpointed_layers:.0%} of the layers, as few as fit "
        "(actor.enable_gradient_checkpointing auto)"
    ]


def _host_items(host: Mapping[str, float]) -> str:
    return ", ".join(f"{item} {size / _GB:.1f}" for item, size in host.items() if size >= _GB / 20) or "less than 0.1"


def check_host_fits(config: TrainConfig, plan: DevicePlan, available_bytes: float) -> None:
    """Raise `UserError` with the numbers, and what to set, if all ranks and engines need more host memory than that."""
    ranks, engines = config.trainer.num_processes, max(1, config.rollout.num_processes)
    host = {item: size * (engines if item == "engines" else ranks) for item, size in plan.host.items()}
    if ranks > 1:
        # All ranks write them to one memory, from which engines copy.
        host["new weights"] = plan.roles["policy engine"]["weights"] * config.rollout.tensor_parallel_size
    if (needed := sum(host.values())) <= available_bytes:
        return
    less = {
        "optimizer states": "actor.offload none" if config.actor.offload != "none" else "rollout.colocated false",
        "models": "rollout.colocated false" if plan.takes_turns else "actor.offload optimizer",
        "engines": "rollout.colocated false",
        "activations": "actor.activation_offload false",
        "checkpoint": "actor.lora_rank 16" if not config.actor.lora_rank else "",
        "new weights": "",
    }
    advice = " or ".join(dict.fromkeys(less[item] for item, size in host.items() if size and less[item]))
    raise UserError(
        f"the run needs {needed / _GB:.1f} GB of the host's memory; expected at most {available_bytes / _GB:.1f} GB, "
        f"which are available (GB: {_host_items(host)}); less is needed with {advice or 'a smaller model'}"
    )


def shape_of(model: Path) -> ModelShape:
    """Return the shape of a folder's model, with as many parameters as its files hold."""
    try:
        shape = model_shape(model)
    except PlacementError:
        # Another architecture: its widths are those of a dense decoder.
        shape = ModelShape(workload=workload_of(model))
    described, counted = shape.num_parameters - shape.other_parameters, count_parameters(model)
    return replace(shape, other_parameters=counted - described) if counted else shape


def training_layout(config: TrainConfig, policy: ModelShape) -> TrainingLayout:
    trainer, parallel, setting = config.trainer, config.trainer.parallel, config.actor.enable_gradient_checkpointing
    is_checkpointed = policy.num_parameters >= LARGE_MODEL if setting == "auto" else setting
    is_megatron = trainer.backend == "megatron"
    if is_megatron and trainer.megatron_config.recompute_granularity != "auto":
        is_checkpointed = trainer.megatron_config.recompute_granularity == "full"
    return TrainingLayout(
        backend=trainer.backend,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size if is_megatron else 1,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size if is_megatron else 1,
        context_parallel_size=parallel.context_parallel_size,
        data_parallel_size=parallel.data_parallel_size(trainer.num_processes),
        gradient_checkpointing=is_checkpointed,
        ppo_max_token_len=config.actor.ppo_max_token_len,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
    )


def _state(config: TrainConfig, policy: ModelShape, device: Device) -> TrainingState:
    actor, sync = config.actor, config.trainer.parallel.gradient_sync
    adapters = policy.adapter_parameters(actor.lora_rank) if actor.lora_rank else 0
    # float32 gradients of all that is trained.
    is_small = 4 * (adapters or policy.num_parameters) <= SHARE_OF_GRADIENTS * device.memory_bytes
    optimizers = [actor.optim, *[config.critic_optimizer] * config.algorithm.estimator.needs_critic]
    names = {own.name for own in optimizers}
    return TrainingState(
        offload=actor.offload,
        moments=_MOMENTS[names.pop()] if len(names) == 1 else "float32",
        adapter_parameters=adapters,
        checkpointed_share=actor.checkpointed_layers,
        activation_offload=actor.activation_offload,
        fsdp_size=config.trainer.parallel.fsdp_size,
        gradient_sync="update" if sync == "update" or (sync == "auto" and is_small) else "micro_batch",
    )


def present_device(device: str) -> Device:
    """Return a GPU of this machine, with the memory that it has."""
    import torch

    place = torch.device("cuda" if device in ("auto", "cpu") else device)
    found = torch.cuda.get_device_properties(place)
    return Device.of_memory(found.name, float(found.total_memory))
