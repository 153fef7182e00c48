"""What the ranks do in `test_integrations_dcp.py`: save and load through `torch.distributed.checkpoint`."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from rank import Rank, mesh
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import (
    async_save as async_save_with_dcp,
    save as save_with_dcp,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gcore_ckpt import Checkpointer, PerRank
from gcore_ckpt.integrations.dcp import StorageReader, StorageWriter


@contextmanager
def plain_errors() -> Generator[None]:
    """Raise what DCP raises, which is no `Exception`, as one."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str([failure for failure, _ in error.failures.values()])) from None


class App:
    """A model and its optimizer, as torch's tutorials make them `Stateful`."""

    def __init__(self, size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(10, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5, bias=False)
        )
        fully_shard(self.model, mesh=mesh((size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )

    def train(self, step: int) -> None:
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        parameters = {name: cast("DTensor", p) for name, p in self.model.named_parameters()}
        return {name: p.full_tensor().detach().clone() for name, p in parameters.items()}


def train_and_save_by_dcp(
    rank: Rank, path: str, size: int, is_async: bool
) -> dict[str, torch.Tensor]:
    """Return the parameters one step after the save."""
    app, group = App(size, seed=0), rank.groups[size]
    app.train(1)
    state = {
        "app": app,
        "steps": [1, 2],
        "shared": torch.arange(3.0),
        "rows": [torch.ones(2), {"rate": 0.5}],
    }
    with Checkpointer(path, process_group=group) as checkpointer:
        writer = StorageWriter(checkpointer)
        if is_async:
            saving = async_save_with_dcp(
                state, checkpoint_id="7", storage_writer=writer, process_group=group
            )
            app.train(2)  # changes what was saved, in place
            cast("Any", saving).result()
        else:
            save_with_dcp(state, checkpoint_id="7", storage_writer=writer, process_group=group)
            app.train(2)
    return app.whole()


def load_by_dcp_and_train(rank: Rank, path: str, size: int) -> dict[str, torch.Tensor]:
    app = App(size, seed=1)
    state: dict[str, Any] = {
        "app": app,
        "steps": [],
        "shared": torch.zeros(3),
        "rows": [torch.zeros(2), {"rate": 0}],
    }
    load_with_dcp(state, storage_reader=StorageReader(path), process_group=rank.groups[size])
    assert (state["steps"], state["rows"][1]) == ([1, 2], {"rate": 0.5})
    assert torch.equal(state["shared"], torch.arange(3.0))
    app.train(2)
    return app.whole()


def load_as_stateful_and_train(rank: Rank, path: str, size: int) -> dict[str, torch.Tensor]:
    """Load what DCP has saved by a Checkpointer."""
    app = App(size, seed=1)
    state = Checkpointer(path, process_group=rank.groups[size]).load({"app": app})
    assert state["app"] is app
    app.train(2)
    return app.whole()


def save_as_stateful(rank: Rank, path: str, size: int) -> dict[str, torch.Tensor]:
    app = App(size, seed=0)
    app.train(1)
    with Checkpointer(path, process_group=rank.groups[size]) as checkpointer:
        rows = [torch.ones(2), {"rate": 0.5}]
        checkpointer.save(
            7, {"app": app, "steps": [1, 2], "shared": torch.arange(3.0), "rows": rows}
        )
    app.train(2)
    return app.whole()


def save_own_values(rank: Rank, path: str, size: int, is_wrapped: bool) -> None:
    """Save a value that is not the same on all ranks."""
    group, value = rank.groups[size], f"of {rank.number}"
    with plain_errors(), Checkpointer(path, process_group=group) as checkpointer:
        state = {"place": PerRank(value) if is_wrapped else value}
        save_with_dcp(
            state, storage_writer=StorageWriter(checkpointer, step=1), process_group=group
        )


def load_own_values(rank: Rank, path: str, size: int) -> Any:
    return Checkpointer(path, process_group=rank.groups[size]).load({"place": PerRank(None)})[
        "place"
    ]


def load_different_steps(rank: Rank, path: str, size: int) -> None:
    """As if a step were committed between the two reads."""
    step = Checkpointer(path, process_group=None).steps()[rank.number]
    reader = StorageReader(Path(path), step=step)
    with plain_errors():
        load_with_dcp({"w": torch.zeros(2)}, storage_reader=reader, process_group=rank.groups[size])
