"""bfloat16 parameters with float32 masters, and optimizer states in host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_oracles import Group, make_samples

from gcore_trainer import (
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    Sample,
    SFTObjective,
    TorchTrainer,
)
from gcore_trainer.torch.optimizer import AdamW

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7])]
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}


def make_trainer(
    path: Path, *, lr: float = 1e-3, offload: bool = False, **options: Any
) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.1)
    return TorchTrainer(packed, optimizer=optimizer, objective=SFTObjective(), offload=offload)


def micro_batches(seed: int) -> list[list[Sample]]:
    samples = make_samples(GROUPS, seed=seed)
    return [samples[:3], samples[3:]]


def losses(trainer: TorchTrainer, steps: int, *, num_batches: int = 1) -> list[float]:
    return [trainer.train_step(micro_batches(i % num_batches))["sft/loss"] for i in range(steps)]


def test_twenty_updates_in_bfloat16_follow_float32(qwen2: Path) -> None:
    exact, mixed = make_trainer(qwen2), make_trainer(qwen2, **BF16)
    wanted, found = losses(exact, 20), losses(mixed, 20)
    assert wanted[-1] < 0.9 * wanted[0]
    assert found == pytest.approx(wanted, rel=0.05)
    truth, masters = exact.state()["model"], mixed.state()["model"]
    initial = dict(PackedModel.from_pretrained(qwen2).model.named_parameters())
    for name, tensor in truth.items():
        assert masters[name].dtype == torch.float32
        moved, wanted_move = (
            masters[name] - initial[name].bfloat16().float(),
            tensor - initial[name].detach(),
        )
        assert (
            torch.nn.functional.cosine_similarity(moved.flatten(), wanted_move.flatten(), dim=0)
            > 0.8
        ), name
    for name, tensor in mixed.export_weights():
        assert torch.equal(tensor, masters[name].bfloat16())


def test_updates_below_the_resolution_of_bfloat16_add_up(qwen2: Path) -> None:
    """One moves a weight by at most 5e-6; bfloat16 numbers from 2^-6 on are 6e-5 apart, or more."""
    trainer = make_trainer(qwen2, lr=5e-6, **BF16)
    name = "model.layers.0.mlp.up_proj.weight"
    before = dict(trainer.export_weights())[name].clone()
    is_large = before.abs() >= 2**-6

    def share_of_changed() -> float:
        return (dict(trainer.export_weights())[name] != before)[is_large].float().mean().item()

    losses(trainer, 1)
    assert share_of_changed() == 0
    assert (trainer.state()["model"][name] != before.float()).float().mean() > 0.9
    losses(trainer, 19)
    assert share_of_changed() > 0.05


@pytest.mark.parametrize(
    "options", [{}, BF16, {**BF16, "lora": LoRAConfig(rank=4)}], ids=["float32", "bf16", "lora"]
)
def test_states_in_host_memory_change_nothing(qwen2: Path, options: dict[str, Any]) -> None:
    plain, offloaded = make_trainer(qwen2, **options), make_trainer(qwen2, offload=True, **options)
    assert losses(offloaded, 3, num_batches=3) == losses(plain, 3, num_batches=3)
    torch.testing.assert_close(offloaded.state(), plain.state(), rtol=0, atol=0)
    state: dict[str, Any] = {
        n: {k: t.clone() for k, t in v.items()} if isinstance(v, dict) else v
        for n, v in plain.state().items()
    }
    losses(offloaded, 1)
    offloaded.load_state(state)
    assert losses(offloaded, 2) == losses(plain, 2)
    torch.testing.assert_close(
        dict(offloaded.export_weights()), dict(plain.export_weights()), rtol=0, atol=0
    )


def test_memory_of_offloaded_states_is_one_block(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, offload=True, **BF16)
    state = trainer.state()
    blocks = {
        t.untyped_storage().data_ptr()
        for g in ("model", "exp_avg", "exp_avg_sq")
        for t in state[g].values()
    }
    assert len(blocks) == 1


def test_adapters_alone_have_masters(qwen2: Path) -> None:
    trainer = make_trainer(qwen2, lora=LoRAConfig(rank=4), **BF16)
    assert all("lora" in name for name in trainer.state()["model"])
    assert all(p.dtype == torch.bfloat16 for p in trainer._model.model.parameters())  # pyright: ignore[reportPrivateUsage]  # what is in memory
    losses(trainer, 1)


def test_an_update_on_cuda_accepts_its_arguments() -> None:
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16, device="cuda"))
        optimizer = AdamW({"weight": parameter}, OptimizerConfig())
        assert parameter.grad is not None
        # The engine of autograd does not run on fake devices.
        parameter.grad.add_(torch.ones_like(parameter))
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.device.type == "cuda"
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer._step(1e-3)  # pyright: ignore[reportPrivateUsage]  # the norm of a fake tensor has no value
        assert optimizer.tensors()["model"]["weight"].dtype == torch.float32
