"""The engine of images: real pipelines of diffusers, unmodified, whose steps are recorded."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from tiny_image_makers import flux_schnell, stable_diffusion
from tiny_pipelines import ddim_pipeline, flow_pipeline
from transformers import CLIPImageProcessor

from gcore_rollout import (
    DDIM,
    DigestedWeights,
    EngineModelError,
    EngineProcess,
    EngineReplicas,
    FlowCPS,
    FlowODE,
    FlowSDE,
    ImageRequest,
    ImageSample,
    ImageSampling,
    InstrumentedEngine,
    RequestError,
    RolloutError,
    WeightRecord,
    WrongWeightsError,
    host_tensor,
)
from gcore_rollout.engines.diffusion.engine import DiffusersEngine, image_generator
from gcore_rollout.engines.diffusion.kernels import Transition
from gcore_rollout.engines.diffusion.recording import load_pipeline, weight_variant
from gcore_rollout.engines.diffusion.text_encoders import cut_prompts
from gcore_rollout.weight_sync.digests import all_digests, check_weights
from gcore_trainer import Denoiser


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flow_pipeline(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def ddim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ddim_pipeline(tmp_path_factory.mktemp("pipelines"))


SDE = ImageSampling(num_inference_steps=5, kernel=FlowSDE(noise_level=0.7))


def request(
    name: str, sampling: ImageSampling, *, n: int = 2, seed: int = 0, prompt: str = "red 7"
) -> ImageRequest:
    return ImageRequest(request_id=name, prompt=prompt, sampling=sampling, n=n, seed=seed)


async def made(engine: Any, *requests: ImageRequest) -> list[ImageSample]:
    samples = [sample async for sample in engine.generate(requests)]
    return sorted(samples, key=lambda s: (s.request_id, s.index))


def arrays_of(samples: list[ImageSample]) -> dict[int, Any]:
    """Return the arrays of conditions, each once."""
    given = [
        c for s in samples for c in (s.conditions, s.negative_conditions or {}, s.shared_conditions)
    ]
    return {
        id(value): value for c in given for value in c.values() if isinstance(value, np.ndarray)
    }


@pytest.mark.parametrize("in_process", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_prompts_images_share_their_conditions(flow: Path, in_process: bool) -> None:
    """In the data type of the model; also after they were sent by another process."""
    factory = partial(DiffusersEngine.from_pretrained, flow, dtype="bfloat16")
    engine: Any = (
        await EngineProcess[ImageRequest, ImageSample].start(factory) if in_process else factory()
    )
    sampling = ImageSampling(
        num_inference_steps=2, guidance_scale=2.0, kernel=FlowSDE(noise_level=0.7)
    )
    requests = [request("a", sampling, n=3), request("b", sampling, n=2, prompt="blue 1")]
    samples = await made(engine, *requests)
    shared = arrays_of(samples)
    # Of each prompt, and of none: tokens, and what is pooled of them.
    assert len(shared) == 6
    assert {array.dtype.name for array in shared.values()} == {"bfloat16"}
    assert (
        samples[0].conditions["encoder_hidden_states"]
        is samples[2].conditions["encoder_hidden_states"]
    )
    await engine.close()


async def test_latents_in_bfloat16_are_recorded_without_loss(flow: Path) -> None:
    engine = DiffusersEngine.from_pretrained(flow, dtype="bfloat16")
    kernel = FlowSDE(noise_level=0.7)
    [sample] = await made(
        engine, request("a", ImageSampling(num_inference_steps=4, kernel=kernel), n=1)
    )
    t = sample.trajectory
    assert {t.latents.dtype.name, t.next_latents.dtype.name} == {"bfloat16"}
    assert {t.means.dtype.name, t.log_probs.dtype.name} == {"float32"}
    assert np.array_equal(t.next_latents[:-1], t.latents[1:])
    for step in range(4):
        x, drawn = (
            host_tensor(latents[step : step + 1]).float() for latents in (t.latents, t.next_latents)
        )
        levels = (
            torch.tensor(getattr(t, name)[step : step + 1]) for name in ("levels", "next_levels")
        )
        std = kernel(torch.zeros_like(x), x, *levels).std
        again = Transition(torch.from_numpy(t.means[step : step + 1]), std).log_prob(drawn)
        np.testing.assert_allclose(again, t.log_probs[step : step + 1], rtol=1e-6)
    await engine.close()


async def test_numbers_of_a_decoder_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """As uint8 they would be black pixels; a decoder in float16 overflows to them."""
    engine = DiffusersEngine.from_pretrained(flow_pipeline(tmp_path, with_vae=True))
    engine.pipeline.vae.decoder.conv_out.bias.data[1] = torch.nan
    with pytest.raises(
        RolloutError, match=r"2 of 2 images of StableDiffusion3Pipeline have pixels that are NaN"
    ):
        await made(engine, request("a", ImageSampling(num_inference_steps=2)))
    await engine.close()


async def test_images_that_are_not_decoded_are_latents_alone(tmp_path: Path) -> None:
    """The same latents, without a pass of the decoder; the next batch is decoded again."""
    engine = DiffusersEngine.from_pretrained(flow_pipeline(tmp_path, with_vae=True))
    decoded: list[int] = []
    decoder = engine.pipeline.vae.decoder
    decoder.register_forward_hook(lambda *_: decoded.append(1))
    samples: dict[bool, ImageSample] = {}
    for decodes in (False, True):
        sampling = ImageSampling(num_inference_steps=2, decodes=decodes)
        request = ImageRequest(request_id="a", prompt="red 7", sampling=sampling, seed=3)
        [samples[decodes]] = [sample async for sample in engine.generate([request])]
        assert bool(decoded) == decodes
    await engine.close()
    assert samples[False].image.size == 0
    assert samples[True].image.size > 0
    np.testing.assert_array_equal(samples[False].latents, samples[True].latents)


@pytest.mark.parametrize("is_sharded", [False, True])
async def test_weights_of_a_variant_are_found(flow: Path, tmp_path: Path, is_sharded: bool) -> None:
    """Folders of which only the fp16 files were downloaded; one component has plain files."""
    pipeline = load_pipeline(flow)
    size = {"max_shard_size": "20kB"} if is_sharded else {}
    pipeline.save_pretrained(tmp_path / "fp16", variant="fp16", **size)
    shutil.rmtree(tmp_path / "fp16/text_encoder")
    shutil.copytree(flow / "text_encoder", tmp_path / "fp16/text_encoder")
    assert not (tmp_path / "fp16/transformer/diffusion_pytorch_model.safetensors").exists()
    found = load_pipeline(tmp_path / "fp16")
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        expected = getattr(pipeline, name).state_dict()
        assert all(
            torch.equal(tensor, expected[key])
            for key, tensor in getattr(found, name).state_dict().items()
        )
    denoiser = Denoiser.from_pretrained(
        tmp_path / "fp16", variant=weight_variant(tmp_path / "fp16/transformer")
    )
    assert denoiser.parameters().keys() == dict(pipeline.transformer.named_parameters()).keys()
    assert weight_variant(flow / "transformer") is None


class BlackingChecker(torch.nn.Module):
    """A safety checker that finds something in every image."""

    dtype = torch.float32

    def forward(self, images: Any, clip_input: torch.Tensor) -> tuple[Any, list[bool]]:
        return images * 0, [True] * len(clip_input)


async def test_safety_checkers_are_left_out(tmp_path: Path) -> None:
    """They replace images by black ones, and rewards of these say nothing of the policy."""
    pipeline = stable_diffusion(tmp_path)
    pipeline.register_modules(
        safety_checker=BlackingChecker(), feature_extractor=CLIPImageProcessor()
    )
    engine = DiffusersEngine(pipeline, size=(16, 16))
    kernel = DDIM(eta=1.0)
    [sample] = await made(
        engine,
        request("a", ImageSampling(num_inference_steps=2, kernel=kernel, size=(16, 16)), n=1),
    )
    assert sample.image.std() > 0
    await engine.close()


async def test_prompts_that_are_cut(flow: Path, tmp_path: Path) -> None:
    """A prompt is cut if another of the same beginning gives the model the same; of two encoders, one may read it."""
    engine = DiffusersEngine.from_pretrained(flow)
    one = ImageSampling(num_inference_steps=1)
    for beginning, is_cut in (("red", False), ("a very long one", True)):
        prompts = [f"{beginning} 7", f"{beginning} 8"]
        first, second = await made(
            engine, *(request(text, one, n=1, prompt=text) for text in prompts)
        )
        embeddings = [sample.conditions["encoder_hidden_states"] for sample in (first, second)]
        assert np.array_equal(*embeddings) == is_cut
        assert cut_prompts(flow, prompts) == (prompts if is_cut else [])
    await engine.close()
    # CLIP reads 8 tokens of FLUX's prompts, and T5 as many as it is set to.
    flux_schnell(tmp_path).save_pretrained(tmp_path / "flux")
    prompts = ["red", "a long one", "a very long one"]
    assert cut_prompts(tmp_path / "flux", prompts, max_sequence_length=12) == prompts[2:]
    assert cut_prompts(tmp_path / "flux", prompts) == []


async def test_text_encoders_are_elsewhere_while_images_are_denoised(flow: Path) -> None:
    sampling = ImageSampling(num_inference_steps=2, guidance_scale=2.0)
    expected = await made(DiffusersEngine.from_pretrained(flow), request("a", sampling))
    engine = DiffusersEngine.from_pretrained(flow, offload_text_encoders=True)
    weight = engine.pipeline.text_encoder.text_model.final_layer_norm.weight
    kept, seen = weight.data_ptr(), dict[str, list[bool]](text_encoder=[], transformer=[])
    for name, found in seen.items():
        hook = lambda *_, found=found: found.append(weight.data_ptr() == kept)  # noqa: E731 - of this name's list
        getattr(engine.pipeline, name).register_forward_pre_hook(hook)
    await engine.sleep()
    await engine.wake()
    samples = await made(engine, request("a", sampling))
    assert seen == {"text_encoder": [False] * len(seen["text_encoder"]), "transformer": [True] * 2}
    assert len(seen["text_encoder"]) > 0
    for one, other in zip(samples, expected, strict=True):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-5)
    await engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own imports
async def test_compiled_blocks_make_the_same_images(
    flow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by weights that came later."""
    plain, compiled = (
        DiffusersEngine.from_pretrained(flow, compiles=compiles) for compiles in (False, True)
    )
    weights = {name: 1.1 * tensor for name, tensor in plain.pipeline.transformer.named_parameters()}
    for engine in (plain, compiled):
        await engine.update_weights(weights.items(), version=1)
    for one, other in zip(
        await made(compiled, request("a", SDE)), await made(plain, request("a", SDE)), strict=True
    ):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-4)
        ratios = np.exp(one.trajectory.log_probs - other.trajectory.log_probs)
        np.testing.assert_allclose(ratios, 1.0, atol=1e-4)
    assert not hasattr(
        plain.pipeline.transformer.transformer_blocks[0].forward, "_torchdynamo_orig_callable"
    )
    assert hasattr(
        compiled.pipeline.transformer.transformer_blocks[0].forward, "_torchdynamo_orig_callable"
    )
    monkeypatch.setattr("shutil.which", lambda *_: None)
    with pytest.raises(RolloutError, match=r"compile is True; expected a C\+\+ compiler on CPU"):
        DiffusersEngine.from_pretrained(flow, compiles=True)


async def test_text_encoders_that_are_not_there_stay_nowhere(ddim: Path) -> None:
    with pytest.raises(
        EngineModelError, match="DiTPipeline has no text encoder; expected one with offload"
    ):
        DiffusersEngine.from_pretrained(ddim, offload_text_encoders=True)


async def test_without_noise_the_images_are_the_pipelines_own(flow: Path) -> None:
    """Whatever else is in the batch."""
    engine = DiffusersEngine.from_pretrained(flow)
    sampling = ImageSampling(num_inference_steps=4, guidance_scale=2.0)
    found = await made(
        engine, request("a", sampling, n=3, seed=5), request("b", sampling, n=2, prompt="blue 1")
    )
    alone = await made(engine, request("a", sampling, n=3, seed=5))
    for one, other in zip(found, alone, strict=False):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-5)
    pipeline = load_pipeline(flow)
    pipeline.set_progress_bar_config(disable=True)
    own = pipeline(
        prompt=["red 7"] * 3,
        generator=[image_generator(5, i) for i in range(3)],
        num_inference_steps=4,
        guidance_scale=2.0,
        output_type="latent",
    ).images
    np.testing.assert_allclose(np.stack([s.latents for s in alone]), own.numpy(), atol=1e-5)
    pixels = ((own / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).numpy()
    assert np.abs(np.stack([s.image for s in alone]).astype(float) - pixels).max() <= 1
    assert all(not s.trajectory.steps.size for s in found)
    await engine.close()


@pytest.mark.parametrize("has_images_between", [False, True])
async def test_images_of_a_group_may_start_from_one_noise(
    flow: Path, has_images_between: bool
) -> None:
    """And differ by the noise of their steps, which is not the initial noise again; other groups start elsewhere."""
    engine = DiffusersEngine.from_pretrained(flow, max_num_images=2 if has_images_between else 64)
    sampling = replace(SDE, shared_noise=True)
    samples = await made(
        engine, request("a", sampling, n=3, seed=1), request("b", sampling, n=1, seed=2)
    )
    own, other = samples[:3], samples[3]
    start = own[0].trajectory.latents[0]
    for sample in own[1:]:
        np.testing.assert_array_equal(sample.trajectory.latents[0], start)
        assert np.abs(sample.trajectory.latents[1] - own[0].trajectory.latents[1]).max() > 0.01
    assert np.abs(other.trajectory.latents[0] - start).max() > 0.01
    for sample in own:
        drawn = sample.trajectory.next_latents[0] - sample.trajectory.means[0]
        assert abs(np.corrcoef(drawn.ravel(), start.ravel())[0, 1]) < 0.5
    await engine.close()


async def test_a_negative_prompt_is_the_pipelines_own(flow: Path) -> None:
    engine = DiffusersEngine.from_pretrained(flow)
    plain = ImageSampling(num_inference_steps=3, guidance_scale=2.5)
    negative = replace(plain, negative_prompt="blue 1")
    [found] = await made(engine, request("a", negative, n=1))
    [without] = await made(engine, request("b", plain, n=1))
    pipeline = load_pipeline(flow)
    pipeline.set_progress_bar_config(disable=True)
    own = pipeline(
        prompt=["red 7"],
        negative_prompt=["blue 1"],
        generator=[image_generator(0, 0)],
        num_inference_steps=3,
        guidance_scale=2.5,
        output_type="latent",
    ).images
    np.testing.assert_allclose(found.latents, own[0].numpy(), atol=1e-5)
    assert np.abs(found.latents - without.latents).max() > 1e-3
    await engine.close()


@pytest.mark.parametrize(
    ("guidance_scale", "negative_prompt"), [(1.0, ""), (2.5, ""), (2.5, "blue 1")]
)
@pytest.mark.parametrize("kernel", [FlowSDE(noise_level=0.7), FlowCPS(noise_level=0.5)])
async def test_a_trajectory_can_be_made_again(
    flow: Path, kernel: Any, guidance_scale: float, negative_prompt: str
) -> None:
    """From what was recorded, by the model alone: the same means and log-probs."""
    engine = DiffusersEngine.from_pretrained(flow)
    sampling = ImageSampling(
        num_inference_steps=5,
        kernel=kernel,
        guidance_scale=guidance_scale,
        negative_prompt=negative_prompt,
    )
    samples = await made(engine, request("a", sampling, n=3, seed=1))
    model = load_pipeline(flow).transformer
    model.requires_grad_(False)
    num_steps = 4 if isinstance(kernel, FlowCPS) else 5
    for step in range(num_steps):
        x = torch.stack([torch.from_numpy(s.trajectory.latents[step]) for s in samples])
        time = torch.tensor([s.trajectory.timesteps[step] for s in samples])

        rows = [
            *(s.negative_conditions or {} for s in samples if guidance_scale != 1.0),
            *(s.conditions for s in samples),
        ]
        given = {
            name: torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in rows[0]
        }
        count = len(rows) // len(samples)
        latents, times = torch.cat([x] * count), torch.cat([time] * count)
        output = model(hidden_states=latents, timestep=times, **given, return_dict=False)[0]
        if guidance_scale != 1.0:
            without, with_prompt = output.chunk(2)
            output = without + guidance_scale * (with_prompt - without)
        level, following = (
            torch.tensor([getattr(s.trajectory, name)[step] for s in samples])
            for name in ("levels", "next_levels")
        )
        again = kernel(output, x, level, following)
        drawn = torch.stack([torch.from_numpy(s.trajectory.next_latents[step]) for s in samples])
        ratio = torch.exp(
            again.log_prob(drawn) - torch.tensor([s.trajectory.log_probs[step] for s in samples])
        )
        np.testing.assert_allclose(ratio, 1.0, atol=1e-6)
        means = np.stack([s.trajectory.means[step] for s in samples])
        np.testing.assert_allclose(again.mean, means, atol=1e-5)
    assert samples[0].trajectory.steps.tolist() == list(range(num_steps))
    np.testing.assert_array_equal(
        samples[0].trajectory.next_latents[0], samples[0].trajectory.latents[1]
    )
    await engine.close()


async def test_noise_stays_in_its_window(flow: Path) -> None:
    engine = DiffusersEngine.from_pretrained(flow)
    window = ImageSampling(num_inference_steps=6, kernel=FlowSDE(noise_level=0.7), window=(2, 4))
    plain = ImageSampling(num_inference_steps=6, window=(2, 4))
    found, without = await made(engine, request("a", window, n=1), request("b", plain, n=1))
    assert found.trajectory.steps.tolist() == without.trajectory.steps.tolist() == [2, 3]
    np.testing.assert_allclose(
        found.trajectory.latents[0], without.trajectory.latents[0], atol=1e-6
    )
    assert np.abs(found.trajectory.latents[1] - without.trajectory.latents[1]).max() > 0.01
    assert np.isnan(without.trajectory.log_probs).all()
    assert np.isfinite(found.trajectory.log_probs).all()
    await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_images_with_other_windows_share_a_batch(flow: Path, dtype: str) -> None:
    """Each has the trajectory that it has alone, with noise by its own seed inside of its own window."""
    engine = DiffusersEngine.from_pretrained(flow, dtype=dtype)
    calls: list[int] = []
    engine.pipeline.transformer.register_forward_hook(lambda *_: calls.append(1))
    windows = [(0, 2), (1, 3), (5, 6), (0, 2)]
    settings = [
        ImageSampling(num_inference_steps=6, kernel=FlowSDE(noise_level=0.7), window=w)
        for w in windows
    ]
    requests = [request(str(k), sampling, n=k + 1, seed=k) for k, sampling in enumerate(settings)]
    together = await made(engine, *requests)
    assert len(calls) == 6
    alone = [sample for each in requests for sample in await made(engine, each)]
    for sample, other in zip(together, alone, strict=True):
        assert sample.trajectory.steps.tolist() == list(range(*windows[int(sample.request_id)]))
        for name, values in vars(other.trajectory).items():
            own = getattr(sample.trajectory, name)
            assert (own.shape, own.dtype) == (values.shape, values.dtype)
            np.testing.assert_allclose(own, values, atol=1e-5 if dtype == "float32" else 0.1)
        np.testing.assert_allclose(
            sample.latents, other.latents, atol=1e-5 if dtype == "float32" else 0.1
        )
    # Those without a window record the steps with noise: they need a batch of their own.
    await made(engine, request("a", SDE), request("b", settings[0]))
    assert len(calls) == 6 + 4 * 6 + 5 + 6
    await engine.close()


async def test_ddim_and_classes(ddim: Path) -> None:
    """With a learned variance and a VAE: what diffusers' own scheduler makes of the same noise."""
    engine = DiffusersEngine.from_pretrained(ddim)
    sampling = ImageSampling(num_inference_steps=4, kernel=DDIM(eta=1.0))
    samples = await made(
        engine, request("a", sampling, n=2, prompt="two"), request("b", sampling, n=1, prompt="7")
    )
    assert [s.trajectory.steps.tolist() for s in samples] == [[0, 1, 2]] * 3
    assert samples[0].conditions["class_labels"] == 2
    assert samples[0].image.shape == (8, 8, 3)
    pipeline: Any = load_pipeline(ddim)
    scheduler: DDIMScheduler = pipeline.scheduler
    scheduler.set_timesteps(4)
    trajectory = samples[2].trajectory
    for k in range(3):
        x = torch.from_numpy(trajectory.latents[k])[None]
        time = torch.tensor([int(trajectory.timesteps[k])])
        with torch.no_grad():
            output = pipeline.transformer(x, timestep=time, class_labels=torch.tensor([7])).sample[
                :, :3
            ]
        std = scheduler._get_variance(int(time), int(time) - 250) ** 0.5  # pyright: ignore[reportPrivateUsage]
        noise = torch.from_numpy(trajectory.next_latents[k] - trajectory.means[k])[None] / std
        expected = scheduler.step(
            output, int(time), x, eta=1.0, variance_noise=noise, return_dict=False
        )[0]
        np.testing.assert_allclose(trajectory.next_latents[k], expected[0], atol=1e-5)
    await engine.close()


async def test_new_weights_make_other_images(flow: Path) -> None:
    engine = DiffusersEngine.from_pretrained(flow)
    (before,) = await made(engine, request("a", SDE, n=1))
    weights = [(name, p + 0.05) for name, p in engine.pipeline.transformer.named_parameters()]
    await engine.update_weights(weights, version=3)
    (after,) = await made(engine, request("a", SDE, n=1))
    assert (before.weight_version, after.weight_version) == (0, 3)
    assert np.abs(before.latents - after.latents).max() > 1e-3
    with pytest.raises(ValueError, match="missing names"):
        await engine.update_weights(weights[1:], version=4)
    await engine.close()


async def test_a_denoiser_that_is_not_the_trainers(flow: Path) -> None:
    """A step of an optimizer is taken, and one tensor does not get it."""
    inner = DiffusersEngine.from_pretrained(flow)
    engine = InstrumentedEngine(inner, name="engine 0", record=WeightRecord())
    before = {name: p.clone() for name, p in inner.pipeline.transformer.named_parameters()}
    after = {name: p + 0.05 for name, p in before.items()}
    await check_weights(engine, all_digests(DigestedWeights(before.items())))
    await engine.update_weights(DigestedWeights(after.items()), version=1)
    left = min(before)
    published = {**before, left: after[left]}
    digests = all_digests(DigestedWeights(before.items()))
    with pytest.raises(
        WrongWeightsError, match=f"version 2: '{left}' has the values of version 1 "
    ):
        await engine.update_weights(DigestedWeights(published.items(), digests=digests), version=2)
    await engine.close()


async def test_aborted_images_come_out_empty_and_others_are_made(flow: Path) -> None:
    engine = DiffusersEngine.from_pretrained(flow, max_num_images=2)
    await engine.pause()
    long = ImageSampling(num_inference_steps=200, kernel=FlowSDE(noise_level=0.7))
    first = asyncio.create_task(made(engine, request("a", long)))
    second = asyncio.create_task(made(engine, request("b", SDE)))
    await asyncio.sleep(0)
    assert engine.stats().num_waiting == 4
    await engine.resume()
    while not engine.stats().num_running:
        await asyncio.sleep(0.01)
    await engine.abort(["a"])
    assert [s.finish_reason for s in await first] == ["abort", "abort"]
    assert [s.finish_reason for s in await second] == ["stop", "stop"]
    await engine.close()


@pytest.mark.slow
async def test_replicas_in_processes_make_the_same_images(flow: Path) -> None:
    """And continue when one is killed."""
    start = partial(
        EngineProcess[ImageRequest, ImageSample].start,
        partial(DiffusersEngine.from_pretrained, flow),
        num_threads=1,
    )
    engines = await asyncio.gather(start(), start())
    replicas = EngineReplicas(engines)
    requests = [request(str(k), SDE, seed=k, n=3) for k in range(6)]
    there = await made(replicas, *requests)
    engine = DiffusersEngine.from_pretrained(flow)
    here = await made(engine, *requests)
    for one, other in zip(there, here, strict=True):
        assert (one.request_id, one.index) == (other.request_id, other.index)
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-4)
    task = asyncio.create_task(made(replicas, *requests))
    await asyncio.sleep(0.02)
    os.kill(engines[0].pid, signal.SIGKILL)
    survived = await task
    for one, other in zip(survived, here, strict=True):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-4)
    await replicas.close()
    await engine.close()


async def test_what_cannot_be_used_is_refused(flow: Path, ddim: Path, tmp_path: Path) -> None:
    pipeline: Any = load_pipeline(ddim)
    pipeline.scheduler = EulerDiscreteScheduler()
    with pytest.raises(
        EngineModelError, match="EulerDiscreteScheduler, whose steps have no log-probability"
    ):
        DiffusersEngine(pipeline)
    pipeline = load_pipeline(flow)
    for scheduler, advised in (
        (EulerDiscreteScheduler(), r"DDIMScheduler.from_config\(pipeline.scheduler.config\)"),
        (
            UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0),
            r"FlowMatchEuler.*\(shift=3.0\)",
        ),
        (
            FlowMatchHeunDiscreteScheduler(shift=5.0),
            r"FlowMatchEulerDiscreteScheduler\(shift=5.0\)",
        ),
    ):
        pipeline.scheduler = scheduler
        with pytest.raises(EngineModelError, match=f"expected {advised}"):
            DiffusersEngine(pipeline)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(EngineModelError, match="stochastic_sampling"):
        DiffusersEngine(pipeline)
    with pytest.raises(EngineModelError, match=r"no model_index\.json"):
        DiffusersEngine.from_pretrained(tmp_path)
    engine = DiffusersEngine.from_pretrained(flow)
    with pytest.raises(RequestError, match="kernel is DDIM"):
        await made(engine, request("a", ImageSampling(num_inference_steps=2, kernel=DDIM())))
    classes = DiffusersEngine.from_pretrained(ddim)
    with pytest.raises(RequestError, match="kernel is FlowSDE"):
        await made(classes, request("a", SDE, prompt="1"))
    with pytest.raises(RequestError, match="prompt is 'red'"):
        await made(classes, request("a", ImageSampling(num_inference_steps=2), prompt="red"))
    guided = ImageSampling(num_inference_steps=2, guidance_scale=2.0)
    with pytest.raises(EngineModelError, match="guidance within the latents"):
        await made(classes, request("a", guided, prompt="1"))
    negative = replace(guided, negative_prompt="red")
    with pytest.raises(
        RequestError, match="negative_prompt is 'red'; expected '', because DiTPipeline takes none"
    ):
        await made(classes, request("a", negative, prompt="1"))
    with pytest.raises(
        RequestError, match=r"guidance_scale is 1.0; expected above 1 with a negative_prompt"
    ):
        ImageSampling(num_inference_steps=2, negative_prompt="red")
    for kernel in (FlowODE(), DDIM(eta=0.0)):
        with pytest.raises(RequestError, match="shared_noise is True; expected False with "):
            ImageSampling(num_inference_steps=2, kernel=kernel, shared_noise=True)
    with pytest.raises(RequestError, match="window is"):
        ImageSampling(num_inference_steps=3, window=(2, 4))
    with pytest.raises(RequestError, match="num_inference_steps is 0"):
        ImageSampling(num_inference_steps=0, kernel=FlowODE())
    await engine.close()
    await classes.close()
