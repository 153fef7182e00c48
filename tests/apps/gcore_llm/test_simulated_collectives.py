"""Training in the cluster simulation takes what the planner predicts: products, collectives, bubbles, updates, sync."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from gcore_llm.simulate import parse_simulate, simulate
from gcore_placement import (
    Cluster,
    Device,
    Efficiency,
    EngineLayout,
    Job,
    JobCosts,
    Lengths,
    ModelShape,
    TrainingCosts,
    TrainingLayout,
    gather_seconds,
    predict_layout,
    predict_step,
)
from gcore_runs.errors import UserError
from gcore_runs.simulation.collectives import TrainingCollectives, training_collectives
from gcore_runs.simulation.config import LearnerModel, SimulateConfig
from gcore_runs.simulation.tokens import CoarseWorkload

QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
}
WORKLOAD = CoarseWorkload(**QWEN_7B, token_unit=1)
CONFIG = SimulateConfig(
    devices=16,
    controllers=2,
    steps=2,
    train_batch_size=128,
    token_unit=64,
    filter_groups=False,
    learner=LearnerModel(
        devices_per_replica=1,
        # The planner's 0.45, less the logits' traffic and the head's second pass.
        utilisation=0.42,
        micro_batch_s=Efficiency().micro_batch_s,
    ),
)
JOB = Job(
    policy=ModelShape.from_config({"model_type": "qwen2", **QWEN_7B}),
    prompt_lengths=Lengths.log_normal(median=256, sigma=0.5, longest=1024),
    response_lengths=Lengths.log_normal(median=1500, sigma=0.8, longest=8192),
    train_batch_size=CONFIG.train_batch_size,
    n=CONFIG.n,
)


def predicted(config: SimulateConfig) -> tuple[float, float, float]:
    """The planner's seconds of generation, training and weight sync, with the engines' law of the simulation."""
    learner, engine = config.learner, config.engine
    tp, pp, cp = learner.sizes
    layout = TrainingLayout(
        backend=learner.backend,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        data_parallel_size=config.num_learner_replicas,
        gradient_checkpointing=False,
        ppo_max_token_len=config.ppo_max_token_len,
    )
    engines = EngineLayout(
        num_engines=config.num_engine_replicas,
        devices_per_engine=engine.devices_per_replica,
        max_num_seqs=engine.max_num_seqs,
    )
    step = predict_layout(config.cluster, JOB, layout, engines, host_moves=0)
    costs = JobCosts(policy=engine.costs, reward=None, training=TrainingCosts(per_token_s=0.0))
    sampling = predict_step(
        costs,
        JOB,
        strategy="colocated",
        num_devices=config.devices,
        policy_devices=config.devices,
        reward_devices=0,
    )
    return sampling.generation_s, step.training_s, step.weight_sync_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "cluster"),
    [
        ({}, {}),
        ({"devices_per_replica": 2}, {}),
        ({"devices_per_replica": 8, "backend": "megatron"}, {}),
        ({"devices_per_replica": 8, "backend": "megatron", "context_parallel_size": 4}, {}),
        ({"devices_per_replica": 4, "backend": "megatron", "pipeline_model_parallel_size": 2}, {}),
        (
            {"devices_per_replica": 4, "backend": "megatron"},
            {"inter_node_gb_per_s": 2.0, "devices_per_node": 4},
        ),
    ],
)
def test_training_has_the_share_of_a_step_that_the_planner_predicts(
    learner: dict[str, Any], cluster: dict[str, Any]
) -> None:
    """Within 12 %, of the seconds and of the share; without collectives it is less.

    Micro-batches of whole groups are a few more, and less even, than those of the prediction.
    """
    config = replace(CONFIG, learner=replace(CONFIG.learner, **learner), **cluster)
    generation_s, training_s, sync_s = predicted(config)
    steps = simulate(config).steps
    simulated_s = np.mean([step.metrics["timing_s/train"] for step in steps])
    assert simulated_s == pytest.approx(training_s, rel=0.12)
    step_s = np.mean([step.step_s for step in steps])
    assert simulated_s / step_s == pytest.approx(
        training_s / (generation_s + training_s + sync_s), rel=0.12
    )
    assert np.mean([step.metrics["timing_s/sync"] for step in steps]) == pytest.approx(
        sync_s, rel=0.01
    )
    without = simulate(replace(config, learner=replace(config.learner, collectives=False))).steps
    assert np.mean([step.metrics["timing_s/train"] for step in without]) < simulated_s


def collectives(**changed: Any) -> TrainingCollectives:
    cluster = {
        name: changed.pop(name)
        for name in ("devices_per_node", "inter_node_gb_per_s")
        if name in changed
    }
    config = replace(CONFIG, learner=replace(CONFIG.learner, **changed), **cluster)
    return training_collectives(config, WORKLOAD.weights_bytes, WORKLOAD)


def test_a_gather_is_a_ring() -> None:
    cluster, efficiency = (
        Cluster(num_devices=16, device=Device.named("H100")),
        Efficiency(links=0.5, all_reduce_s=1e-3),
    )
    assert gather_seconds(cluster, efficiency, 9e9, 1) == 0
    assert gather_seconds(cluster, efficiency, 9e9, 8) == pytest.approx(
        9e9 * 7 / 8 / (450e9 * 0.5) + 1e-3
    )
    assert gather_seconds(cluster, efficiency, 9e9, 16, count=3) == pytest.approx(
        9e9 * 15 / 16 / (50e9 * 0.5) + 3e-3
    )
    assert gather_seconds(cluster, efficiency, 9e9, 2, span=16, count=0) == pytest.approx(
        9e9 / 2 / (50e9 * 0.5)
    )


def test_gathers_of_zero_3_are_hidden_as_far_as_products_last() -> None:
    found = collectives()
    size_bytes, rate = WORKLOAD.weights_bytes, 50e9 * Efficiency().links
    assert found.weights_s == pytest.approx(size_bytes * 15 / 16 / rate, rel=0.01)
    assert found.gradients_s == pytest.approx(2 * size_bytes * 15 / 16 / rate, rel=0.01)
    assert found.token_pass_s == 0, "there are no ranks that share a sequence"
    products_s, tokens = np.array([0.1, 10.0]), np.array([1000.0, 100_000.0])
    hidden_s = 2 * found.weights_s + found.gradients_s
    assert found.seconds(products_s, tokens, is_training=True) == pytest.approx([hidden_s, 10.0])
    assert found.seconds(products_s, tokens, is_training=False) == pytest.approx(
        [found.weights_s, 10.0]
    )


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 8, 1)])
def test_tokens_cross_the_links_of_their_replica(sizes: tuple[int, int, int]) -> None:
    """By counting bytes on a rank's links, of a token's share of its layers and its context."""
    tp, pp, cp = sizes
    found = collectives(
        devices_per_replica=8,
        backend="megatron",
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
    )
    rate = 450e9 * Efficiency().links
    sent = 4 * (28 / pp) * 2 * 3584 * (tp - 1) / tp / cp
    sent += 1.5 * (28 / pp) * 2 * 2 * 512 * (cp - 1) / cp / tp
    sent += 2 * 3584 * (pp - 1) / pp / (tp * cp)
    assert found.token_pass_s == pytest.approx(sent / rate)


def test_a_pipeline_has_a_bubble_and_updates_cross_the_nodes() -> None:
    found = collectives(devices_per_replica=4, backend="megatron", pipeline_model_parallel_size=2)
    assert found.replica_s(np.full(4, 2.0)) == pytest.approx(8 * (1 + 1 / 4))
    assert found.weights_s == found.gradients_s == 0
    slower = collectives(
        devices_per_replica=4,
        backend="megatron",
        pipeline_model_parallel_size=2,
        inter_node_gb_per_s=5.0,
    )
    # Four ranks share a stage's gradients in float32 and weights in bfloat16.
    moved = 6 * WORKLOAD.weights_bytes / 2 / 4 * 3 / 4
    assert slower.update_s - found.update_s == pytest.approx(
        moved / Efficiency().links * (1 / 5e9 - 1 / 50e9)
    )


def test_what_was_measured_has_its_collectives_in_it() -> None:
    assert collectives(flops_per_s=1e14) == collectives(collectives=False) == TrainingCollectives()


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_sizes_that_contradict_each_other_are_refused(
    backend: Literal["torch", "megatron"],
) -> None:
    args = [
        "--devices",
        "16",
        "--learner.backend",
        backend,
        "--learner.pipeline-model-parallel-size",
        "3",
    ]
    message = {
        "torch": "learner.backend is 'torch'; expected megatron with pipeline_model_parallel_size 3",
        "megatron": r"learner.devices_per_replica is 8; expected a multiple of .* \(3\)",
    }
    with pytest.raises(UserError, match=message[backend]):
        parse_simulate(args)
