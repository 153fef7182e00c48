"""`gcore-diffusion train --dry-run`: parameters, passes and memory of a run, by the shapes of its pipeline alone."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gcore_diffusion.config import DiffusionConfig, TrainArgs
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
from gcore_placement import Device, Efficiency, PlacementError
from gcore_runs import UserError, one_line, print_table
from gcore_trainer import LARGE_MODEL, Denoiser, should_replicate

_GB = 1e9
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
        raise UserError(f"model is {config.model!r}; expected a folder of a diffusers pipeline, with model_index.json")
    config = with_initial_lora(config, folder)
    classes, rollout, actor = part_classes(folder), config.rollout, config.actor
    kind = classes.get("transformer", ("", "unet"))[1]
    if kind not in INPUTS:
        raise UserError(f"dry_run is true with a model of {kind}; expected one of {', '.join(INPUTS)}")
    if rollout.image_size is None:
        raise UserError("rollout.size is (0, 0); expected height and width with dry_run")
    image = image_shape(folder, rollout.image_size, rollout.max_sequence_length)
    built = {name: part_without_weights(folder, name) for name in classes}
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in built.items()}
    model = built["transformer"]
    inputs = partial(INPUTS[kind], model.config, image)
    # Without the prompt and with it.
    num_halves = 2 if rollout.guidance_scale > 1 and not getattr(model.config, "guidance_embeds", False) else 1
    num_rows = rollout.max_num_images * (1 if kind in GUIDED_IN_TWO_CALLS else num_halves)
    engine_type, dtype = _BYTES[rollout.dtype], getattr(torch, rollout.dtype)
    try:
        passing, shapes, output = sampling_bytes(model, inputs, num_rows, dtype)
    except (ValueError, RuntimeError) as error:
        # Models raise errors of these kinds for sizes that they do not support.
        raise UserError(f"the model takes no images of rollout.size {rollout.size}: {one_line(error)}") from error
    engine = {
        "denoiser": float(engine_type * counts["transformer"]),
        "text encoders": float(engine_type * sum(counts[name] for name in counts if "text_encoder" in name)),
        "VAE": float(engine_type * counts.get("vae", 0)),
        "pass": float(passing),
        "decoding": float(decoding_bytes(built["vae"], image, dtype)),
    }
    model = part_without_weights(folder, "transformer")
    is_checkpointed = actor.enable_gradient_checkpointing
    is_checkpointed = counts["transformer"] >= LARGE_MODEL if is_checkpointed == "auto" else is_checkpointed
    Denoiser(model, lora=actor.lora, gradient_checkpointing=is_checkpointed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_shards = _num_shards(config, model)
    peak = training_bytes(model, inputs, num_halves * actor.micro_batch_size, getattr(torch, actor.dtype))
    has_own_reference = has_reference_pass(config) and actor.lora is None
    rank = {
        "weights": 4 * (counts["transformer"] + (trained if actor.lora else 0)) / num_shards,
        "reference": 4 * counts["transformer"] / num_shards if has_own_reference else 0.0,
        "optimizer": 8 * trained / num_shards,
        "average": 4 * trained / num_shards if actor.ema_decay else 0.0,
        "pass with gradients": float(peak),
    }
    parameters = {name: (classes[name][1], count) for name, count in counts.items()}
    memory = {"engine": engine, "training rank": rank}
    return DryRunPlan(
        parameters=parameters,
        num_trained=trained,
        lora_rank=actor.lora_rank,
        inputs=shapes,
        output=output,
        memory=memory,
    )


def dry_run(config: TrainArgs) -> None:
    """Print what a run would take; nothing is loaded or started.

    Raises:
        UserError: see `plan`; or the run does not fit, after the tables are printed.
    """
    if not config.model:
        raise UserError("model is not set; expected a local folder of a diffusers pipeline with dry_run")
    # bitsandbytes, which diffusers imports, logs that a package of kernels for 4-bit weights is missing.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
    folder, device = shape_folder(config.model), _device(config)
    if folder != Path(config.model):
        print(
            f"there is no folder {config.model!r}: planned by the config.json files of a pipeline of this name that "
            "gcore-diffusion brings"
        )
    found = plan(config, folder)
    rows = [[name, kind, f"{count:,}"] for name, (kind, count) in found.parameters.items()]
    print_table(f"{config.model} for {_pixels(config)}", ["part", "class", "parameters"], [rows])
    adapters = f" in adapters of rank {found.lora_rank}" if found.lora_rank else ""
    print(f"trained: {found.num_trained:,} parameters{adapters}")
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in found.inputs.items())
    print(f"a pass of an engine: {inputs}; its output {list(found.output)}")
    _print_memory(config, found, device)
    _print_steps(config)
    usable = device.memory_bytes * Efficiency().free_memory
    peak = _peak(config, found)
    if peak > usable:
        print("does not fit", flush=True)
        raise UserError(
            f"{config.model} needs {peak / _GB:.1f} GB of a GPU; expected at most {usable / _GB:.1f} of the "
            f"{device.memory_bytes / _GB:.1f} GB of {device.name}; less is needed with a smaller "
            "rollout.max_num_images or actor.micro_batch_size, or with more trainer.num_processes"
        )
    print("fits", flush=True)


def _num_shards(config: DiffusionConfig, model: Any) -> int:
    """Return the number of ranks that share the parameters of the denoiser in training."""
    size = config.trainer.fsdp_size
    size = int(should_replicate(model.parameters())) if size == "auto" else size
    return size or config.trainer.num_processes


def _pixels(config: DiffusionConfig) -> str:
    return "{} x {} pixels".format(*config.rollout.size)


def _peak(config: DiffusionConfig, found: DryRunPlan) -> float:
    sizes = [sum(items.values()) for items in found.memory.values()]
    is_apart = config.takes_turns or config.lends_ranks or config.runtime == "ray"
    return max(sizes) if is_apart else sum(sizes)


def _print_memory(config: DiffusionConfig, found: DryRunPlan, device: Device) -> None:
    ranks, engines = config.trainer.num_processes, config.num_engines
    if config.runtime != "ray":
        where = "one GPU" if ranks == 1 else f"{ranks} GPUs, the first with an engine"
    else:
        where = f"{max(ranks, engines)} GPUs" if config.takes_turns else f"{ranks + engines} GPUs"
    how = "take turns" if config.takes_turns else "are in memory at the same time"
    print(f"{where} of {device.name}: {ranks} training ranks and {engines} engines, which {how}; GB of each")
    if num_lent := config.sizes.num_lent:
        print(f"and {num_lent} engines on the GPUs of ranks, which take turns with these (placement.lend_ranks)")
    if config.runtime == "ray" and config.reward.has_models and (share := config.ray.gpus_per_reward_model):
        print(f"and {share * config.controllers:g} for the reward, {share:g} a controller (ray.gpus_per_reward_model)")
    rows: list[list[str]] = []
    for role, items in found.memory.items():
        texts = [f"{item} {size / _GB:.1f}" for item, size in items.items() if size >= _GB / 20]
        rows.append([role, f"{sum(items.values()) / _GB:.1f}", ", ".join(texts)])
    print_table("", ["role", "GB", "of which"], [[row] for row in rows])
    usable = device.memory_bytes * Efficiency().free_memory
    peak = _peak(config, found)
    print(f"peak of a GPU: {peak / _GB:.1f} GB; {usable / _GB:.1f} of {device.memory_bytes / _GB:.1f} usable")


def _print_steps(config: DiffusionConfig) -> None:
    rollout, actor, trainer = config.rollout, config.actor, config.trainer
    images = config.data.train_batch_size * rollout.n
    recorded = rollout.window_size or rollout.num_inference_steps
    trained = max(1, round(config.algorithm.timestep_fraction * recorded))
    further = [
        name
        for name, is_made in (
            ("of the reference", has_reference_pass(config)),
            ("of the old log-probs", has_old_pass(config)),
        )
        if is_made
    ]
    per_rank = images * trained / trainer.num_processes / actor.micro_batch_size
    print(
        f"a step: {config.data.train_batch_size} prompts x {rollout.n} images = {images:,} images of "
        f"{rollout.num_inference_steps} denoising steps; {trained} are trained on, in {actor.num_updates} updates"
    )
    also = f"; as many passes without a gradient {' and '.join(further)}" if further else ""
    print(f"a rank: about {per_rank:,.0f} passes of {actor.micro_batch_size} images with a gradient in a step{also}")
    print(f"{trainer.total_training_steps:,} steps: {images * trainer.total_training_steps:,} images")


def _device(config: TrainArgs) -> Device:
    asked: Any = config.dry_run_device or _DEVICE
    if asked.replace(".", "", 1).isdecimal():
        return Device.of_memory(f"a GPU of {asked} GB", float(asked) * _GB)
    try:
        return Device.named(asked)
    except PlacementError as error:
        raise UserError(f"dry_run_{error}, or a number of gigabytes") from None
