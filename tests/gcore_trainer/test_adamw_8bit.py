"""AdamW with 8-bit moments: it follows AdamW, takes the bytes that are documented, and continues from a state."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_oracles import Group, make_samples

from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    Sample,
    SFTObjective,
    TorchTrainer,
    TrainerError,
    check_extras,
)
from gcore_trainer.torch import optimizer as optimizers
from gcore_trainer.torch.optimizer import AdamW8bit, make_adamw

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7])]
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
LORA: dict[str, Any] = {"lora": LoRAConfig(rank=64)}
CONFIG = OptimizerConfig(name="adamw_8bit", lr=1e-3, weight_decay=0.1)
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_trainer(
    path: Path, *, name: Any = "adamw_8bit", offload: bool = False, **options: Any
) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    for parameter in packed.model.parameters():
        parameter.data = parameter.data.clone()
    config = OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1)
    return TorchTrainer(packed, optimizer=config, objective=SFTObjective(), offload=offload)


def losses(trainer: TorchTrainer, steps: range) -> list[float]:
    found: list[float] = []
    for i in steps:
        samples = make_samples(GROUPS, seed=i)
        micro_batches: list[list[Sample]] = [samples[:3], samples[3:]]
        found.append(trainer.train_step(micro_batches)["sft/loss"])
    return found


def quantized(trainer: TorchTrainer) -> AdamW8bit:
    adamw = trainer._optimizer  # pyright: ignore[reportPrivateUsage]  # what is in memory
    assert isinstance(adamw, AdamW8bit)
    return adamw


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        n: {k: t.clone() for k, t in v.items()} if isinstance(v, dict) else v
        for n, v in state.items()
    }


@pytest.mark.parametrize("options", [{}, BF16, LORA], ids=["float32", "bf16", "lora"])
def test_twenty_updates_follow_those_of_exact_moments(qwen2: Path, options: dict[str, Any]) -> None:
    """Quantised weights move in AdamW's direction (cosine above 0.98), losses differ by less than 0.5 %."""
    exact, rounded = make_trainer(qwen2, name="adamw", **options), make_trainer(qwen2, **options)
    initial = copied(exact.state())["model"]
    wanted, found = losses(exact, range(20)), losses(rounded, range(20))
    assert found == pytest.approx(wanted, rel=5e-3)
    assert found != wanted
    kept = quantized(rounded).stored_tensors()
    for name in exact.state()["model"].keys() & {key.partition(" ")[2] for key in kept["values"]}:
        tensor = exact.state()["model"][name]
        moved, wanted_move = kept["model"][name] - initial[name], tensor - initial[name]
        assert (
            torch.nn.functional.cosine_similarity(moved.flatten(), wanted_move.flatten(), dim=0)
            > 0.98
        ), name


def test_one_update_is_that_of_adamw() -> None:
    """The first one reads no quantised moment."""
    torch.manual_seed(0)
    own, other = (
        torch.nn.Parameter(torch.randn(100, 130, generator=torch.manual_seed(1))) for _ in range(2)
    )
    adamw = AdamW8bit({"weight": own}, CONFIG)
    plain = torch.optim.AdamW([other], lr=1e-3, weight_decay=0.1)
    other.grad = torch.randn_like(other)
    assert own.grad is not None
    own.grad.copy_(other.grad)
    adamw._step(1e-3)  # pyright: ignore[reportPrivateUsage]  # without clipping
    plain.step()
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 10.04), (torch.bfloat16, 12.04)])
def test_bytes_of_a_parameter(dtype: torch.dtype, most: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(300, 1000, dtype=dtype))
    adamw = AdamW8bit({"weight": parameter}, CONFIG)
    tensors = [
        parameter,
        parameter.grad,
        *(t for group in adamw.stored_tensors().values() for t in group.values()),
    ]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None
    }
    assert most - 0.02 < sum(storages.values()) / parameter.numel() < most


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("options", [{}, BF16], ids=["float32", "bf16"])
def test_a_state_continues(qwen2: Path, options: dict[str, Any], offload: bool) -> None:
    """Bytes are those of the saved trainer, and scales within a rounding error: later losses are equal to 1e-5."""
    first = make_trainer(qwen2, **options)
    losses(first, range(3))
    saved = copied(first.state())
    assert all(
        saved[key][name].dtype == torch.float32 for key in MOMENTS for name in saved["model"]
    )
    second = make_trainer(qwen2, offload=offload, **options)
    losses(second, range(7, 8))
    second.load_state(saved)
    mine, yours = quantized(first).stored_tensors(), quantized(second).stored_tensors()
    assert mine["values"]
    for name, tensor in mine["values"].items():
        assert torch.equal(yours["values"][name], tensor), name
        torch.testing.assert_close(yours["scales"][name], mine["scales"][name], rtol=3e-7, atol=0)
    torch.testing.assert_close(second.state(), saved, rtol=1e-6, atol=0)
    assert losses(second, range(3, 6)) == pytest.approx(losses(first, range(3, 6)), rel=1e-5)


def test_states_go_from_exact_to_8_bits_and_back(qwen2: Path) -> None:
    """A moment is within 1.3 % of its block's largest after it was quantised, 7 % of its own."""
    exact, rounded = make_trainer(qwen2, name="adamw"), make_trainer(qwen2)
    losses(exact, range(3))
    rounded.load_state(copied(exact.state()))
    back = make_trainer(qwen2, name="adamw")
    back.load_state(copied(rounded.state()))
    for key in MOMENTS:
        for name, tensor in exact.state()[key].items():
            largest = tensor.abs().max().item()
            torch.testing.assert_close(
                back.state()[key][name], tensor, rtol=0.07, atol=0.013 * largest
            )
    assert losses(back, range(3, 6)) == pytest.approx(losses(exact, range(3, 6)), rel=1e-2)


def test_host_memory_changes_nothing(qwen2: Path) -> None:
    plain, offloaded = make_trainer(qwen2, **BF16), make_trainer(qwen2, offload=True, **BF16)
    assert losses(offloaded, range(3)) == losses(plain, range(3))
    kept = quantized(offloaded).stored_tensors()
    assert (
        len({t.untyped_storage().data_ptr() for group in kept.values() for t in group.values()})
        == 1
    )


def test_a_trainer_that_slept_continues_to_the_bit(qwen2: Path) -> None:
    rested, other = make_trainer(qwen2), make_trainer(qwen2)
    for step in range(3):
        rested.sleep()
        kept = quantized(rested).stored_tensors()
        assert not sum(
            t.untyped_storage().nbytes() for group in kept.values() for t in group.values()
        )
        rested.wake()
        assert losses(rested, range(step, step + 1)) == losses(other, range(step, step + 1))
    torch.testing.assert_close(rested.state(), other.state(), rtol=0, atol=0)


def test_blocks_survive_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a block is all zeros, incomplete, or has its largest magnitude below 0; and in several pieces."""
    monkeypatch.setattr(optimizers, "_PIECE", 1024)
    parameter = torch.nn.Parameter(torch.zeros(5001))
    adamw = AdamW8bit({"weight": parameter}, CONFIG)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(5001, generator=generator) * 10.0 ** (-3 * step))
        parameter.grad[512:1024] = 0
        adamw._step(1e-3)  # pyright: ignore[reportPrivateUsage]  # without clipping
    state = copy.deepcopy(adamw.tensors())
    kept = copy.deepcopy(adamw.stored_tensors())
    adamw.load({**state, "optimizer_step": 3})
    for name, tensor in kept["values"].items():
        # The values of blocks with a scale of 0 are any.
        is_used = (kept["scales"][name] > 0).repeat_interleave(256)[:5001]
        assert torch.equal(adamw.stored_tensors()["values"][name][is_used], tensor[is_used]), name
    torch.testing.assert_close(adamw.tensors(), state, rtol=1e-6, atol=0)


def test_an_update_on_cuda_accepts_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    # The code is made of numbers, which fake tensors do not have.
    monkeypatch.setattr(functional, "create_dynamic_map", lambda **_: torch.empty(256))
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(128, 64, dtype=torch.bfloat16, device="cuda"))
        adamw = AdamW8bit({"weight": parameter}, CONFIG)
        adamw._step(1e-3)  # pyright: ignore[reportPrivateUsage]  # the norm of a fake tensor has no value
        kept = adamw.stored_tensors()
        assert {t.device.type for group in kept.values() for t in group.values()} == {"cuda"}
        assert adamw.tensors()["exp_avg"]["weight"].device.type == "cpu"


def test_float64_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(80, 80, dtype=torch.float64))
    with pytest.raises(
        ConfigError,
        match=r"^name is 'adamw_8bit'; expected 'adamw' for parameters of torch.float64",
    ):
        make_adamw({"weight": parameter}, CONFIG, offload=False)


def test_a_missing_library_is_named_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    parameter = torch.nn.Parameter(torch.zeros(80, 80))
    with pytest.raises(
        TrainerError, match=r"name is 'adamw_8bit', and .*pip install 'gcore-trainer\[8bit\]'"
    ):
        make_adamw({"weight": parameter}, CONFIG, offload=False)
    with pytest.raises(
        TrainerError, match=r"name is 'adamw_8bit', and .*pip install 'gcore-trainer\[8bit\]'"
    ):
        check_extras(optimizer_names=["adamw", "adamw_8bit"])
    check_extras(optimizer_names=["adamw"])
