"""The engine of images and its trainer: what is sampled is computed again, memory is given back, weights go over."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import ON_CUDA
from pipeline_conformance import in_training, kernel_of, measured, ratios
from tiny_families import FAMILIES
from tiny_pipelines import flow_pipeline

from gcore_rollout import FlowSDE, ImageRequest, ImageSample, ImageSampling
from gcore_rollout.engines.diffusion.engine import DiffusersEngine
from gcore_trainer import (
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionTrainer,
    LoRAConfig,
    OptimizerConfig,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have passed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # Inductor's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # and Dynamo's guards
]

KERNEL = FlowSDE(noise_level=0.7)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of ratios: products of other shapes are rounded otherwise on a GPU, those of bfloat16 to 8 bits."""


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Compute convolutions in float32 as it says, not with TF32's 10 bits."""
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


def request(count: int = 4) -> ImageRequest:
    sampling = ImageSampling(num_inference_steps=4, guidance_scale=2.0, kernel=KERNEL)
    return ImageRequest(request_id="a", prompt="red 7", sampling=sampling, n=count, seed=3)


async def images_of(engine: DiffusersEngine) -> list[ImageSample]:
    return sorted(
        [sample async for sample in engine.generate([request()])], key=lambda sample: sample.index
    )


def assert_same(
    found: Sequence[ImageSample], expected: Sequence[ImageSample], *, atol: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.latents, other.latents, atol=atol)
        np.testing.assert_allclose(one.trajectory.log_probs, other.trajectory.log_probs, atol=atol)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("name", FAMILIES)
async def test_what_was_sampled_is_computed_again(name: str, device: str, tmp_path: Path) -> None:
    """On a CPU, gcore_rollout's tests do this for every family."""
    found = await measured(
        FAMILIES[name], tmp_path, FAMILIES[name].guidance_scales[-1], device=device
    )
    assert found.deviation <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
async def test_a_step_of_training(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its ratios are one before the step; the engine takes the weights after it, and so do adapters after a sleep."""
    path = flow_pipeline(tmp_path)
    engine = DiffusersEngine.from_pretrained(
        path, device=device, dtype=str(dtype).removeprefix("torch.")
    )
    samples = [in_training(sample, index) for index, sample in enumerate(await images_of(engine))]
    for lora in (None, LoRAConfig(rank=2, alpha=4)):
        denoiser = Denoiser.from_pretrained(path, device=device, compute_dtype=dtype, lora=lora)
        deviation = (ratios(denoiser, kernel_of(engine.pipeline), samples) - 1).abs().mean()
        assert deviation <= TOLERANCES[dtype]
        trainer = DiffusionTrainer(
            denoiser,
            optimizer=OptimizerConfig(lr=1e-3),
            objective=DenoisingPolicyObjective(DenoisingPolicyConfig(), KERNEL),
        )
        trainer.sleep()
        trainer.wake()
        metrics = trainer.train_step([samples])
        assert 0 < metrics["actor/grad_norm"] < float("inf")
        version = 1 if lora is None else 2
        await engine.update_weights(trainer.export_weights(), version=version)
        taken = engine.pipeline.transformer.state_dict()
        for weight_name, weight in trainer.export_weights():
            torch.testing.assert_close(taken[weight_name], weight.to(device, dtype))
    await engine.close()


@pytest.mark.parametrize("offloads", [False, True])
async def test_an_engine_gives_its_memory_back(device: str, offloads: bool, tmp_path: Path) -> None:
    """While it sleeps it has nothing on the device, and makes the same images after it."""
    path = flow_pipeline(tmp_path)
    plain = DiffusersEngine.from_pretrained(path, device=device)
    expected = await images_of(plain)
    await plain.close()
    engine = DiffusersEngine.from_pretrained(path, device=device, offload_text_encoders=offloads)
    on_device = [
        tensor.device.type == device
        for name in ("text_encoder", "text_encoder_2")
        for tensor in getattr(engine.pipeline, name).parameters()
    ]
    assert all(on_device) == (device == "cpu" or not offloads)
    assert_same(await images_of(engine), expected, atol=1e-4)
    await engine.sleep()
    parts = [
        part for part in engine.pipeline.components.values() if isinstance(part, torch.nn.Module)
    ]
    assert {tensor.device.type for part in parts for tensor in part.parameters()} == {"cpu"}
    await engine.wake()
    assert_same(await images_of(engine), expected, atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
async def test_compiled_blocks_make_the_same_images(device: str, tmp_path: Path) -> None:
    """On a CPU, gcore_rollout's tests compile them."""
    path = flow_pipeline(tmp_path)
    plain, compiled = (
        DiffusersEngine.from_pretrained(path, device=device, compiles=c) for c in (False, True)
    )
    made = await images_of(compiled)
    assert_same(made, await images_of(plain), atol=1e-3)
    denoiser = Denoiser(copy.deepcopy(plain.pipeline.transformer).requires_grad_(True))
    trainer: Any = DiffusionTrainer(
        denoiser,
        optimizer=OptimizerConfig(lr=1e-3),
        objective=DenoisingPolicyObjective(DenoisingPolicyConfig(), KERNEL),
    )
    trainer.compile()
    metrics = trainer.train_step(
        [[in_training(sample, index) for index, sample in enumerate(made)]]
    )
    assert metrics["actor/grad_norm"] > 0
    for engine in (plain, compiled):
        await engine.close()
