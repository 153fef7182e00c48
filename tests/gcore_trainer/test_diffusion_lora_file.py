"""Adapters that are saved for diffusers give the images of the model that they are merged into, and are read again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES

from gcore_trainer import (
    ConfigError,
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionTrainer,
    LoRAConfig,
    OptimizerConfig,
    pipeline_component,
    read_component_lora_config,
)


def trainer_of(folder: Path, lora: LoRAConfig | None) -> DiffusionTrainer:
    unused: Any = None
    objective = DenoisingPolicyObjective(DenoisingPolicyConfig(), unused)
    denoiser = Denoiser.from_pretrained(folder, lora=lora)
    for name, parameter in denoiser.trained_parameters().items():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return DiffusionTrainer(
        denoiser, optimizer=OptimizerConfig(), objective=objective, ema_decay=0.5
    )


@pytest.mark.parametrize(
    "name",
    [
        "Stable Diffusion 3 and 3.5",
        "FLUX.1 dev",
        pytest.param("Stable Diffusion XL", marks=pytest.mark.slow),
    ],
)
def test_adapters_load_into_a_pipeline_of_diffusers(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    pipeline = family.make(tmp_path)
    pipeline.save_pretrained(tmp_path / "initial")
    pipeline.set_progress_bar_config(disable=True)

    def image() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        size = dict(zip(("height", "width"), family.size or (), strict=False))
        options = {**family.options, **size, "num_inference_steps": 2, "output_type": "latent"}
        return pipeline("a cat", generator=generator, **options)[0]

    before = image()
    component, _ = pipeline_component(tmp_path / "initial")
    trainer = trainer_of(tmp_path / "initial", LoRAConfig(rank=2, alpha=3))
    trainer.save_lora(tmp_path / "lora", component)
    trainer.save_pretrained(tmp_path / "merged")
    pipeline.load_lora_weights(tmp_path / "lora")
    by_adapters = image()
    pipeline.unload_lora_weights()
    assert torch.equal(image(), before)
    setattr(
        pipeline, component, type(getattr(pipeline, component)).from_pretrained(tmp_path / "merged")
    )
    merged = image()
    assert not torch.allclose(merged, before, atol=1e-2)
    torch.testing.assert_close(by_adapters, merged, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="has no adapters to save"):
        trainer_of(tmp_path / "initial", None).save_lora(tmp_path / "none", component)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pipeline, and with the adapters that diffusers saved of it with their settings."""
    folder = tmp_path_factory.mktemp("saved")
    pipeline = FAMILIES["Stable Diffusion 3 and 3.5"].make(folder)
    pipeline.save_pretrained(folder / "pipeline")
    pipeline.transformer.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_v"]))
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapters = get_peft_model_state_dict(pipeline.transformer)
    settings = pipeline.transformer.peft_config["default"].to_dict()
    pipeline.save_lora_weights(
        folder / "lora",
        transformer_lora_layers=adapters,
        transformer_lora_adapter_metadata=settings,
    )
    (folder / "old names").mkdir()
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in adapters.items():
        layer, _, end = name.rpartition(".lora_")
        direction = "down" if end.startswith("A") else "up"
        renamed[f"transformer.{layer}.lora.{direction}.weight"] = tensor.contiguous()
        renamed[f"transformer.{layer}.alpha"] = torch.tensor(6.0)
    save_file(renamed, folder / "old names/any.safetensors")
    # The adapters are merged, with peft.
    pipeline.transformer.fuse_lora()
    pipeline.transformer.unload_lora()
    pipeline.transformer.save_pretrained(folder / "merged")
    return folder


@pytest.mark.parametrize(
    "file", ["lora", "lora/pytorch_lora_weights.safetensors", "old names/any.safetensors"]
)
def test_training_starts_from_adapters_of_diffusers(saved: Path, file: str) -> None:
    lora = read_component_lora_config(saved / file, component="transformer")
    assert (lora.rank, lora.alpha) == (2, 6)
    merged = load_file(saved / "merged/diffusion_pytorch_model.safetensors")
    for name, tensor in Denoiser.from_pretrained(saved / "pipeline", lora=lora).weights():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-5)


def test_the_initial_policy_keeps_the_adapters_that_training_starts_from(saved: Path) -> None:
    denoiser = Denoiser.from_pretrained(
        saved / "pipeline", lora=read_component_lora_config(saved / "lora", component="transformer")
    )
    initial = denoiser.initial()
    before = {name: p.clone() for name, p in denoiser.trained_parameters().items()}
    with torch.no_grad():
        for parameter in denoiser.trained_parameters().values():
            parameter.zero_()
    assert not initial.trained_parameters()
    after = initial.parameters()
    for name, parameter in before.items():
        assert parameter.abs().max() > 0
        assert torch.equal(after[name], parameter)


def change(
    saved: Path, folder: Path, changes: dict[str, torch.Tensor | None], **metadata: Any
) -> Path:
    """Write the adapters with other tensors, None of which are left out, and return their file."""
    tensors = load_file(saved / "lora/pytorch_lora_weights.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    header = {f"transformer.{name}": value for name, value in metadata.items()}
    save_file(
        tensors, folder / "changed.safetensors", {"lora_adapter_metadata": json.dumps(header)}
    )
    return folder / "changed.safetensors"


LAYER = "transformer.transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    ("changes", "metadata", "expected"),
    [
        (
            {"text_encoder.q.lora_A.weight": torch.ones(2, 4)},
            {},
            "has a tensor 'text_encoder.q.lora_A.weight'; expe",
        ),
        (
            {"lora_unet_q.lora_down.weight": torch.ones(2, 4)},
            {},
            "as save_lora_weights of diffusers writes them",
        ),
        (
            {f"{LAYER}.lora_A.weight": torch.ones(3, 4)},
            {},
            r"has adapters of ranks \[2, 3\]; expected one rank",
        ),
        (
            {f"{LAYER}.alpha": torch.tensor(1.5)},
            {},
            r"with alphas \[1.5\]; expected one whole number",
        ),
        (
            {f"{LAYER}.alpha": torch.tensor(1.0)},
            {"lora_alpha": 2},
            r"with alphas \[1.0, 2.0\]; expected one whole",
        ),
        ({}, {"use_dora": True}, "use_dora is True; expected None"),
    ],
)
def test_other_files_are_refused(
    saved: Path,
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    metadata: dict[str, Any],
    expected: str,
) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_component_lora_config(
            change(saved, tmp_path, changes, **metadata), component="transformer"
        )


def test_adapters_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    other = change(saved, tmp_path, {f"{LAYER}.lora_A.weight": torch.ones(2, 4)})
    with pytest.raises(
        ConfigError, match=r"expected adapters of this model, where .*to_q.*has shape"
    ):
        trainer_of(saved / "pipeline", read_component_lora_config(other, component="transformer"))
    other = change(saved, tmp_path, {f"{LAYER}.lora_B.weight": None})
    with pytest.raises(
        ConfigError, match="expected adapters of this model, for 1 of whose tensors there is none"
    ):
        trainer_of(saved / "pipeline", read_component_lora_config(other, component="transformer"))
    with pytest.raises(
        ConfigError, match="expected adapters of diffusers, a safetensors file or a folder with"
    ):
        read_component_lora_config(tmp_path / "none", component="transformer")
    (tmp_path / "damaged.safetensors").write_bytes(b"1234567890")
    with pytest.raises(ConfigError, match="does not load; expected a safetensors file"):
        read_component_lora_config(tmp_path / "damaged.safetensors", component="transformer")
