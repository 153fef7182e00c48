"""Settings of torch's CUDA allocator: in all processes of a run, unless the user has others."""

import os
from dataclasses import replace
from typing import Any

import pytest

from gcore_llm import RolloutConfig, TrainConfig
from gcore_llm.sections import JudgeConfig, RewardModelConfig
from gcore_runs import Supervisor
from gcore_runs.engines import allocator_variables, device_options
from gcore_runs.settings.sections import PlacementConfig

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
        ("cuda", {"engine": "vllm", "colocated": True}, EXPANDABLE),
    ],
)
def test_segments_grow_on_cuda(
    device: str, rollout: dict[str, Any], expected: dict[str, str]
) -> None:
    assert (
        allocator_variables(TrainConfig(device=device, rollout=RolloutConfig(**rollout)))
        == expected
    )


def test_engines_that_sleep_are_started_for_it() -> None:
    """vLLM's, of the policy and of a judge, wherever something else has their device meanwhile."""
    judge = JudgeConfig(engine="vllm", num_processes=1)
    judged = RewardModelConfig(kind="judge", path="x", judge=judge)
    base = TrainConfig(
        device="cuda", runtime="ray", reward_model=judged, rollout=RolloutConfig(num_processes=1)
    )
    apart = replace(base, rollout=RolloutConfig(num_processes=1, colocated=False))
    for config, sleeps in (
        (base, True),
        (apart, False),
        *(
            (replace(apart, placement=PlacementConfig(strategy=strategy)), True)
            for strategy in ("colocated", "auto", "dynamic")
        ),
    ):
        assert device_options(judge, config) == ({"enable_sleep_mode": True} if sleeps else {})
        assert device_options(config.rollout, config) == {}, "hf needs no mode"
        assert allocator_variables(config) == EXPANDABLE


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert allocator_variables(TrainConfig(device="cuda")) == {}


def test_they_are_in_the_environment_during_a_run() -> None:
    config = replace(TrainConfig(), device="cuda", threads=1)
    with Supervisor(config, app="gcore-llm"):
        assert {n: os.environ[n] for n in EXPANDABLE} == EXPANDABLE
    assert not EXPANDABLE.keys() & os.environ.keys()


def test_engines_on_ray_set_it_in_their_own_process() -> None:
    """Before the engine is made, in the environment of its actor."""
    pytest.importorskip("ray", reason="pip install 'gcore-runs[ray]'")
    from gcore_runs.on_ray import _with_allocator  # pyright: ignore[reportPrivateUsage]  # actors alone call it

    seen: list[str | None] = []
    make: Any = lambda: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))  # noqa: E731 - an engine that looks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        _with_allocator(TrainConfig(device="cpu"), make)
        _with_allocator(TrainConfig(device="cuda"), make)
    assert seen == ["", EXPANDABLE["PYTORCH_CUDA_ALLOC_CONF"]]
