"""`DiffusionTrainer` over several processes against one process: FSDP2, or whole on each, on real gloo ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusion_cases import kernel, trained
from rank_pool import RankServer
from tiny_pipelines import flow_pipeline

from gcore_trainer import (
    Denoiser,
    DiffusionMicroBatch,
    DiffusionObjective,
    DiffusionSample,
    ForwardObjective,
    LoRAConfig,
)
from gcore_trainer.diffusion.trainer import score_steps
from gcore_trainer.lora import save_adapters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(flow_pipeline(tmp_path_factory.mktemp("pipeline")))


OBJECTIVES: dict[str, DiffusionObjective] = {
    # It keeps the policy that samples apart, and asks the reference.
    "nft": ForwardObjective("nft", num_timesteps=2, kl_loss_coef=0.1),
    "dpo": ForwardObjective("dpo", num_timesteps=2, beta=20.0),
}


def images(count: int, seed: int) -> list[DiffusionSample]:
    rng = np.random.default_rng(seed)
    return [
        DiffusionSample(
            clean_latents=rng.standard_normal((3, 8, 8)).astype(np.float32),
            conditions={
                "encoder_hidden_states": rng.standard_normal((3, 32)).astype(np.float32),
                "pooled_projections": rng.standard_normal(32).astype(np.float32),
            },
            advantage=float(rng.standard_normal()),
            noise_seed=100 * seed + i,
        )
        for i in range(count)
    ]


def dealt(samples: list[DiffusionSample], size: int) -> list[list[DiffusionMicroBatch]]:
    """Each replica's micro-batches of pairs: the first one has more, and more of them."""
    pairs = [samples[i : i + 2] for i in range(0, len(samples), 2)]
    rest = pairs[size - 1 :]
    return [[[*rest[0], *rest[1]], *rest[2:]], *([pair] for pair in pairs[: size - 1])]


@pytest.mark.parametrize(
    ("name", "size", "fsdp_size"),
    [
        ("nft", 4, 0),
        ("nft", 4, 1),
        ("nft", 4, 2),
        ("dpo", 2, 0),
        ("nft with adapters", 2, 0),
        ("nft with adapters", 2, 1),
        ("dpo with adapters", 2, 1),
    ],
)
def test_steps_are_those_of_one_process(
    rank_server: RankServer, pipeline: str, name: str, size: int, fsdp_size: int
) -> None:
    """Uneven parts, weight decay, clipping and the average of the weights included."""
    objective, lora = (
        OBJECTIVES[name.split()[0]],
        LoRAConfig(rank=2, alpha=4) if "adapters" in name else None,
    )
    steps = [images(12, seed) for seed in range(2)]
    alone_steps = [[[samples]] for samples in steps]
    expected, weights, averages = trained(pipeline, objective, alone_steps, lora)
    parts = [dealt(samples, size) for samples in steps]
    answers = rank_server.shared(size).run(
        "train_images", pipeline, objective, parts, lora, fsdp_size, size=size
    )
    for metrics, own, averaged in answers:
        # At first policy and reference are alike, and who is preferred is a matter of rounding.
        for found, alone in zip(metrics, expected, strict=True):
            left_out = {"actor/dpo_accuracy"} if alone is expected[0] else set[str]()
            assert found.keys() == alone.keys()
            for key in alone.keys() - left_out:
                assert found[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key
        for these, those in ((own, weights), (averaged, averages)):
            assert these.keys() == those.keys()
            for tensor_name, tensor in those.items():
                torch.testing.assert_close(these[tensor_name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fsdp_size", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1), (0, 1), (0, 0)])
def test_scores_of_steps_are_those_of_one_process(
    rank_server: RankServer, pipeline: str, sizes: tuple[int, int], fsdp_size: int
) -> None:
    """Also on a rank that has no images."""
    levels, rng = np.linspace(1.0, 0.0, 4).astype(np.float32), np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 8, 8)).astype(np.float32)
    steps = {
        "latents": x[:-1],
        "next_latents": x[1:],
        "levels": levels[:-1],
        "next_levels": levels[1:],
    }
    made = [replace(s, **steps, timesteps=1000 * levels[:-1]) for s in images(8, seed=0)]
    batches = iter([made[:2], made[2:5], made[5:]])
    parts = [[next(batches) for _ in range(size)] for size in sizes]
    answers = rank_server.shared(2).run("score_images", pipeline, parts, fsdp_size, size=2)
    for own, part in zip(answers, parts, strict=True):
        expected = score_steps(Denoiser.from_pretrained(pipeline), part, kernel)
        for found, alone in zip(own, expected, strict=True):
            for one, other in zip(found, alone, strict=True):
                np.testing.assert_allclose(one[0], other[0], atol=1e-5)
                np.testing.assert_allclose(one[1], other[1], rtol=1e-5)


@pytest.mark.parametrize("fsdp_size", [0, 1])
@pytest.mark.parametrize("name", ["nft", "nft with adapters", "nft from adapters"])
def test_models_that_are_read_by_slices_train_alike_to_the_bit(
    rank_server: RankServer, tmp_path: Path, name: str, fsdp_size: int
) -> None:
    """Policy, sampling policy and reference; of a folder with two files and an index, in bfloat16."""
    path = flow_pipeline(tmp_path)
    model: Any = SD3Transformer2DModel.from_pretrained(path / "transformer")
    (path / "transformer/diffusion_pytorch_model.safetensors").unlink()
    model.bfloat16().save_pretrained(path / "transformer", max_shard_size="20KB")
    assert len(list((path / "transformer").glob("*.safetensors"))) > 1
    lora = LoRAConfig(rank=2, alpha=4)
    if name == "nft from adapters":
        lora = saved_adapters(path, tmp_path / "adapters", lora)
    parts = [dealt(images(12, seed), 2) for seed in range(2)]
    arguments = OBJECTIVES["nft"], parts, lora if "adapters" in name else None, fsdp_size
    for whole, sliced in rank_server.shared(2).run(
        "train_both_ways", str(path), *arguments, size=2
    ):
        assert sliced[0] == whole[0]
        for own, expected in zip(sliced[1:], whole[1:], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def saved_adapters(path: Path, folder: Path, lora: LoRAConfig) -> LoRAConfig:
    """Write adapters that are not the initial ones, and return the settings of a run that starts from them."""
    denoiser = Denoiser.from_pretrained(path, lora=lora)
    for parameter in denoiser.trained_parameters().values():
        torch.nn.init.normal_(parameter, std=0.1)
    save_adapters(folder, denoiser.trained_parameters(), lora, base=str(path))
    return replace(lora, path=str(folder))


BF16 = {"compute_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [({}, 8), (BF16, 6), ({**BF16, "lora": LoRAConfig(rank=1, target_modules=("to_q",))}, 2)],
    ids=["float32", "bfloat16", "adapters"],
)
def test_a_rank_needs_its_shards_and_little_more(
    rank_server: RankServer, tmp_path: Path, options: dict[str, Any], num_bytes: int
) -> None:
    """Of a policy and its reference, ``num_bytes`` a parameter: a reference in bfloat16 has half of the bytes."""
    model = SD3Transformer2DModel(
        sample_size=8,
        num_layers=12,
        attention_head_dim=32,
        num_attention_heads=8,
        joint_attention_dim=32,
        caption_projection_dim=256,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    num_parameters = model.num_parameters()
    model.bfloat16().save_pretrained(tmp_path / "transformer")
    index = {"transformer": ["diffusers", "SD3Transformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with rank_server.pool(2) as ranks:
        sliced = ranks.run("peak_bytes_of_images", str(tmp_path), True, options, size=2)
        whole = ranks.run("peak_bytes_of_images", str(tmp_path), False, options, size=2)
    print(f"{num_parameters / 1e6:.1f} million parameters: {sliced} of which shards, {whole}")
    for (peak, shards), (whole_peak, whole_shards) in zip(sliced, whole, strict=True):
        assert shards == whole_shards == pytest.approx(num_bytes / 2 * num_parameters, rel=0.03)
        assert peak < 1.1 * shards + 8e6
        assert whole_peak > 0.9 * (num_bytes * num_parameters)


def test_ranks_that_would_call_the_model_unequally_are_refused(
    rank_server: RankServer, pipeline: str
) -> None:
    """One replica's micro-batch has prompts of two lengths, which need two calls; ranks with copies train on it."""
    equal, mixed = images(2, 0), images(2, 1)
    longer = np.zeros((5, 32), np.float32)
    mixed[1] = replace(
        mixed[1], conditions={**mixed[1].conditions, "encoder_hidden_states": longer}
    )
    given = pipeline, OBJECTIVES["nft"], [[[equal], [mixed]]], None
    rank_server.shared(2).run("train_images", *given, 1, size=2)
    errors = rank_server.shared(2).errors("train_images", *given, 0, size=2)
    assert all(
        "BatchError: micro-batches need [1, 2] calls of the model" in error for error in errors
    )
