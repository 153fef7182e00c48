"""Adapters that travel alone are merged as the trainer merges them, and as peft does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from engine_oracles import TinyModel
from tiny_pipelines import flow_pipeline
from transformers import AutoModelForCausalLM
from weight_sync_oracles import LORA, adapters_of, check_behind, check_synced, make_trainer, train

from gcore_rollout import DiffusersEngine, FlowSDE, HFEngine, ImageRequest, ImageSampling
from gcore_rollout.weight_sync.updates import (
    A_OF,
    B_OF,
    AdapterWeights,
    WeightMirror,
    check_adapters,
    merge_adapters,
)
from gcore_trainer import Denoiser, DiffusionSample, TorchTrainer
from gcore_trainer.diffusion.trainer import score_steps

SCALING = LORA.alpha / LORA.rank
LAYER = "model.layers.0.self_attn.q_proj"
_OF_ENGINES = ("means", "log_probs", "steps")
"""Fields of a trajectory that a trainer's image has under other names, or not at all."""


def sent_by(trainer: TorchTrainer, *, version: int, base_version: int = 0) -> AdapterWeights:
    return AdapterWeights(
        base_version=base_version, version=version, scaling=SCALING, tensors=adapters_of(trainer)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_as_the_trainer_does(tied: TinyModel, dtype: torch.dtype) -> None:
    trainer = make_trainer(tied.path, lora=LORA, dtype=dtype)
    base = {name: tensor.clone() for name, tensor in trainer.export_weights()}  # B is zero at first
    for seed in range(2):
        train(trainer, seed=seed)
    adapters = sent_by(trainer, version=1)
    check_adapters(base, adapters)
    ours, expected = dict(merge_adapters(base, adapters)), dict(trainer.export_weights())
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
    assert {name for name in base if not torch.equal(ours[name], base[name])} == {
        f"{layer}.weight" for layer in adapters.layers
    }
    assert adapters.size_bytes < sum(tensor.nbytes for tensor in base.values()) / 4


def test_merged_as_peft_does(tied: TinyModel) -> None:
    trainer = make_trainer(tied.path, lora=LORA)
    base = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    train(trainer)
    adapters = sent_by(trainer, version=1)
    model: Any = AutoModelForCausalLM.from_pretrained(tied.path, dtype=torch.float32)
    targets = sorted(adapters.layers)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=targets)
    adapted: Any = peft.get_peft_model(model, config)
    found = adapted.load_state_dict(
        {f"base_model.model.{n}": t for n, t in adapters.tensors.items()}, strict=False
    )
    assert not found.unexpected_keys
    expected = dict(adapted.merge_and_unload().named_parameters())
    ours = dict(merge_adapters(base, adapters))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor.detach(), rtol=0, atol=1e-6)


def test_bfloat16_weights_are_merged_to_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(*shape, generator=generator) for shape in ((64, 96), (4, 96), (64, 4))
    )
    base = {f"{LAYER}.weight": weight.bfloat16()}
    tensors = {LAYER + A_OF: 0.1 * a, LAYER + B_OF: 0.1 * b}
    found = dict(
        merge_adapters(
            base, AdapterWeights(base_version=0, version=1, scaling=2.0, tensors=tensors)
        )
    )
    expected = base[f"{LAYER}.weight"].double() + 2.0 * (
        tensors[LAYER + B_OF].double() @ tensors[LAYER + A_OF].double()
    )
    assert (found[f"{LAYER}.weight"] == expected.bfloat16()).double().mean() > 0.999


async def test_an_engine_follows_a_trainer_by_adapters(tied: TinyModel) -> None:
    """Every version is merged onto the frozen weights, not onto the version before."""
    engine, trainer = HFEngine.from_pretrained(tied.path), make_trainer(tied.path, lora=LORA)
    mirror = WeightMirror(engine, trainer.export_weights())
    for version in (1, 2, 3):
        train(trainer, seed=version)
        await check_behind(engine, trainer)
        await mirror.apply(sent_by(trainer, version=version))
        await check_synced(engine, trainer, version=version)
    for name, tensor in trainer.export_weights():
        torch.testing.assert_close(dict(mirror)[name], tensor, rtol=0, atol=1e-6)


async def test_an_engine_of_images_follows_a_trainer_by_adapters(tmp_path: Path) -> None:
    """The trainer's density of its steps is the engine's."""
    path, kernel = flow_pipeline(tmp_path), FlowSDE(noise_level=0.7)
    policy = Denoiser.from_pretrained(path, lora=LORA)
    engine: Any = DiffusersEngine.from_pretrained(path)
    mirror = WeightMirror(engine, policy.initial().weights())
    for version in (1, 2):
        for adapter in policy.trained_parameters().values():
            torch.nn.init.normal_(adapter, std=0.2)
        tensors = {name: adapter.detach() for name, adapter in policy.trained_parameters().items()}
        sent = AdapterWeights(base_version=0, version=version, scaling=SCALING, tensors=tensors)
        await mirror.apply(sent)
        sampling = ImageSampling(num_inference_steps=4, kernel=kernel)
        made = [
            s
            async for s in engine.generate(
                [ImageRequest(request_id="a", prompt="red", sampling=sampling, n=2)]
            )
        ]
        given = {"clean_latents": made[0].latents, "conditions": made[0].conditions}
        steps = {
            name: value
            for name, value in vars(made[0].trajectory).items()
            if name not in _OF_ENGINES
        }
        sample = DiffusionSample(**given, **steps)
        [[(_, log_probs)]] = score_steps(policy, [[sample]], kernel)
        torch.testing.assert_close(
            *map(torch.from_numpy, (log_probs, made[0].trajectory.log_probs))
        )
        [[(_, initial)]] = score_steps(policy.initial(), [[sample]], kernel)
        assert abs(initial - log_probs).max() > 1e-3
    await engine.close()


def test_adapters_that_do_not_fit_are_refused() -> None:
    base = {f"{LAYER}.weight": torch.zeros(6, 8)}
    a, b = torch.zeros(2, 8), torch.zeros(6, 2)
    good = AdapterWeights(
        base_version=0, version=1, scaling=1.0, tensors={LAYER + A_OF: a, LAYER + B_OF: b}
    )
    check_adapters(base, good)
    for tensors, message in (
        ({LAYER: a}, "no name of an adapter"),
        ({LAYER + A_OF: a}, f"the adapter of '{LAYER}' has no B; expected both"),
        ({LAYER + B_OF: b}, "has no A; expected both"),
        ({"x" + A_OF: a, "x" + B_OF: b}, "an adapter of 'x', and no weight of that layer"),
        ({LAYER + A_OF: a, LAYER + B_OF: torch.zeros(6, 3)}, r"A \[2, 8\] and B \[6, 3\]"),
        ({LAYER + A_OF: b.T, LAYER + B_OF: a.T}, r"expected \[rank, 8\] and \[6, rank\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_adapters(base, replace(good, tensors=tensors))
