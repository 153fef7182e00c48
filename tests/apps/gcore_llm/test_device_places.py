"""The GPUs of training ranks and of engines in processes of their own, on machines with one or several."""

from dataclasses import replace
from typing import Any

import pytest

from gcore_llm import RolloutConfig, TrainConfig, sampling
from gcore_llm.learning.device_places import engine_gpus, training_gpus


@pytest.mark.parametrize(
    ("count", "num_engines", "training", "options", "expected"),
    [
        (1, 1, {0}, {}, [0]),
        (2, 1, {0}, {}, [1]),
        (2, 2, {0}, {}, [1, 0]),
        (2, 1, {0, 1}, {}, [0]),
        (2, 1, {1}, {}, [0]),
        (4, 2, {0, 1}, {}, [2, 3]),
        (4, 3, {0, 1}, {}, [2, 3, 0]),
        (4, 1, {0, 1}, {"first": 1}, [3]),
        (2, 1, {0}, {"takes_turns": True}, [0]),
        (4, 4, {0, 1}, {"takes_turns": True}, [0, 1, 2, 3]),
        (2, 1, {1}, {"takes_turns": True}, [1]),
        (2, 0, {0}, {}, []),
    ],
)
def test_engines_take_the_gpus_without_a_rank_first(
    count: int, num_engines: int, training: set[int], options: dict[str, Any], expected: list[int]
) -> None:
    assert engine_gpus(count, num_engines, training, **options) == expected


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {}, {0}),
        ("cuda:1", {}, {1}),
        ("cuda", {"num_processes": 2}, {0, 1}),
        ("cuda", {"num_processes": 3}, {0, 1}),
        ("cuda:1", {"backend": "megatron"}, {0}),
    ],
)
def test_gpus_of_the_models_in_training(device: str, changes: dict[str, Any], expected: set[int]) -> None:
    config = TrainConfig(device=device)
    assert training_gpus(replace(config, trainer=replace(config.trainer, **changes)), 2) == expected


def test_processes_see_the_gpus_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names in CUDA_VISIBLE_DEVICES of this process; the judge's come after the policy's."""
    config = TrainConfig(device="cuda", rollout=RolloutConfig(num_processes=1))
    judge = replace(config.reward_model.judge, num_processes=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    places = [sampling._gpus(own, config) for own in (config.rollout, judge)]  # pyright: ignore[reportPrivateUsage]
    assert places == [["6"], ["7"]]
    assert sampling._gpus(config.rollout, replace(config, device="cpu")) == []  # pyright: ignore[reportPrivateUsage]
