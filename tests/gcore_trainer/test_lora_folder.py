"""Adapters in folders of peft: what is written computes in peft what was trained, and what peft writes is taken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from megatron_oracles import GROUPS_OF_STATE, TP, assembled, save_megatron_model
from rank_pool import RankServer
from trainer_oracles import Group, load_padded, make_samples, padded_scores
from transformers import AutoModelForSequenceClassification

from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    RewardModelLossConfig,
    RewardModelObjective,
    Sample,
    TorchTrainer,
    read_lora_config,
    scored_at_end,
)

SAMPLES = make_samples([Group(12, [20, 1, 9]), Group(3, [25, 6])], seed=0)
OPTIMIZER = OptimizerConfig(lr=1e-2)
TOLERANCE = 2e-5
"""Nats; a packed row and a padded batch differ by less."""


def make_trainer(path: Path, lora: LoRAConfig) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, lora=lora)
    return TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(PolicyLossConfig()))


def peft_scores(base: Path, folder: Path) -> list[torch.Tensor]:
    model: Any = peft.PeftModel.from_pretrained(load_padded(base), folder)
    with torch.no_grad():
        return [
            s[: sample.response_ids.size]
            for s, sample in zip(padded_scores(model, SAMPLES).log_probs, SAMPLES, strict=True)
        ]


def make_folder(base: Path, folder: Path, **settings: Any) -> Path:
    """Adapters as peft alone makes and saves them, with a B that is not 0."""
    torch.manual_seed(1)
    model = peft.get_peft_model(load_padded(base), peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    "lora",
    [
        LoRAConfig(rank=4, alpha=8),
        LoRAConfig(rank=4, alpha=8, use_rslora=True, target_modules=("q_proj", "up_proj")),
    ],
    ids=["all-linear", "rsLoRA"],
)
def test_peft_computes_with_a_folder_what_was_trained(
    qwen2: Path, tmp_path: Path, lora: LoRAConfig
) -> None:
    trainer = make_trainer(qwen2, lora)
    for _ in range(3):
        trainer.train_step([SAMPLES])
    trainer.save_adapters(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(qwen2)
    assert all("." not in name for name in settings["target_modules"])
    [log_probs] = trainer.log_probs([SAMPLES])
    assert any(abs(own).sum() for own in log_probs)
    for own, expected in zip(log_probs, peft_scores(qwen2, tmp_path), strict=True):
        torch.testing.assert_close(torch.from_numpy(own), expected, rtol=0, atol=TOLERANCE)
    # Training starts from the folder where it ended; the optimizer is a new one.
    found = read_lora_config(tmp_path)
    assert (found.rank, found.scaling, found.path) == (4, lora.scaling, str(tmp_path))
    again = make_trainer(qwen2, found)
    for name, tensor in trainer.state()["model"].items():
        assert torch.equal(again.state()["model"][name], tensor)
    assert dict(again.export_weights()).keys() == dict(trainer.export_weights()).keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*self_attn\.(q|v)_proj", "lora_dropout": 0.1},
        {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"target_modules": "all-linear"},
    ],
    ids=["pattern", "some layers", "all-linear"],
)
def test_training_starts_from_what_peft_saved(
    llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = make_folder(llama, tmp_path, r=3, lora_alpha=5, **settings)
    trainer = make_trainer(llama, read_lora_config(folder))
    [log_probs] = trainer.log_probs([SAMPLES])
    for own, expected in zip(log_probs, peft_scores(llama, folder), strict=True):
        torch.testing.assert_close(torch.from_numpy(own), expected, rtol=0, atol=TOLERANCE)
    assert trainer.train_step([SAMPLES])["actor/grad_norm"] > 0


def test_the_head_of_a_reward_model_learns_too(qwen2: Path, tmp_path: Path) -> None:
    pairs = [scored_at_end(s) for s in (SAMPLES[0], SAMPLES[1])]

    def make(lora: LoRAConfig) -> TorchTrainer:
        packed = PackedValueModel.from_pretrained(qwen2, lora=lora)
        objective = RewardModelObjective(RewardModelLossConfig())
        return TorchTrainer(packed, optimizer=OPTIMIZER, objective=objective)

    trainer = make(LoRAConfig(rank=2, alpha=4))
    for _ in range(3):
        trainer.train_step([pairs])
    state = trainer.state()["model"]
    assert state["score.weight"].any()
    assert not any("score.lora" in name for name in state)
    trainer.save_adapters(tmp_path)
    [values] = trainer.values([pairs])
    base: Any = AutoModelForSequenceClassification.from_pretrained(qwen2, num_labels=1)
    model: Any = peft.PeftModel.from_pretrained(base, tmp_path)
    again = make(read_lora_config(tmp_path))
    [same] = again.values([pairs])
    for pair, own, other in zip(pairs, values, same, strict=True):
        ids = torch.cat([torch.from_numpy(pair.prompt_ids), torch.from_numpy(pair.response_ids)])
        with torch.no_grad():
            # A value is of the state before its token.
            expected = model(input_ids=ids[None, :-1]).logits[0, 0]
        assert own[-1] == pytest.approx(expected.item(), abs=TOLERANCE)
        assert (own == other).all()


def _edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda folder: (folder / "adapter_config.json").unlink(),
            "expected a folder of peft, with adapter_config",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "with adapter_model.safetensors",
        ),
        (_edited(use_dora=True), "use_dora is True; expected None"),
        (_edited(rank_pattern={"q_proj": 8}), "rank_pattern is {'q_proj': 8}; expected None"),
        (_edited(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]; expected None"),
        (_edited(peft_type="IA3"), "peft_type is 'IA3'; expected 'LORA'"),
        (
            _edited(target_modules=["q_proj", "k_proj"]),
            "for 4 of whose tensors there is none, such as model.layers.0",
        ),
        (
            _edited(target_modules=["k_proj"]),
            "which has no layer for 4 of its tensors, such as model.layers.0.self_",
        ),
        (_edited(r=5), r"q_proj.lora_A.default.weight has shape \(5, 64\), and not \(4, 64\)"),
        (_cut, "expected adapters that load: adapter_model.safetensors"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    qwen2: Path, tmp_path: Path, edit: Callable[[Path], None], message: str
) -> None:
    folder = make_folder(qwen2, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"])
    edit(folder)
    with pytest.raises(ConfigError, match=message):
        make_trainer(qwen2, read_lora_config(folder))


def test_a_model_without_adapters_has_none_to_save(qwen2: Path, tmp_path: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    trainer = TorchTrainer(
        packed, optimizer=OPTIMIZER, objective=PolicyObjective(PolicyLossConfig())
    )
    with pytest.raises(ConfigError, match="the model has no adapters to save"):
        trainer.save_adapters(tmp_path)


@pytest.mark.slow
def test_ranks_of_both_backends_start_from_a_folder(
    rank_server: RankServer, tmp_path: Path
) -> None:
    base = save_megatron_model("qwen3_tied", tmp_path / "base")
    folder = make_folder(
        base,
        tmp_path / "adapters",
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "o_proj", "up_proj"],
    )
    lora, ranks = read_lora_config(folder), rank_server.shared(2)
    objective = PolicyObjective(PolicyLossConfig())
    alone = make_trainer(base, lora)
    metrics = alone.train_step([SAMPLES])
    options = {"optimizer": OPTIMIZER, "objective": objective, "lora": lora}
    results = ranks.run("megatron_trains", str(base), {TP: 2}, options, [[[SAMPLES]]], size=2)
    assert results[0][0][0]["actor/grad_norm"] == pytest.approx(
        metrics["actor/grad_norm"], rel=1e-4
    )
    state = assembled(box for _, _, boxes in results for box in boxes)
    for group in GROUPS_OF_STATE:
        for name, tensor in alone.state()[group].items():
            torch.testing.assert_close(state[group][name], tensor, rtol=1e-3, atol=1e-5)
    halves: list[list[list[Sample]]] = [[SAMPLES[:2]], [SAMPLES[2:]]]
    arguments = (str(base), objective, OPTIMIZER, ParallelConfig(), [halves], {"lora": lora})
    [(own, weights), _] = ranks.run("train", *arguments, size=2)
    assert own[0]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
    for name, tensor in alone.export_weights():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)
