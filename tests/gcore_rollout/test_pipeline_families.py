"""Every family of pipelines: sampled by the engine, computed again and trained by the trainer; tiny, random weights."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pipeline_conformance import (
    HEADER,
    Measured,
    denoiser_of,
    in_training,
    kernel_of,
    measured,
    pictures,
    ratios,
    refused_row,
    row,
)
from tiny_families import FAMILIES, REFUSED
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gcore_rollout import DDIM, EngineModelError, ImageRequest, ImageSampling, RequestError
from gcore_rollout.engines.diffusion.engine import DiffusersEngine
from gcore_trainer import (
    BatchError,
    DDPMProcess,
    Denoiser,
    DenoisingPolicyConfig,
    DenoisingPolicyObjective,
    DiffusionObjective,
    DiffusionSample,
    DiffusionTrainer,
    FlowProcess,
    ForwardObjective,
    LoRAConfig,
    OptimizerConfig,
)
from gcore_trainer.diffusion.conditions import Conditioned
from gcore_trainer.diffusion.objectives import model_timesteps
from gcore_trainer.diffusion.sample import stack_fields
from gcore_trainer.torch.optimizer import gather_full_tensor

# InstructPix2Pix warns that an image is repeated for all that are made of it.
pytestmark = pytest.mark.filterwarnings("ignore:You have passed:FutureWarning")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/pipelines.md"
RATIO_TOLERANCE = 1e-6
TWO_CALLS_TOLERANCE = 1e-5
"""Of pipelines that call their model once with and once without the prompt, where training has one call for both."""
RENORMED = ("Qwen-Image", "Qwen-Image-Edit", "Qwen-Image-Edit-Plus, with two images", "Lumina 2")
"""Families whose guidance keeps norms."""
CASES = [
    pytest.param(
        name, scale, marks=[pytest.mark.slow] if scale != family.guidance_scales[-1] else []
    )
    for name, family in FAMILIES.items()
    for scale in family.guidance_scales
]


_MEASURED: dict[tuple[str, float], Measured] = {}


async def measured_once(name: str, guidance_scale: float, path: Path) -> Measured:
    """Return what several tests share of a family."""
    key = name, guidance_scale
    if key not in _MEASURED:
        _MEASURED[key] = await measured(FAMILIES[name], path, guidance_scale)
    return _MEASURED[key]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """This process as the only one of a mesh."""
    store = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def quick(*names: str) -> list[Any]:
    """Families, of which all but these are slow tests."""
    return [
        pytest.param(name, marks=[] if name in names else [pytest.mark.slow]) for name in FAMILIES
    ]


def process_of(engine: DiffusersEngine) -> FlowProcess | DDPMProcess:
    scheduler = engine.pipeline.scheduler
    is_ddpm = isinstance(kernel_of(engine.pipeline), DDIM)
    return (
        DDPMProcess(alphas_cumprod=scheduler.alphas_cumprod.tolist()) if is_ddpm else FlowProcess()
    )


def outputs_and_gradients(denoiser: Denoiser, samples: list[DiffusionSample]) -> list[torch.Tensor]:
    """Return a model's outputs at the first recorded step, and the gradient of their mean square, as one vector."""
    latents, timesteps = stack_fields(samples, denoiser.device, "latents", "timesteps", step=0)
    outputs = denoiser(latents, timesteps, Conditioned.of(samples, denoiser.device))
    outputs.square().mean().backward()
    gradients = [
        gather_full_tensor(p.grad).flatten()
        for p in denoiser.parameters().values()
        if p.grad is not None
    ]
    return [outputs.detach(), torch.cat(gradients)]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the conditions are the same."""
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[name]) for name, value in one.items()
    )


def page_rows() -> dict[str, list[str]]:
    """The cells of the page's table by family."""
    table = PAGE.read_text().partition(HEADER + "\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: cells for name, *cells in rows}


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("name", "guidance_scale"), CASES)
async def test_what_was_sampled_is_computed_again(
    name: str, guidance_scale: float, tmp_path: Path
) -> None:
    """The trainer's density of every step is the engine's, and so is the timestep of its level; as the page says."""
    family = FAMILIES[name]
    found = await measured_once(name, guidance_scale, tmp_path)
    engine, made = found.engine, found.samples
    samples = [in_training(each) for each in made]
    assert samples[0].num_steps >= 2
    *cells, number = page_rows()[name]
    *expected, _ = cells_of(row(name, found, has_guidance=guidance_scale > 1))
    if guidance_scale == family.guidance_scales[-1]:
        assert cells == expected
    tolerance = TWO_CALLS_TOLERANCE if "two calls" in cells else RATIO_TOLERANCE
    assert max(found.deviation, float(number)) <= tolerance
    assert not same(made[0].conditions, made[2].conditions)
    if made[0].negative_conditions is not None:
        assert not same(made[0].conditions, made[0].negative_conditions)
        assert made[0].keeps_norm == (name in RENORMED)
    if isinstance(process_of(engine), FlowProcess):
        times = FlowProcess().timesteps(torch.from_numpy(made[0].trajectory.levels))
        mapped = model_timesteps([samples[0]] * len(times), times)
        np.testing.assert_allclose(mapped, made[0].trajectory.timesteps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", quick("Qwen-Image", "Lumina 2", "Sana", "LTX"))
async def test_an_image_of_a_mixed_batch_is_the_one_made_alone(name: str, tmp_path: Path) -> None:
    """Two images of each of two prompts of different lengths, in one batch and one at a time, with guidance or not.

    Ratios between trainer and engine do not show a prompt with the attention mask of another: both have it.
    """
    for guidance_scale in FAMILIES[name].guidance_scales:
        mixed = await measured_once(name, guidance_scale, tmp_path / f"mixed-{guidance_scale}")
        alone = await measured(
            FAMILIES[name], tmp_path / f"alone-{guidance_scale}", guidance_scale, max_num_images=1
        )
        for one, other in zip(mixed.samples, alone.samples, strict=True):
            np.testing.assert_allclose(one.latents, other.latents, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("name", quick("FLUX.2 dev", "PixArt-Sigma"))
async def test_a_sharded_model_in_bfloat16_gives_what_a_whole_one_gives(
    name: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Up to the rounding of parameters; timesteps and positions are not rounded. Errors are distances from float32."""
    found = await measured_once(name, FAMILIES[name].guidance_scales[-1], tmp_path)
    samples = [in_training(each) for each in found.samples]
    exact = outputs_and_gradients(denoiser_of(found.model), samples)
    autocast = outputs_and_gradients(
        denoiser_of(found.model, compute_dtype=torch.bfloat16), samples
    )
    denoiser = denoiser_of(found.model, compute_dtype=torch.bfloat16)
    denoiser.shard(mesh)
    sharded = outputs_and_gradients(denoiser, samples)
    for of_exact, of_autocast, of_sharded in zip(exact, autocast, sharded, strict=True):
        assert relative_error(of_sharded, of_exact) <= 2 * relative_error(of_autocast, of_exact)


@pytest.mark.parametrize("name", ["Z-Image", "Qwen-Image", "FLUX.1 dev"])
async def test_images_of_several_batches_are_computed_at_once(name: str, tmp_path: Path) -> None:
    """Even if their prompts have other lengths: the model is called for each shape."""
    found = await measured(FAMILIES[name], tmp_path, 2.5, max_num_images=2)
    assert found.deviation <= TWO_CALLS_TOLERANCE


async def test_prompts_with_and_without_images(tmp_path: Path) -> None:
    """Both are in one batch of the trainer; wide and tall images have other positions, of the same shape."""
    pipeline = FAMILIES["FLUX.1 Kontext"].make(tmp_path)
    engine = DiffusersEngine(pipeline, options=FAMILIES["FLUX.1 Kontext"].options, size=(16, 16))
    kernel = kernel_of(pipeline)
    sampling = ImageSampling(num_inference_steps=3, kernel=kernel, size=(16, 16))
    wide = pictures(1, 1)
    images = {"without": (), "wide": wide, "tall": (np.swapaxes(wide[0], 0, 1),)}
    requests = [
        ImageRequest(request_id=name, prompt="red 7", images=given, sampling=sampling, n=2)
        for name, given in images.items()
    ]
    made = [sample async for sample in engine.generate(requests)]
    with pytest.raises(EngineModelError, match="makes no image of a prompt and 2 images"):
        [_ async for _ in engine.generate([replace(requests[0], images=wide * 2)])]
    await engine.close()
    assert {len(s.conditions.get("hidden_states+1", ())) for s in made} == {0, 320}
    samples = [in_training(sample) for sample in made]
    denoiser = denoiser_of(pipeline.transformer)
    assert (ratios(denoiser, kernel, samples) - 1).abs().max() <= RATIO_TOLERANCE
    # The model does see them, and their positions.
    wrong = [
        replace(s, conditions={n: v * 0.5 if "+" in n else v for n, v in s.conditions.items()})
        for s in samples
    ]
    assert (ratios(denoiser, kernel, wrong) - 1).abs().max() > 1e-4
    positions = {s.request_id: s.shared_conditions for s in made}
    wrong = [
        replace(one, shared_conditions=positions["tall"])
        for one, s in zip(samples, made, strict=True)
        if s.request_id == "wide"
    ]
    assert (ratios(denoiser, kernel, wrong) - 1).abs().max() > 1e-4


async def test_images_that_a_pipeline_does_not_take(tmp_path: Path) -> None:
    """Are refused, as is a prompt without one where one is needed."""
    sampling = ImageSampling(num_inference_steps=2, size=(16, 16))
    request = ImageRequest(request_id="a", prompt="red 7", images=pictures(1, 0), sampling=sampling)
    with pytest.raises(RequestError, match=r"shape \(8, 8\) and type uint8; expected \[H, W, 3\]"):
        replace(request, images=(np.zeros((8, 8), np.uint8),))
    families = {"FLUX.1 dev": "images has 1; expected none, because FluxPipeline takes no image"}
    families["Qwen-Image-Edit"] = (
        "images is empty; expected an image, because QwenImageEditPipeline makes none"
    )
    for name, message in families.items():
        family = FAMILIES[name]
        engine = DiffusersEngine(family.make(tmp_path), options=family.options, size=family.size)
        refused = replace(request, images=()) if family.num_images else request
        with pytest.raises(RequestError, match=message):
            [_ async for _ in engine.generate([refused])]
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "guidance_scale", "lora"),
    [
        *((n, s, None) for n, f in FAMILIES.items() for s in f.guidance_scales),
        *((n, f.guidance_scales[-1], LoRAConfig(rank=2, alpha=4)) for n, f in FAMILIES.items()),
    ],
)
async def test_an_update(
    name: str, guidance_scale: float, lora: LoRAConfig | None, tmp_path: Path
) -> None:
    """Flow-GRPO, or DDPO, and one of NFT, AWM, DGPO, CRD and DPO in turn train every family.

    A loss of finished images depends on the model's output alone, not on the family. Adapters with guidance, where a
    family has it: what they change of a model does not depend on that.
    """
    found = await measured_once(name, guidance_scale, tmp_path)
    engine, samples = (
        found.engine,
        [in_training(each, index) for index, each in enumerate(found.samples)],
    )
    process, policy = process_of(engine), DenoisingPolicyConfig(clip_ratio=0.01)
    objectives: list[DiffusionObjective] = [
        DenoisingPolicyObjective(policy, kernel_of(engine.pipeline))
    ]
    losses = ("nft", "awm", "dgpo", "crd", "dpo")
    if not isinstance(process, FlowProcess):
        losses = ("awm", "dgpo", "crd", "dpo")
    loss = losses[list(FAMILIES).index(name) % len(losses)]
    objectives.append(ForwardObjective(loss, process, num_timesteps=1))
    for objective in objectives:
        denoiser = denoiser_of(found.model, lora)
        reference = denoiser.initial() if objective.needs_reference else None
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0)
        trainer = DiffusionTrainer(
            denoiser, optimizer=optimizer, objective=objective, reference=reference
        )
        before = {name: p.detach().clone() for name, p in denoiser.trained_parameters().items()}
        metrics = trainer.train_step([samples])
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] > 0
        assert any(
            not torch.equal(p, before[name]) for name, p in denoiser.trained_parameters().items()
        )


async def test_steps_of_another_transformer_are_refused(tmp_path: Path) -> None:
    """And a pipeline with two of them, of which none is named."""
    family = FAMILIES["Wan 2.2 of two transformers"]
    for window in (None, (0, 2)):
        with pytest.raises(
            EngineModelError, match="step 0 is not made by the model that is trained"
        ):
            await measured(replace(family, window=window), tmp_path, 1.0)
    await measured(replace(family, component="transformer", window=(0, 1)), tmp_path, 1.0)
    expected = "component is ''; expected transformer or transformer_2, which WanPipeline has"
    with pytest.raises(EngineModelError, match=expected):
        DiffusersEngine(family.make(tmp_path), options=family.options, size=family.size)


async def test_guidance_that_ends_early_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["Lumina 2"]
    family = replace(family, options={**family.options, "cfg_trunc_ratio": 0.5})
    with pytest.raises(
        EngineModelError, match="calls its model otherwise in later steps than in the first"
    ):
        await measured(family, tmp_path, 2.5)


def test_timesteps_that_training_cannot_give_are_refused(tmp_path: Path) -> None:
    """The model is given a root of the time; objectives that draw levels need a multiple of it, or of the rest."""

    def of_root(
        _: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, {**named, "timestep": named["timestep"] ** 0.5}

    family = FAMILIES["Stable Diffusion 3 and 3.5"]
    pipeline = family.make(tmp_path)
    pipeline.transformer.register_forward_pre_hook(of_root, with_kwargs=True)
    engine = DiffusersEngine(pipeline, size=family.size)
    assert engine._timestep_map is None  # pyright: ignore[reportPrivateUsage]
    made = DiffusionSample(
        clean_latents=np.zeros(1, np.float32), conditions={}, advantage=0.0, timestep_map=None
    )
    with pytest.raises(BatchError, match="timestep_map is None"):
        ForwardObjective("nft").check([made])


def test_it_is_tried_in_the_size_that_will_be_used(tmp_path: Path) -> None:
    """And images are decoded one by one."""
    family = FAMILIES["Stable Diffusion 3 and 3.5"]
    pipeline = family.make(tmp_path)
    seen: list[torch.Size] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["hidden_states"].shape), with_kwargs=True
    )
    decoded: list[int] = []
    decode = pipeline.vae.decoder.forward
    pipeline.vae.decoder.forward = lambda latents, *rest: (
        decoded.append(len(latents)),
        decode(latents, *rest),
    )[1]
    DiffusersEngine(pipeline, size=(8, 16))
    assert {tuple(shape[1:]) for shape in seen} == {(4, 4, 8)}
    assert set(decoded) == {1}


@pytest.mark.parametrize(
    ("name", "size", "num_frames", "message"),
    [
        (
            "FLUX.1 dev",
            (18, 16),
            None,
            r"size is \(18, 16\); expected .* it makes \(16, 16\) of this one",
        ),
        ("LTX", (32, 32), 10, "num_frames is 10; expected .* it makes 9 of this one"),
        ("Wan 2.1", (16, 16), 7, "num_frames is 7; expected .* it makes 5 of this one"),
    ],
)
def test_sizes_that_a_pipeline_rounds_are_refused(
    name: str, size: tuple[int, int], num_frames: int | None, message: str, tmp_path: Path
) -> None:
    options = {**FAMILIES[name].options, **({"num_frames": num_frames} if num_frames else {})}
    with pytest.raises(RequestError, match=message):
        DiffusersEngine(FAMILIES[name].make(tmp_path), options=options, size=size)


async def test_images_are_made_in_the_size_that_is_requested(tmp_path: Path) -> None:
    """Sana's pipeline would make one of 512 pixels, and resize it."""
    found = await measured_once("Sana", 1.0, tmp_path)
    pipeline = found.engine.pipeline
    factor = pipeline.vae_scale_factor
    assert found.samples[0].image.shape == (32, 32, 3)
    assert found.samples[0].latents.shape[1:] == (32 // factor, 32 // factor)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    family = REFUSED[name]
    with pytest.raises(EngineModelError) as found:
        DiffusersEngine(family.make(tmp_path), options=family.options, size=family.size)
    assert "\n" not in str(found.value)
    assert cells_of(refused_row(name, found.value)) == page_rows()[name]


def test_the_page_lists_the_families() -> None:
    """In the order in which the command prints them."""
    assert list(page_rows()) == list(FAMILIES | REFUSED)


@pytest.mark.slow
def test_the_command_prints_the_table() -> None:
    """The page's rows, up to rounding in the last column; `row` and `refused_row` give all of them above."""
    names = ("Sana", "LTX, image to video")
    command = ROOT / "tests/ranks/pipeline_conformance.py"
    printed = subprocess.check_output([sys.executable, command, *names], text=True)
    assert printed.startswith(HEADER)
    for name, line in zip(names, printed.splitlines()[2:], strict=True):
        assert line.startswith(f"| {name} |")
        assert cells_of(line)[:-1] == page_rows()[name][:-1]
