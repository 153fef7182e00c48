"""A trainer that takes over a state continues exactly as the one that gave it: equal to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_oracles import SIZES, Group, make_samples, save_model, split
from transformers import Qwen2Config

from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    StateError,
    TorchTrainer,
)

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7]), Group(3, [25])]


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    return save_model(Qwen2Config(**SIZES, tie_word_embeddings=True), tmp_path / "other", seed=99)


def make_trainer(path: Path, *, dtype: torch.dtype = torch.float32) -> TorchTrainer:
    return TorchTrainer(
        PackedModel.from_pretrained(path, dtype=dtype),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.01, lr_warmup_steps=4),
        objective=PolicyObjective(PolicyLossConfig()),
    )


def train(trainer: TorchTrainer, steps: range) -> list[dict[str, float]]:
    batches: list[list[list[Sample]]] = [split(make_samples(GROUPS, seed=i), seed=i) for i in steps]
    return [trainer.train_step(batch) for batch in batches]


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint would hold: the live tensors as they are now."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): copy(v) for k, v in value.items()}
        return value.clone() if isinstance(value, torch.Tensor) else value

    return copy(state)


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("num_steps_before_loading", [0, 3])
def test_another_trainer_continues_to_the_bit(
    qwen2: Path, other_weights: Path, num_steps: int, num_steps_before_loading: int
) -> None:
    """Also from a state without moments into a trainer that has some."""
    first = make_trainer(qwen2)
    train(first, range(num_steps))
    state = copied(first.state())
    rest = range(num_steps, num_steps + 3)
    expected = train(first, rest)

    second = make_trainer(other_weights)
    train(second, range(num_steps_before_loading))
    second.load_state(state)
    assert second.step == num_steps
    assert_same(copied(second.state()), state)
    assert train(second, rest) == expected
    assert_same(second.state(), first.state())


def test_a_trainer_can_go_back(qwen2: Path) -> None:
    trainer = make_trainer(qwen2)
    train(trainer, range(2))
    state = copied(trainer.state())
    expected = train(trainer, range(2, 5))
    trainer.load_state(state)
    assert train(trainer, range(2, 5)) == expected


def test_a_live_state_can_be_loaded_where_it_came_from(qwen2: Path) -> None:
    trainer = make_trainer(qwen2)
    train(trainer, range(2))
    before = copied(trainer.state())
    trainer.load_state(trainer.state())
    assert_same(trainer.state(), before)


def test_a_loaded_state_is_not_shared(qwen2: Path, other_weights: Path) -> None:
    first, second = make_trainer(qwen2), make_trainer(other_weights)
    train(first, range(2))
    second.load_state(first.state())
    before = copied(first.state())
    train(second, range(2, 4))
    assert_same(first.state()["exp_avg"], before["exp_avg"])
    assert_same(first.state()["model"], before["model"])


def test_skipped_steps_are_part_of_the_state(qwen2: Path) -> None:
    trainer = make_trainer(qwen2)
    bad = make_samples(GROUPS, seed=0)
    for sample in bad:
        assert sample.advantages is not None
        sample.advantages[:] = 3e38  # finite, and its gradient is not
    trainer.train_step([bad])
    other = make_trainer(qwen2)
    other.load_state(copied(trainer.state()))
    assert other.train_step([bad])["actor/nonfinite_steps"] == 2


def broken(state: dict[str, Any], how: str) -> dict[str, Any]:
    """A copy of the state with one thing wrong, in the last entry that is looked at."""
    state = copied(state)
    name = next(reversed(state["model"]))
    match how:
        case "name missing":
            del state["model"][name]
        case "name unknown":
            state["model"]["another.weight"] = torch.zeros(3)
        case "shape":
            state["model"][name] = torch.zeros(3)
        case "moment missing":
            del state["exp_avg_sq"][name]
        case "moment shape":
            state["exp_avg_sq"][name] = torch.zeros(3)
        case "moments missing":
            state["exp_avg_sq"] = {}
        case _:
            del state["optimizer_step"]
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("name missing", "^model does not match.*norm"),
        ("name unknown", r"^model does not match.*another\.weight"),
        ("shape", r"^model\['.*'\] has shape \(3,\); expected \(64,\)"),
        ("moment missing", "^exp_avg_sq does not match.*norm"),
        ("moment shape", r"^exp_avg_sq\['.*'\] has shape \(3,\)"),
        ("moments missing", "^exp_avg_sq does not match"),
        ("entry missing", r"^state does not match.*\['optimizer_step'\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    qwen2: Path, other_weights: Path, how: str, message: str
) -> None:
    giver, trainer = make_trainer(other_weights), make_trainer(qwen2)
    train(giver, range(2))
    train(trainer, range(3))
    before = copied(trainer.state())
    with pytest.raises(StateError, match=message):
        trainer.load_state(broken(giver.state(), how))
    assert_same(trainer.state(), before)


def test_a_state_of_another_architecture_is_refused(qwen2: Path, llama: Path) -> None:
    with pytest.raises(StateError, match=r"^model does not match"):
        make_trainer(qwen2).load_state(make_trainer(llama).state())
