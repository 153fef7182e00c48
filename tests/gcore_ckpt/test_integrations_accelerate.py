"""What an Accelerator has prepared is saved, and training continues as if it had not stopped."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from forks import FORK

from gcore_ckpt import Checkpointer, verify
from gcore_ckpt.integrations.accelerate import load_state, save_state
from gcore_ckpt.integrations.training import state_of_model


class Steps:
    """An object of the user that is registered."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Run:
    """Training with dropout, shuffled data and accumulated gradients."""

    def __init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        rows: Any = list(torch.randn(24, 4))
        data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
        self.steps = Steps()
        self.accelerator.register_for_checkpointing(self.steps)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, data, scheduler
        )

    def train_epoch(self) -> list[float]:
        losses: list[float] = []
        for batch in self.data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            self.steps.done += 1
        return losses


def test_resumed_losses_are_those_of_one_run(tmp_path: Path) -> None:
    whole = Run()
    with Checkpointer(tmp_path) as checkpointer:
        whole.train_epoch()
        save_state(whole.accelerator, checkpointer, 1)
        expected = [whole.train_epoch(), whole.train_epoch()]  # while it is written
    verify(tmp_path)
    resumed = Run()
    torch.manual_seed(99)
    assert load_state(resumed.accelerator, Checkpointer(tmp_path)) == 1
    assert resumed.steps.done == 6
    assert [resumed.train_epoch(), resumed.train_epoch()] == expected
    state = Checkpointer(tmp_path).load(only=["models", "objects"])
    assert state["objects"] == [{"done": 6}]
    assert set(state["models"][0]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


PROGRAM = """
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from gcore_ckpt import Checkpointer
from gcore_ckpt.integrations.accelerate import load_state, save_state
from gcore_ckpt.integrations.training import state_of_model

path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
accelerator = Accelerator(cpu=True)
torch.manual_seed(first)
model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5, bias=False))
# As the plugin of FSDP2 does, which is for accelerators only.
fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
assert isinstance(model[0].weight, DTensor)
with Checkpointer(path) as checkpointer:
    if first > 1:
        assert load_state(accelerator, checkpointer, step=first - 1) == first - 1
    for step in range(first, last + 1):
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        save_state(accelerator, checkpointer, step)
        if accelerator.is_main_process:
            print(f"{loss.item():.6f}", flush=True)
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_ranks_of_fsdp2_resume_in_another_number(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(ranks: int, path: str, first: int, last: int) -> list[str]:
        command = [
            *(sys.executable, *FORK, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(ranks)),
            *("--no-python", sys.executable, *FORK),
        ]
        arguments: list[Any] = [tmp_path / "program.py", tmp_path / path, first, last]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            [*command, *map(str, arguments)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return output.stdout.split()

    expected = run(2, "whole", 1, 6)
    assert len(expected) == 6
    assert run(2, "parts", 1, 3) + run(3, "parts", 4, 6) == expected


def test_buffers_are_those_of_the_first_rank() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert state_of_model(model, 0) is model
    assert list(state_of_model(model, 1)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
