"""`gcore-diffusion train --dry-run`: its shapes and bytes are those of real pipelines, and what it refuses."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import FAMILIES
from tiny_pipelines import flow_pipeline

from gcore_diffusion.cli import main, parse_train_args
from gcore_diffusion.planning.dry_run import dry_run, plan
from gcore_diffusion.planning.live_bytes import LiveBytes
from gcore_diffusion.planning.shapes import (
    INPUTS,
    image_shape,
    part_classes,
    part_without_weights,
    sampling_bytes,
    training_bytes,
)
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_runs import UserError
from gcore_trainer import Denoiser, LoRAConfig

PLANNED = {"Stable Diffusion 3 and 3.5": 77, "FLUX.1 dev": 0, "Qwen-Image": 0}
"""Families whose inputs are known, and the tokens of CLIP in their texts."""


@pytest.mark.parametrize("name", PLANNED)
def test_shapes_and_bytes_are_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    pipeline: Any = family.make(tmp_path)
    pipeline.save_pretrained(tmp_path / "pipeline")
    for part in part_classes(tmp_path / "pipeline"):
        real = getattr(pipeline, part)
        found = part_without_weights(tmp_path / "pipeline", part)
        assert {n: p.shape for n, p in found.named_parameters()} == {
            n: p.shape for n, p in real.named_parameters()
        }
    calls: list[dict[str, Any]] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _module, _positional, given: calls.append(given), with_kwargs=True
    )
    size = family.size or (32, 32)
    pipeline(
        "red",
        height=size[0],
        width=size[1],
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
    )
    given = calls[0]
    text = given["encoder_hidden_states"].shape[1] - PLANNED[name]
    image = image_shape(tmp_path / "pipeline", size, text)
    inputs = partial(
        INPUTS[type(pipeline.transformer).__name__], pipeline.transformer.config, image
    )
    for argument, value in inputs(1).items():
        if isinstance(value, torch.Tensor):
            assert given[argument].shape == value.shape, argument
        else:
            assert given[argument] == value, argument
    # On tensors that have memory.
    model = pipeline.transformer
    with torch.no_grad(), LiveBytes(model.parameters()) as live:
        model(**inputs(2), return_dict=False)
    fake = part_without_weights(tmp_path / "pipeline", "transformer")
    # Tensors that are neither parameters nor buffers come to the device with the first pass; here they were there.
    constants = sum(
        t.nbytes for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)
    )
    found, *_ = sampling_bytes(fake, inputs, 2, torch.float32)
    assert 0.98 * live.peak <= found <= 1.02 * live.peak + constants


def test_a_training_pass_takes_what_is_predicted(tmp_path: Path) -> None:
    """With and without adapters, and with checkpoints of activations, which take less."""
    folder = flow_pipeline(tmp_path, with_vae=True)
    image = image_shape(folder, (8, 8), 4)
    peaks: list[int] = []
    for lora, is_checkpointed in (
        (None, False),
        (LoRAConfig(rank=2, alpha=4), False),
        (None, True),
    ):
        fake = part_without_weights(folder, "transformer")
        Denoiser(fake, lora=lora, gradient_checkpointing=is_checkpointed)
        inputs = partial(INPUTS["SD3Transformer2DModel"], fake.config, image)
        peaks.append(training_bytes(fake, inputs, 4, torch.float32))
        real = Denoiser.from_pretrained(
            folder, lora=lora, gradient_checkpointing=is_checkpointed
        ).model
        with LiveBytes(real.parameters()) as live:
            real(**inputs(4), return_dict=False)[0].float().sum().backward()
        assert peaks[-1] == pytest.approx(live.peak, rel=0.05)
    assert peaks[2] < peaks[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 2])
def test_weights_take_what_is_predicted(tmp_path: Path, rank: int, dtype: str) -> None:
    """Of a policy, and of the reference of one without adapters."""
    folder = flow_pipeline(tmp_path, with_vae=True)
    args = ["--model", str(folder), "--data.train-files", "train.txt", "--rollout.size", "8", "8"]
    args += ["--reward.kind", "jpeg_compressibility", "--rollout.max-sequence-length", "4"]
    args += ["--actor.lora-rank", str(rank), "--actor.dtype", dtype]
    config = parse_train_args([*args, "--actor.loss.kl-loss-coef", "0.1"])
    memory = plan(config, folder).memory["training rank"]
    denoiser = Denoiser.from_pretrained(
        folder, lora=config.actor.lora, compute_dtype=getattr(torch, dtype)
    )
    held = {"weights": denoiser, "reference": denoiser.initial()}
    sizes = {item: sum(p.nbytes for p in model.model.parameters()) for item, model in held.items()}
    if rank:
        sizes["reference"] = 0
    assert {item: memory[item] for item in sizes} == sizes


def test_own_pipelines_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flow_pipeline(tmp_path, with_vae=True)
    args = ["--dry-run", "true", "--model", "flow", "--data.train-files", "train.txt"]
    args += [
        "--reward.kind",
        "jpeg_compressibility",
        "--rollout.size",
        "8",
        "8",
        "--rollout.max-sequence-length",
        "4",
    ]
    capsys.readouterr()
    main(["train", *args])
    out = capsys.readouterr().out
    assert "flow for 8 x 8 pixels" in out
    assert out.endswith("fits\n")
    assert not (tmp_path / "runs").exists()
    for options, expected in (
        (["--dry-run-device", "0.000001"], "GB of a GPU; expected at most"),
        (
            ["--rollout.size", "0", "0"],
            "rollout.size is (0, 0); expected height and width with dry_run",
        ),
        (
            ["--rollout.size", "64", "64"],
            "the model takes no images of rollout.size (64, 64): Height",
        ),
        (["--model", "nowhere"], "model is 'nowhere'; expected a folder of a diffusers pipeline"),
        (["--dry-run-device", "Z80"], "dry_run_device is 'Z80'; expected"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            dry_run(parse_train_args([*args, *options]))


def test_adapters_of_diffusers_are_planned_as_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow_pipeline(tmp_path, with_vae=True)
    denoiser = Denoiser.from_pretrained(tmp_path / "flow", lora=LoRAConfig(rank=2, alpha=2))
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in denoiser.trained_parameters().items():
        tensors[f"transformer.{name.replace('.default.', '.')}"] = parameter.detach()
    save_file(tensors, tmp_path / "any.safetensors")
    args = [
        "--dry-run",
        "true",
        "--model",
        str(tmp_path / "flow"),
        "--data.train-files",
        "train.txt",
    ]
    args += [
        "--reward.kind",
        "jpeg_compressibility",
        "--rollout.size",
        "8",
        "8",
        "--rollout.max-sequence-length",
        "4",
    ]
    capsys.readouterr()
    dry_run(
        parse_train_args([*args, "--actor.lora-adapter-path", str(tmp_path / "any.safetensors")])
    )
    of_file = capsys.readouterr().out
    dry_run(parse_train_args([*args, "--actor.lora-rank", "2"]))
    assert of_file == capsys.readouterr().out
    assert "in adapters of rank 2" in of_file


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_name_their_source(name: str) -> None:
    config = PUBLISHED[name]()
    about = " ".join((PUBLISHED[name].__doc__ or "").split())
    assert "no GPU has run it" in about
    assert "Flow-GRPO's config/grpo.py" in about
    assert config.actor.loss.clip_ratio == 1e-4
    assert config.data.train_batch_size * config.rollout.n % (config.actor.num_updates * 2) == 0
