"""Objects with `state_dict` and `load_state_dict` are leaves of a state."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gcore_ckpt
from gcore_ckpt import CheckpointMismatchError


class Counter:
    """Has a state of another structure after each step."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": self.values,
            **{f"seen_{value}": torch.tensor(value) for value in self.values},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]
        self.loaded = state


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), float(step))).square().mean().backward()
        optimizer.step()


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
    }


def test_training_continues_with_the_objects_themselves(tmp_path: Path) -> None:
    first, second = make(0), make(1)
    train(first["model"], first["optimizer"], 3)
    gcore_ckpt.save(tmp_path, first | {"step": 3})
    weight = second["model"].weight
    loaded = gcore_ckpt.load(tmp_path, second | {"step": None})
    assert loaded["step"] == 3
    assert all(loaded[name] is second[name] for name in second)
    assert second["model"].weight is weight, "filled in place"
    assert torch.equal(weight, first["model"].weight)
    for objects in (first, second):  # with the moments, which the fresh optimizer did not have
        train(objects["model"], objects["optimizer"], 2)
    assert torch.equal(first["model"].weight, second["model"].weight)


def test_what_is_saved_is_the_state_dict(tmp_path: Path) -> None:
    model = make(0)["model"]
    gcore_ckpt.save(tmp_path, {"nested": [model, (Counter([3]),)]})
    plain = gcore_ckpt.load(tmp_path)
    assert torch.equal(plain["nested"][0]["weight"], model.weight)
    assert plain["nested"][1][0]["values"] == [3]


@pytest.mark.parametrize(("saved", "present"), [([1, 2, 3], [1]), ([], [1, 2]), ([5], [6])])
def test_an_object_loads_all_that_it_saved_whatever_it_has(
    tmp_path: Path, saved: list[int], present: list[int]
) -> None:
    gcore_ckpt.save(tmp_path, {"counter": Counter(saved), "other": 1})
    counter = Counter(present)
    gcore_ckpt.load(tmp_path, {"counter": counter})
    assert counter.values == saved
    assert counter.loaded.keys() == Counter(saved).state_dict().keys()


def test_a_state_may_be_one_object(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, Counter([1]))
    counter = Counter([])
    assert gcore_ckpt.load(tmp_path, counter) is counter
    assert counter.values == [1]


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"a": 1})
    counter = Counter([7])
    with pytest.raises(CheckpointMismatchError, match=r"does not hold state\['counter'\]"):
        gcore_ckpt.load(tmp_path, {"counter": counter})
    assert counter.values == [7]
    assert gcore_ckpt.load(tmp_path, {"counter": counter}, strict=False) == {"counter": counter}
    assert counter.values == [7]


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"model": torch.nn.Linear(3, 2)})
    with pytest.raises(
        CheckpointMismatchError,
        match=r"state\['model'\]\['weight'\] has shape \(2, 4\) in the template",
    ):
        gcore_ckpt.load(tmp_path, {"model": torch.nn.Linear(4, 2)})


def test_a_state_that_contains_itself_is_still_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(1, 1)}
    state["self"] = state
    with pytest.raises(ValueError, match="contains itself"):
        gcore_ckpt.save(tmp_path, state)
