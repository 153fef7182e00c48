"""Settings of torch's CUDA allocator: in all processes of a run, unless the user or vLLM has others."""

import os
from dataclasses import replace
from typing import Any

import pytest

from gcore_llm import RolloutConfig, TrainConfig
from gcore_runs import Supervisor
from gcore_runs.engines import allocator_variables

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("device", "rollout", "expected"),
    [
        ("cuda:0", {}, EXPANDABLE),
        ("cpu", {}, {}),
        ("cuda", {"engine": "vllm"}, {}),
        ("cuda", {"engine": "vllm", "colocated": True}, {}),
        ("cuda", {"engine": "vllm", "colocated": False}, EXPANDABLE),
    ],
)
def test_segments_grow_on_cuda_unless_vllm_may_sleep(
    device: str, rollout: dict[str, Any], expected: dict[str, str]
) -> None:
    assert allocator_variables(TrainConfig(device=device, rollout=RolloutConfig(**rollout))) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert allocator_variables(TrainConfig(device="cuda")) == {}


def test_they_are_in_the_environment_during_a_run() -> None:
    config = replace(TrainConfig(), device="cuda", threads=1)
    with Supervisor(config, app="gcore-llm"):
        assert {n: os.environ[n] for n in EXPANDABLE} == EXPANDABLE
    assert not EXPANDABLE.keys() & os.environ.keys()
