"""Muon: its steps are those of torch.optim.Muon, next to AdamW; on ranks, in bfloat16, with adapters, resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import save_megatron_model
from rank_pool import RankServer
from trainer_oracles import Group, make_samples

from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    SFTObjective,
    TorchTrainer,
)
from gcore_trainer.torch.optimizer import hidden_matrices, make_adamw

GROUPS = [Group(12, [20, 1, 9]), Group(3, [25, 6])]
CONFIG = OptimizerConfig(name="muon", lr=2e-3, muon_lr=1e-2, weight_decay=0.1, grad_clip=1e9)


def make_trainer(path: Path, config: OptimizerConfig = CONFIG, **options: Any) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    return TorchTrainer(packed, optimizer=config, objective=SFTObjective())


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        n: {k: t.clone() for k, t in v.items()} if isinstance(v, dict) else v
        for n, v in state.items()
    }


def is_hidden(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


@pytest.mark.parametrize("name", ["qwen2", "llama"], ids=["tied, biases", "untied"])
def test_three_steps_are_those_of_torch(folders: dict[str, Path], name: str) -> None:
    config = replace(CONFIG, lr_warmup_steps=2)
    trainer = make_trainer(folders[name], config)
    own = {n: torch.nn.Parameter(t.clone()) for n, t in trainer.state()["model"].items()}
    hidden = [p for n, p in own.items() if is_hidden(n, p)]
    others = [p for n, p in own.items() if not is_hidden(n, p)]
    assert len(hidden) == 14
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.999), weight_decay=0.1)
    for step in range(3):
        lr = trainer.train_step([make_samples(GROUPS, seed=step)])["actor/lr"]
        assert lr == [1e-3, 2e-3, 2e-3][step]
        for n, parameter in trainer._parameters.items():  # pyright: ignore[reportPrivateUsage]  # their gradients
            assert parameter.grad is not None
            own[n].grad = parameter.grad.clone()
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 5 * lr, lr
        muon.step()
        adamw.step()
    state = trainer.state()
    for n, parameter in own.items():
        torch.testing.assert_close(
            state["model"][n], parameter.detach(), rtol=1e-5, atol=1e-6, msg=n
        )
        if is_hidden(n, parameter):
            torch.testing.assert_close(
                state["exp_avg"][n], muon.state[parameter]["momentum_buffer"]
            )
            assert n not in state["exp_avg_sq"]
    assert state["optimizer_step"] == 3


@pytest.mark.parametrize(
    "options",
    [{}, {"compute_dtype": torch.bfloat16}, {"lora": LoRAConfig(rank=4, alpha=8)}],
    ids=["float32", "bf16", "lora"],
)
def test_it_learns_and_resumes_to_the_bit(qwen2: Path, options: dict[str, Any]) -> None:
    config = replace(CONFIG, grad_clip=1.0)
    trainer = make_trainer(qwen2, config, **options)
    samples = make_samples(GROUPS, seed=0)
    losses = [trainer.train_step([samples])["sft/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.1
    saved = copied(trainer.state())
    expected = [trainer.train_step([samples]) for _ in range(2)]
    again = make_trainer(qwen2, config, **options)
    again.load_state(saved)
    assert [again.train_step([samples]) for _ in range(2)] == expected
    assert again.state()["optimizer_step"] == 6
    again.sleep()
    again.wake()
    for name, tensor in trainer.state()["exp_avg"].items():
        assert torch.equal(again.state()["exp_avg"][name], tensor)


def test_what_is_no_matrix_of_a_hidden_layer_is_adamws(qwen2: Path, tmp_path: Path) -> None:
    """Fused experts have three dimensions; a router is a matrix, a value head is none of a hidden layer."""
    experts = PackedModel.from_pretrained(save_megatron_model("qwen3_moe", tmp_path))
    found = hidden_matrices(experts.named_parameters(), experts.model)
    assert {name.split(".", 3)[-1] for name in found} == {
        *(f"self_attn.{kind}_proj.weight" for kind in "qkvo"),
        "mlp.gate.weight",
    }
    critic = PackedValueModel.from_pretrained(qwen2)
    names = hidden_matrices(critic.named_parameters(), critic.model)
    assert len(names) == 14
    assert all("_proj" in name for name in names)


def test_settings_that_do_not_fit_are_refused(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    with pytest.raises(
        ConfigError,
        match=r"^name is 'muon'; expected 'adamw' or 'adamw_8bit' with optimizer states",
    ):
        packed.optimizer(CONFIG, offload=True)
    with pytest.raises(
        ConfigError, match=r"^name is 'muon'; expected 'adamw' or 'adamw_8bit' for this model"
    ):
        make_adamw(packed.named_parameters(), CONFIG, offload=False)
    with pytest.raises(
        ConfigError, match=r"^muon_lr is 0; expected a finite number above 0, or none"
    ):
        OptimizerConfig(muon_lr=0)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp_size", [0, 1], ids=["sharded", "copies"])
def test_ranks_update_as_one_process(rank_server: RankServer, llama: Path, fsdp_size: int) -> None:
    """A gathered matrix is made orthogonal as a whole; rounding to bfloat16 amplifies that of the gradient's sum."""
    samples = make_samples(GROUPS, seed=0)
    alone = make_trainer(llama)
    before = {name: tensor.clone() for name, tensor in alone.export_weights()}
    expected = [alone.train_step([samples]) for _ in range(2)]
    steps = [[[samples[:2]], [samples[2:]]]] * 2
    parallel = ParallelConfig(fsdp_size=fsdp_size)
    arguments = (str(llama), SFTObjective(), CONFIG, parallel, steps, {})
    for metrics, weights in rank_server.shared(2).run("train", *arguments, size=2):
        for own, one in zip(metrics, expected, strict=True):
            assert own["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-2)
        for name, tensor in alone.export_weights():
            moved, wanted = weights[name] - before[name], tensor - before[name]
            assert (moved - wanted).norm() < 0.05 * wanted.norm(), name
