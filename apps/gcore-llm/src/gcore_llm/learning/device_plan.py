"""The memory of the GPU that trainer, engine and reward models of a run share: planned, said, and refused if short."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gcore_llm.config import TrainConfig
from gcore_llm.forecast import planner_job, training_layout
from gcore_llm.learning.preparation import workload_of
from gcore_placement import (
    STRATEGIES,
    Device,
    DevicePlan,
    DeviceSetting,
    ModelShape,
    PlacementError,
    Resident,
    TrainingState,
    engine_order,
    plan_device,
)
from gcore_runs import UserError, model_folder
from gcore_runs.host_memory import available_host_bytes
from gcore_runs.inputs import count_parameters
from gcore_runs.simulation.forecast import model_shape
from gcore_trainer import SHARE_OF_GRADIENTS

_GB = 1e9
_LARGE_DEVICE_BYTES = 70 * 2**30
_ASLEEP: Mapping[str, tuple[str, ...]] = {
    "generate": ("trainer", "critic", "reference", "teachers"),
    "prepare": ("policy engine", "judge"),
    "train": ("policy engine", "judge"),
    "sync": ("critic", "reference", "teachers", "judge"),
}
"""Roles that are not on the GPU at a stage, where trainer and engines take turns."""
_MOMENTS: Mapping[str, Literal["float32", "8bit", "muon"]] = {
    "adamw": "float32",
    "adamw_8bit": "8bit",
    "muon": "muon",
}
_PARTS = 8
"""Gradient checkpointing that is auto is tried for so many parts of the layers."""


def plan_memory(
    config: TrainConfig, model: Path, device: Device, residents: Collection[Resident] | None = None
) -> DevicePlan:
    """Plan the memory of a GPU for a run of a model's folder; see `plan_device`. Only headers of files are read.

    With several ranks each has a GPU of its own, and the plan is of the first, which has the first engine, too; with
    ``residents``, of a GPU of a map that has these.
    """
    rollout = config.rollout
    reward_model = config.reward_model
    job = planner_job(config, model, shape_of)
    takes_turns: bool | None = config.takes_turns or config.lends_ranks
    judge_takes_turns = False
    further_roles: dict[str, float] = {}
    if residents is None:
        residents = ("trainer", "policy engine", "judge")
        if rollout.colocated == "auto" and config.can_take_turns and not config.lends_ranks:
            takes_turns = None
        if reward_model.kind == "classifier":
            num_parameters = count_parameters(Path(reward_model.path))
            further_roles["reward model"] = float(job.compute_bytes * num_parameters)
    else:
        judge_takes_turns = (
            config.judge[1] is not None and STRATEGIES[config.strategy].is_time_shared
        )
    setting = DeviceSetting(
        job=job,
        layout=training_layout(config, job.policy),
        device=device,
        max_num_seqs=rollout.planned_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens or _batched_tokens(config, device),
        copies_weights=_copied_weights(config),
        reads_from_ranks=config.reads_from_ranks,
        devices_per_engine=rollout.tensor_parallel_size,
        devices_per_judge=reward_model.judge.tensor_parallel_size,
        takes_turns=takes_turns,
        judge_takes_turns=judge_takes_turns,
        state=_training_state(config, job.policy, device),
        further_roles=further_roles,
        residents=residents,
    )
    return plan_device(setting)


def _batched_tokens(config: TrainConfig, device: Device) -> int:
    """Return the most tokens of a pass of the engine where they are not set: vLLM's of a GPU, and those of `hf`."""
    if config.rollout.engine == "hf" or device.memory_bytes >= _LARGE_DEVICE_BYTES:
        return 16_384
    return 8192


def _copied_weights(config: TrainConfig) -> Literal["none", "merged", "all"]:
    """Return which new weights are whole on the GPU once more; from several ranks they come by the host."""
    if config.trainer.num_processes > 1:
        return "none"
    if config.rollout.num_processes:
        return "all"
    if config.rollout.engine == "vllm":
        return "merged"
    return "none"


def choose_checkpointing(
    config: TrainConfig, model: Path, device: Device
) -> tuple[TrainConfig, DevicePlan]:
    """Plan a run. Gradient checkpointing that is auto computes as little again as the memory allows.

    What is kept instead is no reason for trainer and engine to take turns, nor for fewer keys and values.
    """
    *choices, full_config = _checkpointing_choices(config, model)
    full_plan = plan_memory(full_config, model, device)
    if not full_plan.fits:
        return config, plan_memory(config, model, device)
    for new_config in choices:
        plan = plan_memory(new_config, model, device)
        if (
            plan.fits
            and plan.takes_turns == full_plan.takes_turns
            and plan.kv_tokens >= full_plan.kv_tokens
        ):
            return new_config, plan
    return full_config, full_plan


def _checkpointing_choices(config: TrainConfig, model: Path) -> list[TrainConfig]:
    """Return the settings to try: with gradient checkpointing of nothing first, with that of all layers last."""
    actor = config.actor
    trainer = config.trainer
    is_megatron = trainer.backend == "megatron"
    is_set = is_megatron and trainer.megatron_config.recompute_granularity != "auto"
    if actor.enable_gradient_checkpointing != "auto" or is_set:
        return [config]
    shares: list[float] = []
    if not is_megatron:
        num_layers = shape_of(model).workload.num_hidden_layers
        counts = {-(-num_layers * part // _PARTS) for part in range(1, _PARTS)} - {num_layers}
        shares = [count / num_layers for count in sorted(counts)]
    choices = [
        replace(config, actor=replace(actor, enable_gradient_checkpointing=share))
        for share in (False, *shares, True)
    ]
    if is_megatron:
        selective = {**trainer.megatron, "recompute_granularity": "selective"}
        choices.insert(1, replace(config, trainer=replace(trainer, megatron=selective)))
    return choices


def plan_run(config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
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
    config, plan = choose_checkpointing(config, model, device)
    check_fits(config.model, model, plan, device)
    check_host_fits(config, plan, available_host_bytes())
    for line in summarize_plan(plan, device) + describe_checkpointing(config, is_auto=is_auto):
        say(line)
    rollout = config.rollout
    planned_options = {
        "gpu_memory_utilization": plan.gpu_memory_utilization,
        "kv_cache_bytes": plan.kv_cache_bytes,
    }
    taken = {
        name: planned_options[name]
        for name in planned_options
        if name in rollout.kind.engine_options
    }
    rollout = replace(
        rollout,
        colocated=plan.takes_turns and not config.lends_ranks,
        engine_options={**taken, **rollout.engine_options},
    )
    return replace(config, rollout=rollout)


def _shares_gpu(config: TrainConfig) -> bool:
    """Return whether an engine of the policy is on a GPU of the trainer."""
    import torch

    if (
        config.runtime != "inline"
        or config.rollout.is_on_servers
        or not config.device.startswith("cuda")
    ):
        return False
    if config.lends_ranks:
        return True
    count = torch.cuda.device_count()
    ranks = training_gpus(config, count)
    num_processes = config.rollout.num_processes * config.rollout.tensor_parallel_size
    engines = engine_gpus(count, num_processes, ranks, takes_turns=config.rollout.colocated is True)
    return not ranks.isdisjoint(engines or [torch.device(config.device).index or 0])


def training_gpus(config: TrainConfig, count: int) -> set[int]:
    """Return the numbers of the GPUs, of ``count``, that the models in training are on."""
    trainer = config.trainer
    if trainer.num_processes == 1 and trainer.backend == "torch":
        _, _, number = config.device.partition(":")
        return {int(number or 0)}
    return {rank % count for rank in range(trainer.num_processes)}


def engine_gpus(
    count: int,
    num_engines: int,
    training: Collection[int],
    *,
    takes_turns: bool = False,
    first: int = 0,
) -> list[int]:
    """Return the number of the GPU of each of ``num_engines`` processes, of ``count``; see `engine_order`.

    Where processes are more than GPUs, they start again with the first one.

    Args:
        training: numbers of the GPUs with training ranks.
        first: processes of other engines that were placed before by the same rule.
    """
    order = engine_order(range(count), training, takes_turns=takes_turns)
    return [order[i % count] for i in range(first, first + num_engines)]


def check_fits(
    name: str, model: Path, plan: DevicePlan, device: Device, larger: Sequence[str] = ()
) -> None:
    """Raise `UserError` with the numbers, and what would fit, if a plan does not fit.

    ``larger`` are settings of more devices under which it would.
    """
    if plan.fits:
        return
    stage = plan.fullest
    shares = "; ".join(
        f"{role}: {list_sizes(items)}" for role, items in _items_at(plan, stage).items()
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
    fitting = list(larger)
    for names, peak_bytes in plan.remedies.items():
        values = " and ".join(settings[name] for name in names)
        fitting.append(f"{values} ({peak_bytes / _GB:.1f} GB)")
    advice = "no setting makes it fit; a larger GPU or a smaller model would"
    if fitting:
        advice = f"these would fit: {'; '.join(fitting)}"
    count = shape_of(model).num_parameters / _GB
    raise UserError(
        f"model is {name!r} ({count:.2f} B parameters), whose stage {stage!r} needs "
        f"{plan.peaks[stage] / _GB:.1f} GB; expected at most {plan.usable_bytes / _GB:.1f} of the "
        f"{plan.device_bytes / _GB:.1f} GB of {device.name} (GB: {shares}); {advice}"
    )


def _items_at(plan: DevicePlan, stage: str) -> Mapping[str, Mapping[str, float]]:
    """Return what is in memory at a stage, as far as the plan has it by item."""
    if not plan.takes_turns:
        return plan.roles
    awake = dict(plan.roles)
    for role in _ASLEEP[stage]:
        awake.pop(role, None)
    if stage != "sync":
        return awake
    rest = plan.peaks["sync"]
    for role, items in awake.items():
        awake[role] = {"weights": items["weights"]}
        rest -= items["weights"]
    awake["new weights"] = {"on their way": rest}
    return awake


def summarize_plan(plan: DevicePlan, device: Device) -> list[str]:
    """Return lines with the shares of a device, for the start of a run."""
    shares = ", ".join(f"{role} {plan.share(role) / _GB:.1f} GB" for role in plan.roles)
    how = "take turns on it (rollout.colocated)" if plan.takes_turns else "are in it side by side"
    return [
        f"memory of {device.name}, {plan.usable_bytes / _GB:.1f} of {plan.device_bytes / _GB:.1f} GB to plan with: "
        f"{shares}; trainer and engine {how}",
        f"the engine may use {plan.gpu_memory_utilization:.0%} of the memory: keys and values of {plan.kv_tokens:,} "
        f"tokens, {plan.kv_tokens // plan.longest_sequence:,} of the longest sequences ({plan.longest_sequence:,})",
        f"in the host's memory, for each rank and engine: {plan.host_bytes / _GB:.1f} GB ({list_sizes(plan.host)})",
    ]


def describe_checkpointing(config: TrainConfig, *, is_auto: bool) -> list[str]:
    """Return a line with what gradient checkpointing which was auto computes again, if there is anything."""
    actor = config.actor
    what = ""
    if actor.has_checkpointing is True:
        what = f"{actor.checkpointed_layers:.0%} of the layers, as few as fit"
    elif config.trainer.megatron.get("recompute_granularity") == "selective":
        what = "MLPs and experts, which is enough"
    if not is_auto or not what:
        return []
    return [f"gradient checkpointing of {what} (actor.enable_gradient_checkpointing auto)"]


def list_sizes(items: Mapping[str, float]) -> str:
    """Return the sizes of some items in GB, without those below 0.05."""
    sizes = [f"{item} {size / _GB:.1f}" for item, size in items.items() if size >= _GB / 20]
    return ", ".join(sizes) or "less than 0.1"


def check_host_fits(config: TrainConfig, plan: DevicePlan, available_bytes: float) -> None:
    """Raise `UserError` with the numbers, and what to set, if all ranks and engines need more host memory than that."""
    ranks = config.trainer.num_processes
    host = {item: size * ranks for item, size in plan.host.items()}
    if "engines" in host:
        host["engines"] = plan.host["engines"] * max(1, config.rollout.num_processes)
    if ranks > 1:
        # All ranks write them to one memory, from which engines copy.
        host["new weights"] = (
            plan.roles["policy engine"]["weights"] * config.rollout.tensor_parallel_size
        )
    needed = sum(host.values())
    if needed <= available_bytes:
        return
    less = {
        "optimizer states": "actor.offload none"
        if config.actor.offload != "none"
        else "rollout.colocated false",
        "models": "rollout.colocated false" if plan.takes_turns else "actor.offload optimizer",
        "engines": "rollout.colocated false",
        "activations": "actor.activation_offload false",
        "checkpoint": "actor.lora_rank 16" if not config.actor.lora_rank else "",
        "new weights": "",
    }
    advice = " or ".join(
        dict.fromkeys(less[item] for item, size in host.items() if size and less[item])
    )
    raise UserError(
        f"the run needs {needed / _GB:.1f} GB of the host's memory; expected at most {available_bytes / _GB:.1f} GB, "
        f"which are available (GB: {list_sizes(host)}); less is needed with {advice or 'a smaller model'}"
    )


def shape_of(model: Path) -> ModelShape:
    """Return the shape of a folder's model, with as many parameters as its files hold."""
    try:
        shape = model_shape(model)
    except PlacementError:
        # Another architecture: its widths are those of a dense decoder.
        shape = ModelShape(workload=workload_of(model))
    num_parameters = count_parameters(model)
    if not num_parameters:
        return shape
    described = shape.num_parameters - shape.other_parameters
    return replace(shape, other_parameters=num_parameters - described)


def _training_state(config: TrainConfig, policy: ModelShape, device: Device) -> TrainingState:
    actor = config.actor
    parallel = config.trainer.parallel
    adapters = policy.adapter_parameters(actor.lora_rank) if actor.lora_rank else 0
    gradient_sync = parallel.gradient_sync
    if gradient_sync == "auto":
        # float32 gradients of all that is trained.
        gradient_bytes = 4 * (adapters or policy.num_parameters)
        is_small = gradient_bytes <= SHARE_OF_GRADIENTS * device.memory_bytes
        gradient_sync = "update" if is_small else "micro_batch"
    moments = _MOMENTS[actor.optim.name]
    if config.algorithm.estimator.needs_critic and config.critic_optimizer.name != actor.optim.name:
        moments = "float32"
    return TrainingState(
        offload=actor.offload,
        moments=moments,
        adapter_parameters=adapters,
        checkpointed_share=actor.checkpointed_layers,
        recomputes_mlps=config.trainer.megatron_config.recompute_granularity == "selective",
        activation_offload=actor.activation_offload,
        fsdp_size=parallel.fsdp_size,
        gradient_sync=gradient_sync,
    )


def present_device(device: str) -> Device:
    """Return a GPU of this machine, with the memory that it has."""
    import torch

    if device in ("auto", "cpu"):
        device = "cuda"
    properties = torch.cuda.get_device_properties(torch.device(device))
    return Device.of_memory(properties.name, float(properties.total_memory))
