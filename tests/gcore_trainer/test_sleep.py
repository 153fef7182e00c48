"""Trainers that give the device's memory back for a while, and continue to the bit."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_oracles import Group, make_samples

from gcore_trainer import (
    FrozenModel,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    TrainerError,
)
from gcore_trainer.torch.host_memory import OffloadArena, Sleeper, bytes_of, local, piece_bytes

ADAMW = OptimizerConfig(lr=1e-3)
GROUPS = [Group(12, [20, 1, 9]), Group(3, [25])]


def make_trainer(path: Path, optimizer: OptimizerConfig = ADAMW, **options: Any) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    # Parameters of a mapped file hold no memory of their own.
    for parameter in packed.model.parameters():
        parameter.data = parameter.data.clone()
    objective = PolicyObjective(PolicyLossConfig())
    return TorchTrainer(packed, optimizer=optimizer, objective=objective)


def samples(seed: int) -> list[list[Sample]]:
    return [make_samples(GROUPS, seed=seed)]


def held_bytes(trainer: TorchTrainer) -> int:
    packed = trainer._model  # pyright: ignore[reportPrivateUsage]  # nothing else says what memory is held
    tensors = [
        *packed.model.parameters(),
        *(p.grad for p in packed.model.parameters() if p.grad is not None),
    ]
    return sum(local(t).untyped_storage().nbytes() for t in tensors)


def stored_bytes(trainer: TorchTrainer) -> int:
    """Bytes of parameters, gradients and the optimizer's states on the device."""
    storages: dict[int, int] = {}
    tensors: list[torch.Tensor] = [*trainer._module.parameters()]  # pyright: ignore[reportPrivateUsage]
    for group in trainer._stored_tensors().values():  # pyright: ignore[reportPrivateUsage]
        tensors.extend(group.values())
    for tensor in tensors:
        for held in (tensor, tensor.grad if tensor.is_leaf else None):
            if held is not None:
                storage = local(held).untyped_storage()
                storages[id(storage)] = storage.nbytes()
    return sum(storages.values())


def test_a_trainer_that_slept_continues_to_the_bit(qwen2: Path) -> None:
    rested, other = make_trainer(qwen2), make_trainer(qwen2)
    rested.wake()
    for seed in range(3):
        before = held_bytes(rested)
        rested.sleep()
        rested.sleep()
        assert held_bytes(rested) == 0 < before
        rested.wake()
        rested.wake()
        # Of a parameter and its gradient; the gradient comes back for the update.
        assert held_bytes(rested) == before / 2
        assert rested.train_step(samples(seed)) == other.train_step(samples(seed))
        assert held_bytes(rested) == before
    torch.testing.assert_close(rested.state(), other.state(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_sleeps_apart_from_the_weights(
    qwen2: Path, name: Any, dtype: torch.dtype
) -> None:
    """Weights are exported and score meanwhile, and a checkpoint reads states in host memory."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    optimizer = OptimizerConfig(lr=1e-3, name=name)
    rested, other = (make_trainer(qwen2, optimizer, compute_dtype=dtype) for _ in range(2))
    for seed in range(3):
        weights = {key: tensor.clone() for key, tensor in rested.export_weights()}
        before = stored_bytes(rested)
        rested.sleep(keep_weights=True)
        num_bytes = sum(p.untyped_storage().nbytes() for p in rested._module.parameters())  # pyright: ignore[reportPrivateUsage]
        assert stored_bytes(rested) == num_bytes < 0.5 * before
        torch.testing.assert_close(dict(rested.export_weights()), weights, rtol=0, atol=0)
        assert rested.log_probs(samples(seed))[0][0].size
        if name != "adamw_8bit":
            torch.testing.assert_close(rested.state(), other.state(), rtol=0, atol=0)
            assert stored_bytes(rested) == num_bytes
        rested.sleep()
        assert stored_bytes(rested) == 0
        torch.testing.assert_close(rested.state(), other.state(), rtol=0, atol=0)
        rested.wake()
        assert rested.train_step(samples(seed)) == other.train_step(samples(seed))
        assert stored_bytes(rested) == before
    state = other.state()
    rested.sleep()
    rested.wake()
    rested.load_state(state)
    torch.testing.assert_close(rested.state(), state, rtol=0, atol=0)


def test_a_sleeping_trainer_refuses_all_else(qwen2: Path, tmp_path: Path) -> None:
    trainer = make_trainer(qwen2)
    state = trainer.state()
    trainer.sleep()
    calls = [
        lambda: trainer.train_step(samples(0)),
        lambda: trainer.log_probs(samples(0)),
        lambda: list(trainer.export_weights()),
        lambda: trainer.save_pretrained(tmp_path / "model"),
        lambda: trainer.load_state(state),
    ]
    for call in calls:
        with pytest.raises(
            TrainerError, match=r"^the trainer is asleep.*expected a call of wake\(\) before"
        ):
            call()
    assert trainer.step == 0
    assert not (tmp_path / "model").exists()


def test_a_reference_sleeps_too(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    model = FrozenModel(packed)
    expected = model.scores(samples(0))
    model.sleep()
    with pytest.raises(TrainerError, match="asleep"):
        model.scores(samples(0))
    model.wake()
    torch.testing.assert_close(model.scores(samples(0)), expected, rtol=0, atol=0)


def test_shared_memory_moves_once() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    view = module.weight.detach()[1:, 1:]
    expected = view.clone()
    states, weights = Sleeper(module, lambda: {"view": {"weight": view}}), Sleeper(module)
    states.sleep()
    assert torch.equal(view, expected), "a view of a parameter is no state"
    weights.sleep()
    assert view.untyped_storage().nbytes() == 0
    assert states.find(view) is None
    found = weights.find(view)
    assert found is not None
    assert torch.equal(found, expected)
    weights.wake()
    assert torch.equal(view, expected)


def test_an_arena_gives_aligned_pieces() -> None:
    sizes = [(3, torch.bfloat16), (5, torch.float32)]
    arena = OffloadArena(
        sum(piece_bytes(n * dtype.itemsize) for n, dtype in sizes), torch.device("cpu")
    )
    pieces = [arena.take((n,), dtype) for n, dtype in sizes]
    assert [piece.tolist() for piece in pieces] == [[0] * 3, [0] * 5]
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 64
    arena.reset()
    assert arena.take((3,), torch.bfloat16).data_ptr() == pieces[0].data_ptr()


class FakeCudart:
    """The two functions of the CUDA runtime that pin pages; ``error`` is what the first returns."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802 - CUDA's name
        del self.pinned[address]


def test_pages_for_a_gpu_are_pinned_until_no_tensor_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = OffloadArena(10_000, torch.device("cuda"))
    piece = arena.take((5,), torch.float32)
    assert cudart.pinned == {piece.data_ptr(): 10_000}
    del arena
    piece.fill_(1.0)
    assert cudart.pinned, "a tensor is left"
    del piece
    gc.collect()
    assert not cudart.pinned


def test_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    with pytest.raises(
        TrainerError, match=r"cannot pin 3\.0 GiB of host memory \(cudaHostRegister: error 2\)"
    ):
        OffloadArena(3 << 30, torch.device("cuda"))


def test_storages_of_cuda_tensors_can_be_freed() -> None:
    with FakeTensorMode():
        tensor = torch.empty(8, 4, dtype=torch.bfloat16, device="cuda")
        storage = tensor.untyped_storage()
        flat = bytes_of(storage, tensor.device)
        assert flat.shape == (64,)
        assert flat.device.type == "cuda"
        torch.empty(64, dtype=torch.uint8).copy_(flat, non_blocking=True)
