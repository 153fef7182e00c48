"""A trainer that sleeps, and states in the host's memory: the same numbers, and less on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import SAMPLES, make_trainer

from gcore_trainer import TorchTrainer


def weights_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in trainer.export_weights()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_wakes_as_it_was(
    device: str, folders: dict[str, Path], dtype: torch.dtype
) -> None:
    sleeper: Any = make_trainer(folders["qwen2"], device, dtype)
    other = make_trainer(folders["qwen2"], device, dtype)
    for trainer in (sleeper, other):
        trainer.train_step([SAMPLES])
    # Float32 parameters, and two moments of each; libraries' workspaces stay.
    state_bytes = 12 * sum(tensor.numel() for tensor in weights_of(sleeper).values())
    awake_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    sleeper.sleep()
    if device == "cuda":
        assert awake_bytes - torch.cuda.memory_allocated() >= 0.9 * state_bytes
    sleeper.wake()
    assert weights_of(sleeper).keys() == weights_of(other).keys()
    for trainer in (sleeper, other):
        trainer.train_step([SAMPLES])
    expected = weights_of(other)
    for name, tensor in weights_of(sleeper).items():
        assert torch.equal(tensor, expected[name]), name
