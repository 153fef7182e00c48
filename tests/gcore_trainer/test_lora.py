"""Adapters: what they start from, what they train, and what leaves when they are merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import save_megatron_model
from rank_pool import RankServer
from trainer_oracles import Group, load_padded, make_samples, nearest_merge_share, padded_scores

from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    TorchTrainer,
)
from gcore_trainer.lora import initial_a, merge_lora

GROUPS = [Group(12, [20, 1, 9]), Group(3, [25, 6])]
LORA = LoRAConfig(rank=4, alpha=8)
OPTIMIZER = OptimizerConfig(lr=1e-2)


def make_trainer(path: Path, lora: LoRAConfig = LORA) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, lora=lora)
    return TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(PolicyLossConfig()))


def test_only_adapters_learn_and_exports_hold_them_merged(qwen2: Path, tmp_path: Path) -> None:
    trainer = make_trainer(qwen2)
    samples = make_samples(GROUPS, seed=0)
    before = dict(load_padded(qwen2).named_parameters())
    for name, tensor in trainer.export_weights():
        assert torch.equal(tensor, before[name])  # B is zero at first
    for _ in range(3):
        trainer.train_step([samples])
    [log_probs] = trainer.log_probs([samples])
    weights = dict(trainer.export_weights())
    assert weights.keys() == before.keys()
    changed = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "_proj.weight" in name}
    assert all("lora_" in name for name in trainer.state()["model"])
    trainer.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        scores = padded_scores(load_padded(tmp_path / "merged"), samples)
    for own, expected in zip(log_probs, scores.log_probs, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), expected[: own.size], rtol=0, atol=2e-5)


def test_adapters_alone_are_enough_to_resume_and_to_merge(qwen2: Path) -> None:
    first, second = make_trainer(qwen2), make_trainer(qwen2)
    samples = make_samples(GROUPS, seed=0)
    first.train_step([samples])
    second.load_state(first.state())
    assert second.train_step([samples]) == first.train_step([samples])
    base = load_padded(qwen2).named_parameters()
    offline = dict(merge_lora(((n, p.detach()) for n, p in base), second.state()["model"], LORA))
    for name, tensor in second.export_weights():
        torch.testing.assert_close(offline[name], tensor, rtol=0, atol=1e-7)


def test_bfloat16_weights_are_merged_to_the_nearest(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2, lora=LORA, dtype=torch.bfloat16)
    trainer = TorchTrainer(
        packed, optimizer=OPTIMIZER, objective=PolicyObjective(PolicyLossConfig())
    )
    base = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    for seed in range(3):
        trainer.train_step([make_samples(GROUPS, seed=seed)])
    exported = dict(trainer.export_weights())
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert (
        nearest_merge_share(exported, base, trainer.state()["model"], LORA.alpha / LORA.rank)
        > 0.999
    )


@pytest.mark.slow
def test_adapters_are_sharded_too(rank_server: RankServer, llama: Path) -> None:
    samples = make_samples(GROUPS, seed=0)
    alone = make_trainer(llama)
    expected = [alone.train_step([samples]) for _ in range(3)]
    options: dict[str, Any] = {"lora": LORA}
    steps = [[[samples[:2]], [samples[2:]]]] * 3
    arguments = (
        str(llama),
        PolicyObjective(PolicyLossConfig()),
        OPTIMIZER,
        ParallelConfig(),
        steps,
        options,
    )
    for metrics, weights in rank_server.shared(2).run("train", *arguments, size=2):
        for own, one in zip(metrics, expected, strict=True):
            assert own["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
        for name, tensor in alone.export_weights():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)


def test_a_starts_from_its_layers_name_alone(qwen2: Path) -> None:
    before = torch.get_rng_state()
    adapters = make_trainer(qwen2).state()["model"]
    assert torch.equal(torch.get_rng_state(), before)
    of_one_layer = make_trainer(
        qwen2, LoRAConfig(rank=4, target_modules=("layers.1.mlp.up_proj",))
    ).state()["model"]
    assert len(of_one_layer) == 2
    assert all(torch.equal(tensor, adapters[name]) for name, tensor in of_one_layer.items())
    for name, tensor in adapters.items():
        layer, _, end = name.partition(".lora_")
        if end == "A.default.weight":
            assert torch.equal(tensor, initial_a(layer, *tensor.shape))
            assert not torch.equal(tensor, initial_a(layer, *tensor.shape, seed=1))
        else:
            assert not tensor.any()
    firsts = {tensor[0, 0].item() for name, tensor in adapters.items() if ".lora_A." in name}
    assert len(firsts) == len(adapters) / 2


def test_a_is_uniform_within_its_bounds() -> None:
    a = initial_a("model.layers.0.self_attn.q_proj", 64, 4096)
    bound = 4096**-0.5
    assert a.abs().max().item() <= bound
    assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert a.mean().item() == pytest.approx(0, abs=bound / 100)


def test_all_linear_leaves_experts_and_routers_out(tmp_path: Path) -> None:
    trainer = make_trainer(save_megatron_model("qwen3_moe", tmp_path))
    layers = {name.partition(".lora_")[0].split(".", 3)[-1] for name in trainer.state()["model"]}
    assert layers == {f"self_attn.{kind}_proj" for kind in "qkvo"}


def test_modules_that_are_no_linear_layers_are_refused(llama: Path, tmp_path: Path) -> None:
    """Their adapters would be missing from what is exported."""
    experts = save_megatron_model("qwen3_moe", tmp_path)
    for path, name, module in (
        (llama, "embed_tokens", "model.embed_tokens"),
        (experts, "down_proj", "model.layers.0.mlp.experts"),
        (experts, "gate", "model.layers.0.mlp.gate"),
    ):
        with pytest.raises(ConfigError) as error:
            make_trainer(path, LoRAConfig(target_modules=("q_proj", name)))
        assert f"expected linear layers, which alone can be merged: {module} is none" in str(
            error.value
        )


def test_modules_that_are_not_there_are_refused(qwen2: Path) -> None:
    with pytest.raises(ConfigError, match=r"^target_modules is \('query_key_value',\)"):
        make_trainer(qwen2, LoRAConfig(target_modules=("query_key_value",)))
    with pytest.raises(ConfigError, match=r"^rank is 0; expected 1 or more"):
        LoRAConfig(rank=0)


@pytest.mark.parametrize("names", [("lm_head",), ("q_proj", "lm_head")])
def test_the_head_gets_no_adapter(qwen2: Path, names: tuple[str, ...]) -> None:
    """The packed head computes with the weight of the layer, so such an adapter would never learn."""
    with pytest.raises(ConfigError, match="expected layers other than the head 'lm_head'"):
        make_trainer(qwen2, LoRAConfig(rank=2, target_modules=names))
