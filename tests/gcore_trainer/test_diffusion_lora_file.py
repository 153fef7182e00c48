"""Adapters that are saved for diffusers give the images of the model that they are merged into."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
)


def trainer_of(folder: Path, lora: LoRAConfig | None) -> DiffusionTrainer:
    unused: Any = None
    objective = DenoisingPolicyObjective(DenoisingPolicyConfig(), unused)
    denoiser = Denoiser.from_pretrained(folder, lora=lora)
    for name, parameter in denoiser.trained_parameters().items():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return DiffusionTrainer(denoiser, optimizer=OptimizerConfig(), objective=objective, ema_decay=0.5)


@pytest.mark.parametrize(
    "name",
    ["Stable Diffusion 3 and 3.5", "FLUX.1 dev", pytest.param("Stable Diffusion XL", marks=pytest.mark.slow)],
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
    setattr(pipeline, component, type(getattr(pipeline, component)).from_pretrained(tmp_path / "merged"))
    merged = image()
    assert not torch.allclose(merged, before, atol=1e-2)
    torch.testing.assert_close(by_adapters, merged, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="has no adapters to save"):
        trainer_of(tmp_path / "initial", None).save_lora(tmp_path / "none", component)
