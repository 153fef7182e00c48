"""`gcore-diffusion train --dry-run`: parameters, passes and memory of a run, by the shapes of its pipeline alone."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gcore_diffusion.config import DiffusionConfig, DiffusionTrainArgs
from gcore_diffusion.planning.shapes import (
    GUIDED_IN_TWO_CALLS,
    INPUTS,
    decoding_bytes,
    image_shape,
    part_classes,
    part_without_weights,
    sampling_bytes,
    shape_folder,
    training_bytes,
)
from gcore_diffusion.sampling.image_sampling import has_old_pass, has_reference_pass
from gcore_diffusion.training import with_initial_lora
from gcore_placement import Device, Efficiency, state_bytes
from gcore_runs import UserError, one_line, print_table
from gcore_runs.simulation.forecast import dry_run_device
from gcore_trainer import LARGE_MODEL, Denoiser, should_replicate

_GB = 1e9
_FLOAT32_BYTES = 4
_DEVICE = "H100"
"""Device that is planned for by default."""


@dataclass(frozen=True, kw_only=True)
class DryRunPlan:
    """Parameters, the pass of an engine, and memory, of a run that is not started."""

    parameters: Mapping[str, tuple[str, int]]
    """Class and number of parameters of each part, by name."""
    num_trained: int
    lora_rank: int
    """Rank of the adapters that are trained; 0: all parameters are."""
    inputs: Mapping[str, tuple[int, ...]]
    """Shapes of a pass of the engine's denoiser."""
    output: tuple[int, ...]
    memory: Mapping[str, Mapping[str, float]]
    """Bytes of an engine and of a training rank, by item."""


def plan(config: DiffusionConfig, folder: Path) -> DryRunPlan:
    """Plan a run with the pipeline in a folder, of which only the `config.json` files are read.

    Parameters of a rank, and what belongs to them, are divided among the ranks that share them (FSDP2), except for the
    weights of the layer that computes, which are whole. The peaks of passes are those of the models themselves, on
    tensors without memory.

    Raises:
        UserError: the folder is no pipeline's, or its denoiser is of a class whose inputs are not known.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"model is {config.model!r}; expected a folder of a diffusers pipeline, with model_index.json"
        )
    config = with_initial_lora(config, folder)
    classes = part_classes(folder)
    rollout = config.rollout
    actor = config.actor
    _, denoiser = classes.get("transformer", ("", "unet"))
    if denoiser not in INPUTS:
        raise UserError(
            f"dry_run is true with a model of {denoiser}; expected one of {', '.join(INPUTS)}"
        )
    if rollout.image_size is None:
        raise UserError("rollout.size is (0, 0); expected height and width with dry_run")
    image = image_shape(folder, rollout.image_size, rollout.max_sequence_length)
    parts = {name: part_without_weights(folder, name) for name in classes}
    counts = {name: _num_parameters(part) for name, part in parts.items()}
    model = parts["transformer"]
    inputs = partial(INPUTS[denoiser], model.config, image)
    num_halves = 1
    if rollout.guidance_scale > 1 and not getattr(model.config, "guidance_embeds", False):
        # Without the prompt and with it.
        num_halves = 2
    num_rows = rollout.max_num_images
    if denoiser not in GUIDED_IN_TWO_CALLS:
        num_rows *= num_halves
    dtype = getattr(torch, rollout.dtype)
    try:
        pass_bytes, shapes, output = sampling_bytes(model, inputs, num_rows, dtype)
    except (ValueError, RuntimeError) as error:
        # Models raise errors of these kinds for sizes that they do not support.
        raise UserError(
            f"the model takes no images of rollout.size {rollout.size}: {one_line(error)}"
        ) from error
    num_in_encoders = sum(counts[name] for name in counts if "text_encoder" in name)
    engine = {
        "denoiser": float(dtype.itemsize * counts["transformer"]),
        "text encoders": float(dtype.itemsize * num_in_encoders),
        "VAE": float(dtype.itemsize * counts.get("vae", 0)),
        "pass": float(pass_bytes),
        "decoding": float(decoding_bytes(parts["vae"], image, dtype)),
    }
    denoiser_model = make_denoiser(config, folder)
    model = denoiser_model.model
    compute_dtype: torch.dtype = getattr(torch, actor.dtype)
    num_trained = sum(p.numel() for p in denoiser_model.trained_parameters().values())
    num_shards = _num_shards(config, model)
    gathered = 0
    if num_shards > 1:
        gathered = denoiser_model.num_gathered * compute_dtype.itemsize
    reference = 0
    if has_reference_pass(config) and (actor.lora is None or config.algorithm.name == "opd"):
        reference = sum(p.nbytes for p in denoiser_model.initial().parameters().values())
    peak = training_bytes(model, inputs, num_halves * actor.micro_batch_size, compute_dtype)
    _, _, optimizer = state_bytes(
        0.0, float(num_trained), float(num_trained), compute_bytes=_FLOAT32_BYTES
    )
    rank = {
        "weights": weight_bytes(config, denoiser_model),
        "reference": reference / num_shards,
        "optimizer": optimizer / num_shards,
        "average": 0.0,
        "gathered weights": float(gathered),
        "pass with gradients": float(peak),
    }
    if actor.ema_decay:
        rank["average"] = _FLOAT32_BYTES * num_trained / num_shards
    return DryRunPlan(
        parameters={name: (classes[name][1], count) for name, count in counts.items()},
        num_trained=num_trained,
        lora_rank=actor.lora_rank,
        inputs=shapes,
        output=output,
        memory={"engine": engine, "training rank": rank},
    )


def make_denoiser(config: DiffusionConfig, folder: Path) -> Denoiser:
    """Make the model in training on torch's meta device."""
    model = part_without_weights(folder, "transformer")
    is_checkpointed = config.actor.enable_gradient_checkpointing
    if is_checkpointed == "auto":
        is_checkpointed = _num_parameters(model) >= LARGE_MODEL
    return Denoiser(
        model,
        lora=config.actor.lora,
        gradient_checkpointing=is_checkpointed,
        compute_dtype=getattr(torch, config.actor.dtype),
    )


def weight_bytes(config: DiffusionConfig, denoiser: Denoiser) -> float:
    """Return the bytes of the parameters that a training rank has."""
    num_bytes = sum(p.nbytes for p in denoiser.parameters().values())
    return num_bytes / _num_shards(config, denoiser.model)


def dry_run(config: DiffusionTrainArgs) -> None:
    """Print what a run would take; nothing is loaded or started.

    Raises:
        UserError: see `plan`; or the run does not fit, after the tables are printed.
    """
    if not config.model:
        raise UserError(
            "model is not set; expected a local folder of a diffusers pipeline with dry_run"
        )
    # bitsandbytes, which diffusers imports, logs that a package of kernels for 4-bit weights is missing.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
    folder = shape_folder(config.model)
    device = dry_run_device(config.dry_run_device or _DEVICE)
    if folder != Path(config.model):
        print(
            f"there is no folder {config.model!r}: planned by the config.json files of a pipeline of this name that "
            "gcore-diffusion brings"
        )
    run_plan = plan(config, folder)
    rows = [
        [part, class_name, f"{count:,}"]
        for part, (class_name, count) in run_plan.parameters.items()
    ]
    size = "{} x {} pixels".format(*config.rollout.size)
    print_table(f"{config.model} for {size}", ["part", "class", "parameters"], [rows])
    adapters = f" in adapters of rank {run_plan.lora_rank}" if run_plan.lora_rank else ""
    print(f"trained: {run_plan.num_trained:,} parameters{adapters}")
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in run_plan.inputs.items())
    print(f"a pass of an engine: {inputs}; its output {list(run_plan.output)}")
    _print_memory(config, run_plan, device)
    peak = _peak(config, run_plan)
    usable = Efficiency().usable_bytes(device)
    print(
        f"peak of a GPU: {peak / _GB:.1f} GB; {usable / _GB:.1f} of {device.memory_bytes / _GB:.1f} usable"
    )
    _print_steps(config)
    if peak > usable:
        print("does not fit", flush=True)
        raise UserError(
            f"{config.model} needs {peak / _GB:.1f} GB of a GPU; expected at most {usable / _GB:.1f} of the "
            f"{device.memory_bytes / _GB:.1f} GB of {device.name}; less is needed with a smaller "
            "rollout.max_num_images or actor.micro_batch_size, or with more trainer.num_processes"
        )
    print("fits", flush=True)


def _num_parameters(part: Any) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _num_shards(config: DiffusionConfig, model: Any) -> int:
    """Return the number of ranks that share the parameters of the denoiser in training."""
    size = config.trainer.fsdp_size
    if size == "auto":
        size = int(should_replicate(model.parameters()))
    return size or config.trainer.num_processes


def _peak(config: DiffusionConfig, run_plan: DryRunPlan) -> float:
    sizes = [sum(items.values()) for items in run_plan.memory.values()]
    if config.takes_turns or config.lends_ranks or config.runtime == "ray":
        return max(sizes)
    return sum(sizes)


def _print_memory(config: DiffusionConfig, run_plan: DryRunPlan, device: Device) -> None:
    ranks = config.trainer.num_processes
    engines = config.num_engines
    if config.runtime == "ray":
        num_gpus = max(ranks, engines) if config.takes_turns else ranks + engines
        gpus = f"{num_gpus} GPUs"
    elif ranks == 1:
        gpus = "one GPU"
    else:
        gpus = f"{ranks} GPUs, the first with an engine"
    how = "take turns" if config.takes_turns else "are in memory at the same time"
    print(
        f"{gpus} of {device.name}: {ranks} training ranks and {engines} engines, which {how}; GB of each"
    )
    num_lent = config.sizes.num_lent
    if num_lent:
        print(
            f"and {num_lent} engines on the GPUs of ranks, which take turns with these (placement.lend_ranks)"
        )
    share = config.ray.gpus_per_reward_model
    if config.runtime == "ray" and config.reward.has_models and share:
        print(
            f"and {share * config.controllers:g} for the reward, {share:g} a controller (ray.gpus_per_reward_model)"
        )
    tables: list[list[list[str]]] = []
    for role, items in run_plan.memory.items():
        texts = [f"{item} {size / _GB:.1f}" for item, size in items.items() if size >= _GB / 20]
        tables.append([[role, f"{sum(items.values()) / _GB:.1f}", ", ".join(texts)]])
    print_table("", ["role", "GB", "of which"], tables)


def _print_steps(config: DiffusionConfig) -> None:
    rollout = config.rollout
    actor = config.actor
    num_images = config.data.train_batch_size * rollout.n
    num_recorded = rollout.window_size or rollout.num_inference_steps
    num_trained = max(1, round(config.algorithm.timestep_fraction * num_recorded))
    print(
        f"a step: {config.data.train_batch_size} prompts x {rollout.n} images = {num_images:,} images of "
        f"{rollout.num_inference_steps} denoising steps; {num_trained} are trained on, in {actor.num_updates} updates"
    )
    further: list[str] = []
    if has_reference_pass(config):
        further.append("of the reference")
    if has_old_pass(config):
        further.append("of the old log-probs")
    also = f"; as many passes without a gradient {' and '.join(further)}" if further else ""
    per_rank = num_images * num_trained / config.trainer.num_processes / actor.micro_batch_size
    print(
        f"a rank: about {per_rank:,.0f} passes of {actor.micro_batch_size} images with a gradient in a step{also}"
    )
    num_steps = config.trainer.total_training_steps
    print(f"{num_steps:,} steps: {num_images * num_steps:,} images")
