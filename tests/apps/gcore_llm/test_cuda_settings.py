"""What a run does on a machine with GPUs before and besides training: its settings, its plan, its metrics."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.forecast import run_forecast
from gcore_llm.learning.device_plan import plan_run
from gcore_llm.learning.preparation import memory, speed
from gcore_llm.sampling import engine_factory
from gcore_llm.sections import JudgeConfig, RewardModelConfig
from gcore_placement import Device, PlacementError
from gcore_runs import UserError, resolve
from gcore_runs.on_ray import holds_asleep
from gcore_runs.settings.sections import PlacementConfig, RayConfig

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one H100, as far as torch.cuda tells."""
    facts: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": GPU,
        "get_device_properties": SimpleNamespace(name=GPU, total_memory=80_000_000_000),
        "max_memory_allocated": 3_000_000_000,
        "max_memory_reserved": 4_000_000_000,
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def config(tiny: Path, **fields: Any) -> TrainConfig:
    return TrainConfig(model=str(tiny), **fields)


def test_auto_is_the_gpu_and_bfloat16(tiny: Path) -> None:
    found = resolve(config(tiny))
    assert (found.device, found.dtype) == ("cuda", "bfloat16")
    found = resolve(config(tiny, device="cpu"))
    assert (found.device, found.dtype) == ("cpu", "float32")
    with pytest.raises(
        UserError, match=r"^device is 'cuda:1'; expected one of this machine's 1 CUDA devices$"
    ):
        resolve(config(tiny, device="cuda:1"))


def test_a_run_plans_the_gpu_that_it_shares(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side where both fit, by turns where they do not, refused where neither does; elsewhere unplanned."""
    said: list[str] = []
    whole = resolve(config(tiny))
    found = plan_run(whole, said.append)
    assert found.rollout.colocated is False
    assert found.rollout.engine_options["kv_cache_bytes"] > 0
    assert any("80.0" in line for line in said)
    small = SimpleNamespace(name="a small GPU", total_memory=2_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: small)
    with pytest.raises(UserError, match=r"expected at most 0\.0 of the 0\.0 GB of a small GPU"):
        plan_run(whole, said.append)
    count = len(said)
    for other in (
        replace(whole, device="cpu"),
        replace(whole, runtime="ray"),
        replace(whole, model=""),
    ):
        assert plan_run(other, said.append) is other
    # With a GPU more, an engine in a process of its own has it.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    apart = replace(whole, rollout=RolloutConfig(num_processes=1))
    assert plan_run(apart, said.append) is apart
    assert len(said) == count


def test_engines_in_processes_see_one_gpu(tiny: Path) -> None:
    def device(**fields: Any) -> str:
        asked = config(tiny, device="cuda:0", dtype="bfloat16", **fields)
        return engine_factory(asked.rollout, asked, tiny, eos_token_ids=[1]).keywords["device"]  # pyright: ignore[reportFunctionMemberAccess]  # a partial

    assert device() == "cuda:0"
    assert device(rollout=RolloutConfig(num_processes=2)) == device(runtime="ray") == "cuda"


def test_clusters_with_gpus_take_turns_by_default(tiny: Path) -> None:
    on_gpus = config(tiny, device="cuda", runtime="ray")
    assert on_gpus.takes_turns
    assert on_gpus.sizes.ranks_in_turns
    assert not replace(on_gpus, rollout=RolloutConfig(colocated=False)).takes_turns
    assert not replace(on_gpus, trainer=replace(on_gpus.trainer, schedule="async")).takes_turns
    assert replace(on_gpus, trainer=replace(on_gpus.trainer, backend="megatron")).takes_turns
    assert not replace(on_gpus, device="cpu").takes_turns
    assert not replace(on_gpus, runtime="inline").takes_turns


def judged_on_gpus(tiny: Path, *, num_engines: int) -> TrainConfig:
    """A run on a cluster of GPUs with a judge on a device of its own."""
    judge = RewardModelConfig(kind="judge", path=str(tiny), judge=JudgeConfig(num_processes=1))
    rollout = RolloutConfig(num_processes=num_engines)
    return config(tiny, device="cuda", runtime="ray", rollout=rollout, reward_model=judge)


def test_engines_follow_the_load_by_default_on_clusters_with_gpus(tiny: Path) -> None:
    """Where any can move: of three or more engines of the policy and of a judge on devices of this run."""
    on_gpus = judged_on_gpus(tiny, num_engines=2)
    judge = on_gpus.reward_model
    assert (on_gpus.placement.strategy, on_gpus.strategy) == (None, "dynamic")
    assert on_gpus.takes_turns
    # Where a node is lost, the engines that are left may become more again.
    smaller = on_gpus.with_sizes(replace(on_gpus.sizes, engines=1))
    assert smaller.sizes.engines + smaller.sizes.num_judges == 2
    assert smaller.strategy == "dynamic"
    on_servers = JudgeConfig(engine="vllm_server", urls=("http://127.0.0.1:1",))
    for other in (
        replace(on_gpus, device="cpu"),
        replace(on_gpus, runtime="inline"),
        replace(on_gpus, rollout=RolloutConfig(num_processes=1)),
        replace(on_gpus, reward_model=RewardModelConfig()),
        replace(on_gpus, reward_model=replace(judge, judge=on_servers)),
        replace(on_gpus, trainer=replace(on_gpus.trainer, schedule="async")),
        replace(on_gpus, placement=PlacementConfig(strategy="split")),
    ):
        assert other.strategy == "split"
    asked = replace(on_gpus, placement=PlacementConfig(strategy="auto"))
    assert asked.strategy == "auto"
    # What decides is the device that a run finds.
    assert (
        resolve(config(tiny, runtime="ray", rollout=on_gpus.rollout, reward_model=judge)).strategy
        == "dynamic"
    )


def test_engines_of_all_roles_sleep_where_half_of_each_nodes_memory_holds_them(tiny: Path) -> None:
    """For as many engines as the node has devices for; nodes without devices do not count."""
    on_gpus = judged_on_gpus(tiny, num_engines=3)
    assert on_gpus.engines_sleep, "vLLM needs its sleep mode for that"
    head = {"CPU": 64.0, "memory": 1e9}
    node = {"CPU": 64.0, "GPU": 8.0, "memory": 80e9}
    assert holds_asleep([head, node], on_gpus, 10e9), "of 4 engines"
    assert not holds_asleep([head, node], on_gpus, 10.1e9)
    assert holds_asleep([head, {**node, "GPU": 2.0}], on_gpus, 20e9)
    assert not holds_asleep([node, {**node, "memory": 70e9}], on_gpus, 10e9)
    assert not holds_asleep([node], on_gpus, math.inf)
    on_cpu = replace(on_gpus, device="cpu", placement=PlacementConfig(strategy="dynamic"))
    assert not holds_asleep([head], on_cpu, 1e9)
    assert holds_asleep([head], on_cpu, 1e8)


def test_engines_read_weights_from_gpus_that_ranks_have_for_themselves(tiny: Path) -> None:
    apart = config(tiny, device="cuda", runtime="ray", rollout=RolloutConfig(colocated=False))
    assert apart.reads_from_ranks
    assert not replace(apart, rollout=RolloutConfig()).reads_from_ranks
    assert not replace(apart, device="cpu").reads_from_ranks
    assert not replace(apart, ray=RayConfig(weight_sync="delta")).reads_from_ranks


def test_metrics_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = Device.matching(GPU).flops_per_s
    found = speed(peak, 4.0, num_devices=1, device="cuda")
    assert found == pytest.approx({"perf/tflops/actor": peak / 4e12, "perf/mfu/actor": 0.25})
    assert speed(peak, 4.0, num_devices=1, device="cpu").keys() == {"perf/tflops/actor"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # A controller on Ray sees no GPU, and reports the ranks' speed.
    assert speed(peak, 4.0, num_devices=1, device="cuda").keys() == {"perf/tflops/actor"}


def test_memory_of_the_gpu() -> None:
    found = memory("cuda")
    assert (found["perf/max_memory_allocated_gb"], found["perf/max_memory_reserved_gb"]) == (
        3.0,
        4.0,
    )
    assert memory("cpu").keys() == {"perf/max_rss_gb"}


def test_a_forecast_is_of_the_present_gpu(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps are predicted to take less than on a core; the head of a cluster may have no GPU."""
    steps = {"sampling/groups": 32.0, "response_length/mean": 100.0, "response_length/max": 200.0}
    metrics = {**steps, "sampling/acceptance": 1.0, "prompt_length/mean": 20.0, "timing_s/gen": 1.0}
    found = [
        run_forecast(config(tiny, device=device), tiny, tmp_path / device)(metrics)[
            "forecast/stages_s"
        ]
        for device in ("cuda", "cpu")
    ]
    assert 0 < found[0] < found[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlacementError, match="the GPUs are those of a cluster's nodes"):
        run_forecast(config(tiny, device="cuda", runtime="ray"), tiny, tmp_path / "head")
