"""`gcore-llm train --dry-run`: who would be on which GPU, in how much memory and for how long; nothing is started."""

from dataclasses import replace
from pathlib import Path

from gcore_llm.config import TrainArgs, TrainConfig
from gcore_llm.learning.cluster_plan import GPUS_PER_NODE, dry_run_cluster
from gcore_llm.learning.device_plan import (
    check_fits,
    check_host_fits,
    choose_checkpointing,
    describe_checkpointing,
    present_device,
    summarize_plan,
)
from gcore_llm.recipes.shapes import shape_folder
from gcore_placement import Device, DevicePlan
from gcore_runs import UserError, check_model, model_folder, print_table, with_adapter
from gcore_runs.host_memory import available_host_bytes
from gcore_runs.inputs import count_parameters
from gcore_runs.settings.resources import is_hub_model
from gcore_runs.simulation.forecast import dry_run_device

_STAND_IN = "H100"
"""Device that a dry run plans for on a machine without a GPU."""


def dry_run(options: TrainArgs) -> None:
    """Print which role is where and in how many bytes; nothing is loaded or started.

    Raises:
        UserError: there is no model, or the run does not fit, after the tables are printed.
    """
    import torch

    config: TrainConfig = options
    if not config.model:
        raise UserError("model is not set; expected a local Hugging Face folder with dry_run")
    if config.rollout.is_on_servers:
        raise UserError(
            f"dry_run is true with rollout.engine {config.rollout.engine!r}; expected an engine that the run starts"
        )
    name = config.model
    config = _with_shapes(replace(config, actor=with_adapter(config.actor)))
    model = Path(config.model)
    device = _choose_device(options)
    if str(model) != str(Path(name)):
        print(
            f"there is no folder {name!r}: planned by the config.json of a model of this name that gcore-llm brings"
        )
    if config.dtype == "auto":
        # As the run will have it on that GPU, whatever this machine has.
        config = replace(config, dtype="bfloat16")
    if config.runtime == "ray" or options.dry_run_gpus_per_node:
        dry_run_cluster(
            name,
            config,
            model,
            device,
            nodes=options.dry_run_nodes,
            gpus_per_node=options.dry_run_gpus_per_node or GPUS_PER_NODE,
        )
        return
    is_auto = config.actor.enable_gradient_checkpointing == "auto"
    config, plan = choose_checkpointing(config, model, device)
    _print_tables(name, config, plan, device)
    for line in describe_checkpointing(config, is_auto=is_auto):
        print(line)
    print("fits" if plan.fits else "does not fit", flush=True)
    check_fits(name, model, plan, device)
    if not options.dry_run_device and torch.cuda.is_available():
        # Otherwise the run will be on another machine.
        check_host_fits(config, plan, available_host_bytes())


def _print_tables(name: str, config: TrainConfig, plan: DevicePlan, device: Device) -> None:
    judge = config.reward_model.judge
    trained = f"{config.trainer.backend} on {_gpus(config.trainer.num_processes)}"
    where = {
        "policy engine": f"{config.rollout.engine} on {_gpus(config.rollout.num_processes)}",
        "judge": f"{judge.engine} on {_gpus(judge.num_processes)}",
        "reward model": "transformers on GPU 0",
    }
    sections: list[list[list[str]]] = []
    for role, items in plan.roles.items():
        rows = [["", "", item, f"{size:,.0f}"] for item, size in items.items() if size]
        # With actor.offload all, the device has the largest model alone.
        rows = rows or [["", "", "no more than the trainer, in its place", "0"]]
        rows[0][:2] = [role, where.get(role, trained)]
        sections.append(rows)
    print_table(
        f"{name} in {config.dtype} on {device.name}", ["role", "where", "item", "bytes"], sections
    )
    turns = {
        "generate": "engines",
        "prepare": "trainer's weights",
        "train": "trainer",
        "sync": "policy's and engine's weights",
    }
    peaks: list[list[str]] = []
    for stage, size in plan.peaks.items():
        residents = turns[stage] if plan.takes_turns else "trainer and engines"
        peaks.append([stage, residents, f"{size:,.0f}", f"{size / plan.device_bytes:.0%}"])
    print_table("peak of each stage", ["stage", "in memory", "bytes", "of the GPU"], [peaks])
    for line in summarize_plan(plan, device):
        print(line)


def _gpus(count: int) -> str:
    """Name the first GPUs, for so many processes."""
    if count > 1:
        return f"GPU 0 to {count - 1}"
    return "GPU 0"


def _with_shapes(config: TrainConfig) -> TrainConfig:
    """Return the settings with folders that are there: of models with weights, or with a config.json alone."""

    def find_folder(setting: str, path: str) -> str:
        folder = shape_folder(path)
        if is_hub_model(str(folder)):
            folder = model_folder(str(folder), setting=setting)
        if count_parameters(folder):
            check_model(folder, setting=setting, may_be_quantized=setting != "model")
        elif not (folder / "config.json").is_file():
            raise UserError(
                f"{setting} is {path!r}; expected a Hugging Face folder with config.json"
            )
        return str(folder)

    config = replace(config, model=find_folder("model", config.model))
    reward_model = config.reward_model
    if reward_model.kind in ("judge", "classifier"):
        path = find_folder("reward_model.path", reward_model.path)
        config = replace(config, reward_model=replace(reward_model, path=path))
    return config


def _choose_device(config: TrainArgs) -> Device:
    """Return the device that a dry run plans for."""
    import torch

    name = config.dry_run_device
    if not name and torch.cuda.is_available():
        return present_device(config.device)
    return dry_run_device(name or _STAND_IN)
