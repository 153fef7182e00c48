"""The memory of one device that trainer and engines share: its law by hand and against torch, turns, and remedies."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from peft import LoraConfig, get_peft_model
from planning_jobs import QWEN_7B
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_placement import (
    Device,
    DevicePlan,
    DeviceSetting,
    Job,
    Lengths,
    ModelShape,
    PlacementError,
    TrainingLayout,
    TrainingState,
    plan_device,
)

H100 = Device.named("H100")
QWEN_HALF_B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
LAYOUT = TrainingLayout(
    backend="torch",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    data_parallel_size=1,
    gradient_checkpointing=True,
    ppo_max_token_len=16_384,
)


def job_of(config: dict[str, Any], **changed: Any) -> Job:
    options: dict[str, Any] = {
        "policy": ModelShape.from_config(config),
        "prompt_lengths": Lengths.recorded([1024]),
        "response_lengths": Lengths.recorded([512]),
        "train_batch_size": 32,
        "n": 8,
        **changed,
    }
    return Job(**options)


def plan_on(job: Job, device: Device, layout: TrainingLayout, **settings: Any) -> DevicePlan:
    return plan_device(DeviceSetting(job=job, layout=layout, device=device, **settings))


def plan_of(
    config: dict[str, Any], *, state: TrainingState | None = None, **changed: Any
) -> DevicePlan:
    names = {"layout", *(field.name for field in fields(DeviceSetting))}
    settings = {name: changed.pop(name) for name in names & changed.keys()}
    settings.setdefault("layout", LAYOUT)
    return plan_on(job_of(config, **changed), H100, **settings, state=state or TrainingState())


def tiny_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(**{name: value for name, value in TINY.items() if name != "model_type"})
    )


def test_state_bytes_are_those_of_torch() -> None:
    """Float32 parameters, their gradients and AdamW's moments after a step, to the byte."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    trainer = plan_of(TINY, compute_bytes=4).roles["trainer"]
    parameters = list(model.parameters())
    assert trainer["weights"] == sum(p.nbytes for p in parameters)
    assert trainer["gradients"] == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    moments = [
        t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()
    ]
    assert trainer["optimizer"] == sum(t.nbytes for t in moments)
    narrow = plan_of(TINY).roles["trainer"]
    assert narrow["optimizer"] == trainer["optimizer"] + trainer["weights"], (
        "float32 master weights"
    )
    assert narrow["weights"] == trainer["weights"] / 2


def test_adapters_are_those_of_peft() -> None:
    lora = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))  # pyright: ignore[reportArgumentType] - a PreTrainedModel
    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    assert ModelShape.from_config(TINY).adapter_parameters(4) == count
    parts = plan_of(TINY, state=TrainingState(adapter_parameters=count)).roles["trainer"]
    assert_allclose([parts["gradients"], parts["optimizer"]], [4 * count, 12 * count])
    assert_allclose(parts["weights"], 2 * (ModelShape.from_config(TINY).num_parameters + count))


def test_offload() -> None:
    count = ModelShape.from_config(QWEN_7B).num_parameters
    plans = {
        name: plan_of(QWEN_7B, state=state, takes_turns=False)
        for name, state in {
            "none": TrainingState(),
            "optimizer": TrainingState(offload="optimizer"),
            "all": TrainingState(offload="all"),
        }.items()
    }
    state = {
        name: sum(plan.roles["trainer"][item] for item in ("weights", "gradients", "optimizer"))
        for name, plan in plans.items()
    }
    assert_allclose(list(state.values()), [18 * count, 6 * count, 6 * count], rtol=1e-6)
    assert_allclose(
        [plan.host["optimizer states"] for plan in plans.values()],
        [0, 16 * count, 16 * count],
        rtol=1e-6,
    )
    # With a critic and a reference, one of the three is on the device at a time.
    others = {"critic": ModelShape.from_config(QWEN_7B), "reference": True}
    every = plan_of(
        QWEN_7B,
        state=TrainingState(offload="all"),
        takes_turns=False,
        **others,
    )
    assert_allclose(every.peaks["train"], plans["all"].peaks["train"])
    assert_allclose(
        [every.host[n] for n in ("optimizer states", "models")],
        [16 * 2 * count, 2 * 3 * count],
        rtol=1e-6,
    )


def test_teachers_are_frozen_models_next_to_the_reference() -> None:
    small, large = ModelShape.from_config(QWEN_HALF_B), ModelShape.from_config(QWEN_7B)
    plan = plan_of(QWEN_HALF_B, reference=True, teachers=[large, small])
    assert_allclose(
        plan.roles["teachers"]["weights"], 2 * (large.num_parameters + small.num_parameters)
    )
    assert_allclose(plan.roles["reference"]["weights"], 2 * small.num_parameters)
    without = plan_of(QWEN_HALF_B, reference=True)
    assert "teachers" not in without.roles
    assert_allclose(
        plan.peaks["prepare"] - without.peaks["prepare"], plan.roles["teachers"]["weights"]
    )
    passes = job_of(QWEN_HALF_B, reference=True, teachers=[large, small]).num_forward_passes
    assert_allclose(passes, 2 + large.workload.flops_per_token / small.workload.flops_per_token)


def test_moments_in_8_bits() -> None:
    """2 + 8 / 256 bytes a parameter in place of 8, also on the host; a change that is proposed where it is enough."""
    count = ModelShape.from_config(QWEN_HALF_B).num_parameters
    state = TrainingState(moments="8bit")
    own = plan_of(QWEN_HALF_B, state=state).roles["trainer"]
    assert_allclose(own["optimizer"], (4 + 2 + 8 / 256) * count)
    assert_allclose(
        plan_of(QWEN_HALF_B, state=state, compute_bytes=4).roles["trainer"]["optimizer"],
        2.03125 * count,
    )
    offloaded = plan_of(QWEN_HALF_B, state=replace(state, offload="optimizer"), takes_turns=False)
    assert_allclose(offloaded.host["optimizer states"], (4 + 4 + 2.03125) * count)
    exact, small = (
        plan_of(QWEN_HALF_B, state=s, takes_turns=True).peaks["train"]
        for s in (TrainingState(), state)
    )
    device = Device.of_memory("a GPU", (exact + small) / 2 / 0.92)
    plan = plan_on(job_of(QWEN_HALF_B), device, LAYOUT, takes_turns=True)
    assert not plan.fits
    assert ("8-bit moments",) in plan.remedies
    megatron = plan_on(
        job_of(QWEN_HALF_B), device, replace(LAYOUT, backend="megatron"), takes_turns=True
    )
    assert ("8-bit moments",) not in megatron.remedies


def test_muon_has_one_moment_of_hidden_matrices() -> None:
    shape = ModelShape.from_config(QWEN_7B)
    hidden, outer = shape.num_parameters - shape.num_outer_parameters, shape.num_outer_parameters
    parts = plan_of(QWEN_7B, state=TrainingState(moments="muon")).roles["trainer"]
    assert_allclose(parts["optimizer"], 4 * (hidden + outer) + 4 * hidden + 8 * outer, rtol=1e-6)
    state = TrainingState(moments="muon", adapter_parameters=1000)
    assert_allclose(plan_of(QWEN_7B, state=state).roles["trainer"]["optimizer"], 8 * 1000)


def test_activations_by_layer() -> None:
    """Half of the layers checkpointed is half-way between all and none; inputs on the host leave two of them."""

    def activations(*, recompute: bool = True, **state: Any) -> float:
        layout = replace(LAYOUT, gradient_checkpointing=recompute)
        return plan_of(QWEN_7B, layout=layout, state=TrainingState(**state)).roles["trainer"][
            "activations"
        ]

    whole, none = activations(), activations(recompute=False)
    assert_allclose(activations(checkpointed_share=0.5), (whole + none) / 2)
    assert_allclose(activations(activation_offload=True), whole * 2 / 28)
    longer = replace(LAYOUT, ppo_max_token_len=32_768)
    assert_allclose(plan_of(QWEN_7B, layout=longer).roles["trainer"]["activations"], 2 * whole)


def test_a_small_model_is_side_by_side() -> None:
    plan = plan_of(QWEN_HALF_B)
    assert (plan.fits, plan.takes_turns) == (True, False)
    checkpoint = plan.host["checkpoint"]
    assert (
        plan.host_bytes
        == checkpoint
        == pytest.approx(12 * ModelShape.from_config(QWEN_HALF_B).num_parameters)
    )
    assert plan.kv_tokens == 256 * 1536
    engine = plan.roles["policy engine"]
    assert engine["keys and values"] == plan.kv_cache_bytes == plan.kv_tokens * 2 * 2 * 24 * 128
    assert_allclose(plan.gpu_memory_utilization, sum(engine.values()) / 80e9)
    assert_allclose(plan.peaks["train"], plan.share("trainer") + plan.share("policy engine"))


def test_turns_give_all_memory_to_one_role_at_a_time() -> None:
    """Side by side the engine has memory for few sequences; so the two take turns unless that is excluded."""
    state = TrainingState(offload="optimizer")
    beside = plan_of(QWEN_7B, state=state, takes_turns=False)
    plan = plan_of(QWEN_7B, state=state)
    assert beside.fits
    assert beside.kv_tokens < 256 * 1536 / 10
    assert_allclose(beside.peaks["train"], beside.usable_bytes)
    assert plan.fits
    assert plan.takes_turns
    assert plan.kv_tokens == 256 * 1536
    trainer, engine = plan.roles["trainer"], plan.roles["policy engine"]
    assert_allclose(plan.peaks["generate"], sum(engine.values()))
    assert_allclose(plan.peaks["train"], sum(trainer.values()))
    bucket = 2 * 152064 * 3584
    assert_allclose(plan.peaks["sync"], trainer["weights"] + engine["weights"] + bucket)
    assert trainer["optimizer"] == 0
    count = trainer["weights"] / 2
    expected = {"optimizer states": 16 * count, "models": 2 * count, "engines": engine["weights"]}
    assert plan.host == pytest.approx({**expected, "activations": 0, "checkpoint": 12 * count})
    assert plan.host_bytes == pytest.approx(sum(plan.host.values()))


def test_weights_that_are_copied_whole() -> None:
    """By turns a tensor at a time, unless the engine is in a process of its own or takes merged weights at once."""
    adapters = ModelShape.from_config(QWEN_7B).adapter_parameters(16)
    cases: list[tuple[Any, bool, bool]] = [
        ("none", False, False),
        ("none", True, False),
        ("merged", False, False),
        ("merged", True, True),
        ("all", False, True),
    ]
    for copies, has_adapters, is_whole in cases:
        state = TrainingState(offload="optimizer", adapter_parameters=adapters * has_adapters)
        plan = plan_of(QWEN_7B, state=state, takes_turns=True, copies_weights=copies)
        trainer, weights = plan.roles["trainer"], plan.roles["policy engine"]["weights"]
        passing = weights if is_whole else 2 * 152064 * 3584
        kept = trainer["weights"]
        if has_adapters:
            # Adapters are exported from the optimizer's originals, and stay with their gradients.
            kept += trainer["gradients"]
        assert_allclose(plan.peaks["sync"], kept + weights + passing)


def test_parts_of_the_weights_that_engines_read_from_ranks() -> None:
    """A rank keeps an eighth of them, and a second one while engines may still read the version before."""
    job = job_of(QWEN_7B)
    layout = replace(LAYOUT, data_parallel_size=8)
    by_store, from_ranks = (
        plan_device(
            DeviceSetting(
                job=job,
                layout=layout,
                device=H100,
                takes_turns=False,
                reads_from_ranks=reads_from_ranks,
                residents=["trainer"],
            )
        )
        for reads_from_ranks in (False, True)
    )
    part = 2 * job.policy.num_parameters / 8
    assert from_ranks.share("weights for engines") == pytest.approx(part)
    for stage, peak in by_store.peaks.items():
        count = 2 if stage == "sync" else 1
        assert from_ranks.peaks[stage] == pytest.approx(peak + count * part)


def test_by_turns_the_optimizer_is_on_the_device_for_updates_alone() -> None:
    """Models that score have their weights; the policy's weights are alone next to the engine's."""
    critic = ModelShape.from_config(QWEN_HALF_B)
    job = job_of(QWEN_HALF_B, reference=True, critic=critic)
    apart, beside = (
        plan_on(job, H100, LAYOUT, takes_turns=takes_turns) for takes_turns in (True, False)
    )
    count = job.policy.num_parameters
    weights = 2 * count
    bucket = 2 * 151936 * 896
    assert_allclose(apart.peaks["sync"], weights + weights + bucket, rtol=1e-6)
    engine = beside.share("policy engine")
    assert_allclose(beside.peaks["sync"], 38 * count + engine + bucket, rtol=1e-6)
    # Gradients, masters and moments of policy and critic are the difference.
    states = beside.peaks["prepare"] - engine - apart.peaks["prepare"]
    assert_allclose(states, 2 * 16 * count, rtol=1e-6)
    assert_allclose(apart.peaks["train"], beside.peaks["train"] - engine)
    stored = plan_on(
        job,
        H100,
        LAYOUT,
        takes_turns=True,
        state=TrainingState(moments="8bit"),
    )
    # A checkpoint wakes both models.
    awake = 2 * sum(stored.roles["critic"].values()) - weights
    assert_allclose(stored.peaks["sync"] - apart.peaks["sync"], awake, rtol=1e-6)


def test_other_roles_are_counted() -> None:
    job = job_of(
        QWEN_HALF_B,
        reference=True,
        critic=ModelShape.from_config(QWEN_HALF_B),
        judge=ModelShape.from_config(QWEN_HALF_B),
        judge_lengths=Lengths.recorded([256]),
    )
    plan = plan_on(job, H100, LAYOUT, further_roles={"reward model": 3e9})
    count = job.policy.num_parameters
    assert [*plan.roles] == [
        "policy engine",
        "trainer",
        "critic",
        "reference",
        "judge",
        "reward model",
    ]
    assert_allclose(
        [plan.share("reference"), plan.share("critic")], [2 * count, 18 * count], rtol=1e-6
    )
    assert plan.judge_kv_tokens >= 1536 + 256
    assert plan.share("reward model") == 3e9
    assert plan.share("no such role") == 0
    assert_allclose(plan.peaks["train"], sum(map(plan.share, plan.roles)))


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    plan = plan_of(QWEN_7B)
    assert not plan.fits
    assert set(plan.remedies) == {("optimizer offload",), ("LoRA",)}
    compared = plan_of(QWEN_7B, reference=True)
    assert ("full offload",) in compared.remedies, "of the policy or its reference"
    for peak_bytes in plan.remedies.values():
        assert peak_bytes <= plan.usable_bytes
    assert plan.peaks[plan.fullest] > plan.usable_bytes
    assert plan.fullest == "train"
    assert plan_of(QWEN_HALF_B).fits


def test_gradients_that_are_exchanged_once_an_update() -> None:
    """Each of two ranks has all gradients in float32 while it trains, unless it makes one micro-batch."""
    layout = replace(LAYOUT, data_parallel_size=2)
    waiting = TrainingState(gradient_sync="update")
    for model, own, ranks, count in (
        (QWEN_HALF_B, waiting, layout, ModelShape.from_config(QWEN_HALF_B).num_parameters),
        (QWEN_HALF_B, waiting, replace(layout, ppo_max_token_len=10**9), 0),
        (QWEN_HALF_B, waiting, LAYOUT, 0),
        (QWEN_HALF_B, TrainingState(), layout, 0),
        (QWEN_7B, replace(waiting, adapter_parameters=10_000_000), layout, 10_000_000),
    ):
        plan = plan_of(model, layout=ranks, state=own)
        assert_allclose(plan.roles["trainer"]["unsynced gradients"], 4 * count, rtol=1e-6)
        assert_allclose(
            plan.peaks["train"], sum(plan.roles["trainer"].values()) + _engines_awake(plan)
        )
    short = plan_of(QWEN_7B, layout=replace(LAYOUT, data_parallel_size=4), state=waiting)
    assert not short.fits
    assert ("frequent gradient exchange",) in short.remedies


def _engines_awake(plan: DevicePlan) -> float:
    return 0.0 if plan.takes_turns else plan.share("policy engine")


def test_remedies_that_are_needed_together() -> None:
    """Activations alone are too many, and so are the states: no single change is enough."""
    layout = replace(LAYOUT, gradient_checkpointing=False, ppo_max_token_len=200_000)
    plan = plan_of(QWEN_7B, layout=layout)
    [names] = plan.remedies
    assert names[:2] == ("gradient checkpointing", "small micro-batches")
    assert names[-1] in ("optimizer offload", "full offload", "LoRA")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("reserve_bytes", -1)],
)
def test_settings_are_checked(setting: str, value: int) -> None:
    changed: dict[str, Any] = {setting: value}
    with pytest.raises(PlacementError, match=rf"^{setting} is {value}(\.0)?; expected"):
        plan_of(QWEN_HALF_B, **changed)
