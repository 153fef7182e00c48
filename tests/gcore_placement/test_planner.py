"""Plans: they fit, they are not beaten by fewer devices, and what is refused fits nowhere."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from planning_jobs import QWEN_7B, QWEN_32B, make_cluster, make_job

from gcore_placement import (
    Cluster,
    Correction,
    Device,
    Efficiency,
    Job,
    Lengths,
    ModelShape,
    PlacementError,
    Plan,
    TrainingLayout,
    plan,
    predict_step,
)
from gcore_placement.forecast import STAGES
from gcore_placement.planning import memory
from gcore_placement.planning.layouts import Backend, TrainingLayouts
from gcore_placement.planning.options import EngineRoofline, Setting, TrainingOptions

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MIXTURE: dict[str, Any] = {
    **SMALL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}

FACTOR = Efficiency().activations


def small_device(memory_gb: float) -> Device:
    return Device(
        name=f"{memory_gb:.0f} GB",
        memory_bytes=memory_gb * 1e9,
        flops_per_s=3e14,
        memory_bytes_per_s=2e12,
        link_bytes_per_s=3e11,
        host_bytes_per_s=3e10,
    )


jobs = st.builds(
    make_job,
    policy=st.sampled_from([SMALL, MIXTURE]),
    judge=st.sampled_from([None, SMALL]),
    train_batch_size=st.sampled_from([8, 96]),
    acceptance=st.sampled_from([0.5, 1.0]),
    reference=st.booleans(),
    response_lengths=st.sampled_from(
        [
            Lengths.log_normal(median=500, sigma=s, longest=longest)
            for s in (0.1, 1.0)
            for longest in (2000, 16000)
        ]
    ),
)
clusters = st.builds(
    Cluster,
    num_devices=st.integers(1, 24),
    device=st.sampled_from([small_device(gb) for gb in (2, 6, 10, 16, 40)]),
    devices_per_node=st.sampled_from([4, 8]),
)


def planned(cluster: Cluster, job: Job) -> Plan | None:
    try:
        return plan(cluster, job)
    except PlacementError:
        return None


def test_replicas_wake_when_they_change_their_role() -> None:
    """Plans hold the weights of all roles in the host's memory, and less of it is refused."""
    job = make_job(QWEN_7B, judge=QWEN_7B)
    found = plan(make_cluster(16), job, strategy="dynamic")
    swap = found.costs.swap
    assert swap.load_s == swap.wake_s > Efficiency().swap_s
    weights_bytes = found.memory["generation"]["weights"] + found.memory["reward"]["weights"]
    with pytest.raises(PlacementError):
        plan(make_cluster(16, host_memory_bytes=0.9 * weights_bytes), job, strategy="dynamic")


@settings(max_examples=25)
@given(cluster=clusters, job=jobs)
def test_a_plan_fits(cluster: Cluster, job: Job) -> None:
    """By its parts' sums, and by the formulas for its very layouts."""
    found = planned(cluster, job)
    if found is None:
        return
    assert found.peak_bytes <= found.usable_bytes <= cluster.device.memory_bytes
    layout, engine = found.training, found.policy
    training = memory.training_memory(job, TrainingLayouts(layout), activations=FACTOR)
    assert memory.total(training)[0] == pytest.approx(sum(found.memory["training"].values()))
    assert memory.total(training)[0] <= found.usable_bytes
    ranks = (
        layout.tensor_model_parallel_size
        * layout.pipeline_model_parallel_size
        * layout.context_parallel_size
    )
    assert ranks * layout.data_parallel_size == found.num_devices <= cluster.num_devices
    per_token = engine_of(job.policy, cluster, engine.devices_per_engine).kv_token_bytes
    assert found.memory["generation"]["KV cache"] >= job.longest_sequence * per_token * (1 - 1e-9)
    assert engine.num_engines * engine.devices_per_engine == engine.num_devices
    if found.judge is not None and found.strategy == "dynamic":
        assert engine.num_devices + found.judge.num_devices <= found.num_devices


@settings(max_examples=25)
@given(cluster=clusters, job=jobs, more=st.integers(1, 24))
def test_more_devices_are_never_slower(cluster: Cluster, job: Job, more: int) -> None:
    found = planned(cluster, job)
    larger = planned(
        Cluster(
            num_devices=cluster.num_devices + more,
            device=cluster.device,
            devices_per_node=cluster.devices_per_node,
        ),
        job,
    )
    assert found is None or (larger is not None and larger.step_s <= found.step_s * (1 + 1e-9))


@settings(max_examples=25)
@given(cluster=clusters, job=jobs)
def test_a_plan_is_as_fast_as_its_costs_say(cluster: Cluster, job: Job) -> None:
    found = planned(cluster, job)
    if found is None:
        return
    step = predict_step(
        found.costs,
        job,
        strategy=found.strategy,
        num_devices=found.num_devices,
        policy_devices=found.policy.num_devices,
        reward_devices=found.judge.num_devices if found.judge else 0,
    )
    assert step == found.step
    for strategy in ("colocated", "dynamic") if job.judge else ("colocated",):
        try:
            assert plan(cluster, job, strategy=strategy).step_s >= found.step_s * (1 - 1e-9)
        except PlacementError:
            assert strategy != found.strategy


def engine_of(model: ModelShape, cluster: Cluster, tp: int) -> EngineRoofline:
    return EngineRoofline(
        model=model, cluster=cluster, tp=tp, compute_bytes=2, efficiency=Efficiency()
    )


def fits_somewhere(cluster: Cluster, job: Job, usable: float) -> bool:
    """By trying every layout on its own: training, and then each engine with its state on the host."""
    trains = False
    for size in cluster.sizes():
        for tp, pp, cp in product((1, 2, 4, 8), range(1, 13), (1, 2, 4, 8)):
            allowed = (
                size % (tp * pp * cp) == 0
                and size <= tp * pp * cp * job.train_batch_size
                and 12 % pp == 0
                and cluster.devices_per_node % tp == 0
            )
            backends: list[Backend] = ["torch", "megatron"] if tp * pp == 1 else ["megatron"]
            for backend in backends if allowed else []:
                layout = TrainingLayout(
                    backend=backend,
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    context_parallel_size=cp,
                    data_parallel_size=size // (tp * pp * cp),
                    gradient_checkpointing=True,
                    ppo_max_token_len=job.longest_sequence,
                )
                one = TrainingLayouts(layout)
                trains |= (
                    memory.total(memory.training_memory(job, one, activations=FACTOR))[0] <= usable
                )
    roles: list[tuple[ModelShape, float]] = [(job.policy, job.longest_sequence)]
    if job.judge is not None:
        judge, read, written = job.engine_role("reward")
        roles.append((judge, read.longest + written.longest))

    def holds(model: ModelShape, longest: float) -> bool:
        sizes = [tp for tp in (1, 2, 4, 8, 16) if tp <= cluster.num_devices]
        engines = [
            engine_of(model, cluster, tp)
            for tp in sizes
            if tp <= cluster.devices_per_node or tp % cluster.devices_per_node == 0
        ]
        # The planner looks at engines' memory in 128ths of a device's.
        free_bytes = usable - cluster.device.memory_bytes / 128
        return any(
            e.weights_bytes + e.workspace_bytes + longest * e.kv_token_bytes <= free_bytes
            for e in engines
        )

    return trains and all(holds(model, longest) for model, longest in roles)


@settings(max_examples=15)
@given(
    cluster=clusters,
    job=jobs,
    factors=st.lists(st.floats(0.25, 4), min_size=len(STAGES), max_size=len(STAGES)),
)
def test_a_corrected_plan_is_the_fastest_by_corrected_laws(
    cluster: Cluster, job: Job, factors: list[float]
) -> None:
    """So it is no slower than what would be planned without the correction."""
    found = planned(cluster, job)
    if found is None:
        return
    correction = Correction(min_count=1)
    for stage, factor in zip(STAGES, factors, strict=True):
        correction.observe(stage, predicted_s=1.0, measured_s=factor)
    corrected = plan(cluster, job, correction=correction)
    uncorrected = predict_step(
        correction.correct(found.costs),
        job,
        strategy=found.strategy,
        num_devices=found.num_devices,
        policy_devices=found.policy.num_devices,
        reward_devices=found.judge.num_devices if found.judge else 0,
    )
    assert corrected.step_s <= uncorrected.total_s * (1 + 1e-9)
    assert corrected.correction == dict(zip(STAGES, factors, strict=True))


def test_laws_that_are_all_as_much_off_change_no_choice() -> None:
    correction = Correction(min_count=1)
    for stage in STAGES:
        correction.observe(stage, predicted_s=2.0, measured_s=6.0)
    job = make_job(QWEN_7B, QWEN_32B)
    found, corrected = (plan(make_cluster(64), job, correction=c) for c in (None, correction))
    assert corrected.step_s == pytest.approx(3 * found.step_s)
    assert (corrected.training, corrected.policy, corrected.judge) == (
        found.training,
        found.policy,
        found.judge,
    )
    assert vars(corrected.costs.training) == pytest.approx(
        vars(correction.correct(found.costs).training)
    )
    assert vars(corrected.costs.policy) == pytest.approx(
        vars(correction.correct(found.costs).policy)
    )


@settings(max_examples=25)
@given(cluster=clusters, job=jobs)
def test_what_is_refused_fits_nowhere(cluster: Cluster, job: Job) -> None:
    if planned(cluster, job) is None:
        assert not fits_somewhere(
            cluster, job, cluster.device.memory_bytes * Efficiency().free_memory
        )


def test_a_refusal_says_what_is_too_large_and_what_would_fit() -> None:
    job = make_job(QWEN_32B)
    with pytest.raises(PlacementError) as refused:
        plan(make_cluster(8), job)
    message = str(refused.value)
    assert (
        "nothing fits on 8 x H100, of whose 80.0 GB 73.6 GB are usable: training needs at least"
        in message
    )
    assert "Would fit: 16 devices, or 8 x H20 of 96.0 GB, or a policy of " in message
    assert plan(make_cluster(16), job).num_devices == 16
    assert plan(make_cluster(8, "H20"), job).num_devices == 8
    layers = int(message.partition("a policy of ")[2].split()[0])
    assert (
        plan(make_cluster(8), make_job({**QWEN_32B, "num_hidden_layers": layers})).num_devices == 8
    )


@pytest.mark.parametrize("device", ["A6000", "A100-40GB"])
def test_the_least_number_of_devices_is_named(device: str) -> None:
    """With less on the devices, and with all parameters and states there: no fewer devices would do."""
    with pytest.raises(PlacementError, match=r"Would fit: (\d+) devices") as refused:
        plan(make_cluster(1, device), make_job(QWEN_7B), runnable=True)
    text = str(refused.value).partition("Would fit: ")[2]
    least, whole = (int(part.split()[0]) for part in text.split(", or ")[:2])
    job = make_job(QWEN_7B)
    found = {
        size: plan(make_cluster(size, device), job, runnable=True)
        for size in range(least, whole + 1)
    }
    assert [
        size for size, own in found.items() if not own.optimizer_offload and not own.lora_rank
    ] == [whole]
    assert "(all parameters)" in text.split(", or ")[1]


def test_what_does_not_fit_is_trained_with_less() -> None:
    """With the optimizer's state on the host, then with adapters, each where what comes before does not fit."""
    for device, num, offloads, rank in (
        ("A6000", 8, False, 0),
        ("A6000", 2, True, 0),
        ("RTX4090", 2, False, 16),
    ):
        job = make_job(QWEN_7B)
        found = plan(make_cluster(num, device), job, runnable=True)
        assert (found.optimizer_offload, found.lora_rank) == (offloads, rank)
        assert (found.whole_training_bytes > found.usable_bytes) is (num < 8)
        assert found.peak_bytes <= found.usable_bytes
        assert found.trained_parameters == (
            job.policy.adapter_parameters(rank) if rank else job.policy.num_parameters
        )
    with pytest.raises(
        PlacementError, match=r"with all parameters, the optimizer's state on the host .* GB\. "
    ):
        plan(make_cluster(2, "RTX4090"), make_job(QWEN_7B), runnable=True, lora_rank=0)
    with pytest.raises(
        PlacementError, match=r"lora_rank is -1; expected an integer of at least 0, or None"
    ):
        plan(make_cluster(2), make_job(QWEN_7B), lora_rank=-1)


@pytest.mark.parametrize("compute_bytes", [2, 4])
def test_an_offloaded_optimizer_has_masters_of_its_own(compute_bytes: int) -> None:
    """In float32, too, the host holds masters, gradients and two moments: 16 bytes a parameter."""
    setting = Setting(
        cluster=make_cluster(8),
        job=make_job(compute_bytes=compute_bytes),
        efficiency=Efficiency(),
        correction=Correction(),
        most_num_seqs=256,
        runnable=True,
        state=memory.TrainingState(offload="optimizer"),
    )
    options = TrainingOptions(setting, num_devices=8)
    expected = 16 * setting.job.policy.num_parameters / options.layouts.ranks
    assert options.host_bytes == pytest.approx(expected)


def test_adapters_take_less_memory_and_time() -> None:
    job = make_job(QWEN_7B)
    whole, lora = (plan(make_cluster(8), job, runnable=True, lora_rank=rank) for rank in (0, 64))
    assert lora.lora_rank == 64
    assert lora.memory["training"]["optimizer"] < whole.memory["training"]["optimizer"] / 30
    assert 0.6 * whole.step.training_s < lora.step.training_s < 0.75 * whole.step.training_s
    assert lora.step_s < whole.step_s


def test_weights_pass_to_the_engine_where_there_is_memory_for_both() -> None:
    """The rank's weights, the engine's and what is on its way: 3 x 15 GB with a single rank, whose engine gets all."""
    job = make_job(QWEN_7B)
    with pytest.raises(PlacementError, match=r"with LoRA weights pass to the engine in 46\.. GB"):
        plan(make_cluster(1, "A6000"), job, runnable=True)
    assert plan(make_cluster(1), job, runnable=True).lora_rank == 16


def test_too_long_responses_are_refused_with_a_length_that_fits() -> None:
    lengths = Lengths.log_normal(median=1000, sigma=1.0, longest=8_000_000)
    job = make_job(response_lengths=lengths)
    with pytest.raises(
        PlacementError, match=r"Would fit: .*responses of at most (\d+) tokens"
    ) as refused:
        plan(make_cluster(8), job)
    shorter = lengths.cut(float(str(refused.value).rpartition("at most ")[2].split()[0]))
    assert plan(make_cluster(8), make_job(response_lengths=shorter)).num_devices == 8


def test_a_model_that_no_device_holds_is_divided() -> None:
    found = plan(make_cluster(64), make_job(QWEN_32B, judge=QWEN_32B, reference=True))
    assert found.policy.devices_per_engine > 1
    reasons = {(other.choice, other.option): other.reason for other in found.alternatives}
    assert reasons["training", "megatron TP 1 PP 1 CP 1 DP 64"].startswith("does not fit: ")
    assert reasons["strategy", "split"].endswith("its partition stays where it is as lengths drift")
    assert ("policy engine", f"TP {found.policy.devices_per_engine}") not in reasons
    times = [reason for reason in reasons.values() if " s a step, " in reason]
    assert times
    assert all(float(reason.split(", ")[1].split(" s")[0]) >= 0 for reason in times)


@pytest.mark.parametrize("runnable", [False, True])
@pytest.mark.parametrize(
    ("policy", "num_devices", "device", "judge"),
    [
        (QWEN_7B, 64, "H100", QWEN_7B),
        (QWEN_32B, 16, "H100", None),
        (QWEN_7B, 8, "A6000", None),
        (SMALL, 8, "RTX4090", QWEN_7B),
        (MIXTURE, 4, "L4", None),
    ],
)
def test_what_is_faster_has_something_against_it(
    policy: dict[str, Any],
    num_devices: int,
    device: str,
    judge: dict[str, Any] | None,
    *,
    runnable: bool,
) -> None:
    found = plan(
        make_cluster(num_devices, device), make_job(policy, judge=judge), runnable=runnable
    )
    for other in found.alternatives:
        if other.seconds is None or other.difference_s is None:
            assert other.reason
            continue
        what = "to train" if other.choice in ("training", "trained parameters") else "a step"
        timed = f"{other.seconds:.1f} s {what}, {other.difference_s:+.1f} s"
        assert timed in other.reason
        if other.difference_s < 0.05 * found.step_s:
            assert len(other.reason) > len(timed), (
                "it is not slower for certain, and why not is said"
            )
    if runnable:
        assert {"trained parameters", "training state"} <= {
            other.choice for other in found.alternatives
        }


def test_reasons_name_what_an_engine_lacks() -> None:
    found = plan(make_cluster(2, "RTX4090"), make_job(QWEN_7B), runnable=True)
    reasons = {(other.choice, other.option): other.reason for other in found.alternatives}
    assert reasons["policy engine", "TP 4"] == "needs 4 devices, of 2"
    assert reasons["policy engine", "TP 1"].startswith("does not fit: ")
    assert reasons["policy engine", "TP 1"].endswith(
        "over the 22.1 GB of each device; while weights pass to the engine"
    )
    assert reasons["trained parameters", "all"].startswith(
        "does not fit: 60.0 GB over the 22.1 GB of each device"
    )
    found = plan(make_cluster(8), make_job(QWEN_7B), runnable=True)
    reasons = {(other.choice, other.option): other.reason for other in found.alternatives}
    assert reasons["policy engine", "TP 8"] == "28 heads and 4 of keys are not evenly divided by 8"
    assert reasons["trained parameters", "LoRA of rank 16"].endswith(
        "trains 40.4 million of 7.62 billion parameters"
    )


def test_without_a_judge_roles_are_colocated() -> None:
    job = make_job()
    assert plan(make_cluster(8), job).strategy == "colocated"
    with pytest.raises(
        PlacementError, match=r"strategy is .*; expected colocated, or None, without a judge"
    ):
        plan(make_cluster(8), job, strategy="dynamic")


def test_long_swaps_keep_roles_coexisting() -> None:
    job = make_job(judge=QWEN_7B, acceptance=0.7)
    slow, fast = (plan(make_cluster(64), job, efficiency=Efficiency(swap_s=s)) for s in (60.0, 0.0))
    assert slow.strategy == "dynamic"
    assert slow.step.swap_s >= 120
    colocated = plan(
        make_cluster(64), job, strategy="colocated", efficiency=Efficiency(swap_s=60.0)
    )
    assert colocated.step.swap_s >= 3 * 120
    assert (
        colocated.step_s - slow.step_s
        > plan(make_cluster(64), job, strategy="colocated").step_s - fast.step_s
    )


def test_a_plan_is_plain_data_and_repeats() -> None:
    cluster, job = make_cluster(16), make_job(judge=QWEN_7B)
    found = plan(cluster, job)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["step_s"] == found.step_s
    assert data["training"]["ppo_max_token_len"] == found.training.ppo_max_token_len
    assert found.judge is not None
    for name, engines in (("policy", found.policy), ("judge", found.judge)):
        assert data[name] == {
            "tensor_model_parallel_size": engines.devices_per_engine,
            "num_replicas": engines.num_engines,
            "num_devices": engines.num_devices,
            "max_num_seqs": engines.max_num_seqs,
        }
    assert plan(cluster, job).to_dict() == found.to_dict()


def test_data_sheets() -> None:
    with pytest.raises(PlacementError, match=r"device is 'H900'; expected one of B200, H200, .*"):
        Device.named("H900")
    with pytest.raises(
        PlacementError, match=r"2 GB.flops_per_s is 0; expected a finite number above 0"
    ):
        replace(small_device(2), flops_per_s=0)
    assert make_cluster(19).sizes() == [16, 8, 7, 6, 5, 4, 3, 2, 1]
    assert make_cluster(19).link_bytes_per_s(16) < make_cluster(19).link_bytes_per_s(8)


@pytest.mark.parametrize(
    ("full_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
    ],
)
def test_devices_are_found_by_a_drivers_name(full_name: str, name: str) -> None:
    assert Device.matching(full_name) == Device.named(name)


def test_a_name_without_a_data_sheet_is_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"device is 'NVIDIA A1000'; expected a name that holds one of B200"
    ):
        Device.matching("NVIDIA A1000")


@pytest.mark.parametrize("device", ["RTX3090", "RTX4090", "A10", "L4"])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_small_devices_are_used_well(device: str, num_devices: int) -> None:
    """A model that fits is planned on all of them, with memory that is filled, and faster than on half."""
    found = plan(make_cluster(num_devices, device), make_job(SMALL), runnable=True)
    assert found.num_devices == num_devices
    assert found.offload
    assert 0.5 * found.usable_bytes < found.peak_bytes <= found.usable_bytes
    if num_devices > 1:
        half = plan(make_cluster(num_devices // 2, device), make_job(SMALL), runnable=True)
        assert half.step_s / 2.2 < found.step_s < half.step_s / 1.3


def test_small_batches_use_few_data_parallel_ranks() -> None:
    found = plan(make_cluster(64), make_job(SMALL, train_batch_size=2))
    assert found.training.data_parallel_size <= 2


def test_states_must_fit_into_the_host() -> None:
    """Weights that sleep have to go somewhere."""
    job = make_job(judge=QWEN_7B)
    with pytest.raises(PlacementError, match=r"nor states into 1.0 GB of the host"):
        plan(make_cluster(8, host_memory_bytes=1e9), job)
    assert not plan(make_cluster(16, host_memory_bytes=3e10), job).offload


def test_mixtures_of_experts_are_planned_by_what_is_active() -> None:
    """All experts are held, few of them compute."""
    mixture, whole = (
        make_job(config) for config in (MIXTURE, {**SMALL, "intermediate_size": 32 * 512})
    )
    found = plan(make_cluster(8), mixture)
    assert found.step.training_s < plan(make_cluster(8), whole).step.training_s / 2
    held = sum(found.memory["training"][part] for part in ("weights", "gradients", "optimizer"))
    assert held >= 16 * mixture.policy.num_parameters / 8
