"""Seconds of training against sums worked out by hand, and against the curves of the papers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from planning_jobs import make_cluster, make_job

from gcore_placement import Cluster, Efficiency, Job, TrainingLayout, TransformerWorkload
from gcore_placement.costs import TrainingLaws
from gcore_placement.forecast import training_seconds
from gcore_placement.planning.layouts import Backend, TrainingLayouts, training_layouts
from gcore_placement.planning.options import training_laws

PEAK = Efficiency(
    training=1.0, experts=1.0, attention=1.0, links=1.0, memory=1.0, micro_batch_s=0.0
)
FLOPS_PER_S, LINK, BETWEEN_NODES, MEMORY = 989e12, 450e9, 50e9, 3.35e12


def layout(
    backend: Backend, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, **changed: Any
) -> TrainingLayout:
    options: dict[str, Any] = {
        "gradient_checkpointing": False,
        "ppo_max_token_len": 16384,
        **changed,
    }
    return TrainingLayout(
        backend=backend,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        data_parallel_size=dp,
        **options,
    )


def computed(job: Job) -> float:
    """FLOPs of a token: those of its products, and its logits once more."""
    workload = job.policy.workload
    return workload.flops_per_token + 2 * workload.hidden_size * workload.vocab_size


def scoring_s(job: Job) -> float:
    """Of a token's logits apart from their products: `token_scores` reads or writes them 26 times, in float32."""
    return 26 * 4 * job.policy.workload.vocab_size / MEMORY


def laws_of(job: Job, *layouts: TrainingLayout, cluster: Cluster | None = None) -> TrainingLaws:
    cluster = cluster or make_cluster(8)
    return training_laws(job, TrainingLayouts(*layouts), cluster=cluster, efficiency=PEAK)


def test_alone_a_device_computes_and_updates() -> None:
    job = make_job()
    laws = laws_of(job, layout("torch"))
    seconds = sum(training_seconds(laws, job.training_tokens, job.training_pairs, num_devices=1))
    workload = job.policy.workload
    flops = (
        computed(job) * job.training_tokens + workload.flops_per_attended_pair * job.training_pairs
    )
    update_s = 28 * job.policy.num_parameters / MEMORY
    assert_allclose(seconds, flops / FLOPS_PER_S + scoring_s(job) * job.training_tokens + update_s)
    assert_allclose(laws.forward_share, workload.flops_per_token / computed(job) / 3)


def test_recomputation_is_a_third_more_and_a_forward_pass_stays_what_it_is() -> None:
    job = make_job()
    kept, recomputed = (
        laws_of(job, layout("torch", gradient_checkpointing=r)) for r in (False, True)
    )
    assert_allclose(kept.per_token_s, computed(job) / FLOPS_PER_S + scoring_s(job))
    again = 4 / 3 * job.policy.workload.flops_per_token
    assert_allclose(recomputed.per_token_s, again / FLOPS_PER_S + scoring_s(job))
    kept_s, recomputed_s = (law.per_token_s - scoring_s(job) for law in (kept, recomputed))
    assert_allclose(recomputed.per_pair_s, 4 / 3 * kept.per_pair_s)
    assert_allclose(recomputed.forward_share * recomputed_s, kept.forward_share * kept_s)


def mixture_job() -> Job:
    mixture = TransformerWorkload.from_config(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [0],
        }
    )
    assert mixture.expert_flops_per_token == 3 * 2 * 2 * (3 * 64 * 2 * 32)
    job = make_job()
    return replace(job, policy=replace(job.policy, workload=mixture))


def test_experts_are_slower_than_other_products() -> None:
    """At half of their rate they take as long again; a dense model does not change."""
    job = mixture_job()
    slow = replace(PEAK, experts=0.5)
    micro_batches = np.ceil(job.training_tokens / 16384)
    rows = job.training_tokens / micro_batches * 2 / 8
    expert_s = job.policy.workload.expert_flops_per_token / FLOPS_PER_S * (1 + 64 / rows)
    for own, added in ((job, expert_s), (make_job(), 0.0)):
        fast_s, slow_s = (
            training_laws(
                own, TrainingLayouts(layout("torch")), cluster=make_cluster(8), efficiency=each
            ).per_token_s
            for each in (PEAK, slow)
        )
        assert_allclose(slow_s - fast_s, added, atol=1e-18)


def test_experts_with_few_rows_compute_tiles_that_are_not_full() -> None:
    """Half a tile of 128 rows more for each expert; ranks that divide the experts bring their rows together."""
    job = mixture_job()
    workload = job.policy.workload

    def expert_s(dp: int, **changed: Any) -> float:
        laws = laws_of(job, layout("megatron", dp=dp, ppo_max_token_len=512, **changed))
        others = computed(job) - workload.expert_flops_per_token
        return float(laws.per_token_s[0] - others / FLOPS_PER_S - scoring_s(job))

    micro_batches = np.ceil(job.training_tokens / 512)
    rows = job.training_tokens / micro_batches * 2 / 8
    assert_allclose(expert_s(1), workload.expert_flops_per_token / FLOPS_PER_S * (rows + 64) / rows)
    # Without the states that the ranks send each other.
    sent_s = 2 * 2 * 2 * 2 * 64 * 2 * (1 - 1 / 4) / LINK
    rows = job.training_tokens / 4 / np.ceil(job.training_tokens / 4 / 512) * 4 * 2 / 8
    divided_s = expert_s(4, expert_model_parallel_size=4) - sent_s
    assert_allclose(divided_s, workload.expert_flops_per_token / FLOPS_PER_S * (rows + 64) / rows)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_each_update_has_micro_batches_and_an_exchange_of_its_own(backend: Backend) -> None:
    """With 16 times as many ranks a rank has one micro-batch in each update, and no fewer."""
    own = replace(PEAK, micro_batch_s=0.5, overlap=0.0)
    one, several = make_job(), make_job(ppo_mini_batch_size=8)
    assert (one.num_updates, several.num_updates) == (1, 8)
    for dp in (2, 32):
        layouts = TrainingLayouts(layout(backend, dp=dp))
        base_s = [
            training_laws(job, layouts, cluster=make_cluster(32), efficiency=own).base_s.item()
            for job in (one, several)
        ]
        micro_batches = [u * np.ceil(one.training_tokens / u / dp / 16384) for u in (1, 8)]
        assert (dp == 32) == (micro_batches == [np.ceil(one.training_tokens / 32 / 16384), 8])
        parameters, rate = one.policy.num_parameters, LINK if dp == 2 else BETWEEN_NODES
        adam_s = 28 * parameters / dp / MEMORY
        exchanged = micro_batches[1] if backend == "torch" else 8
        size_bytes = (8 if backend == "torch" else 6) * parameters * (dp - 1) / dp
        expected = 8 * adam_s + exchanged * size_bytes / rate + micro_batches[1] * 0.5
        assert_allclose(base_s[1], expected)
        assert base_s[1] > base_s[0]


def test_a_pipeline_has_a_bubble() -> None:
    """(p - 1) / m of the work (arXiv 2104.04473, section 2.2.1), and a state at each border."""
    job = make_job(train_batch_size=512)
    laws = laws_of(job, layout("megatron", pp=4, dp=2))
    micro_batches = np.ceil(job.training_tokens / 2 / 16384)
    bubble = 1 + 3 / micro_batches
    moved = 2 * 2 * 3584 * 3 / LINK
    assert_allclose(
        laws.per_token_s, bubble * (computed(job) / FLOPS_PER_S + scoring_s(job) + moved)
    )
    assert_allclose(
        laws.per_pair_s, bubble * job.policy.workload.flops_per_attended_pair / FLOPS_PER_S
    )


def test_tensor_and_context_ranks_move_states_keys_and_values() -> None:
    job = make_job()
    computing = computed(job) / FLOPS_PER_S + scoring_s(job)
    tensor, context = (
        laws_of(job, layout("megatron", tp=4), layout("torch", cp=4)).per_token_s - computing
    )
    assert_allclose(tensor, 28 * 8 * 2 * 3584 * 3 / LINK)
    assert_allclose(context, 28 * 3 * 2 * 2 * 512 * 3 / LINK)
    wide = (
        laws_of(job, layout("torch", cp=4), cluster=make_cluster(8, devices_per_node=2)).per_token_s
        - computing
    )
    assert_allclose(wide, context * LINK / BETWEEN_NODES)


def test_zero_stages_move_gradients_and_weights() -> None:
    """ZeRO-1 once a step; ZeRO-3 in each micro-batch, where products do not hide it."""
    job = make_job()
    parameters = job.policy.num_parameters
    adam_s = 28 * parameters / 8 / MEMORY
    assert_allclose(
        laws_of(job, layout("megatron", dp=8)).base_s, adam_s + (4 + 2) * parameters * 7 / 8 / LINK
    )
    assert_allclose(laws_of(job, layout("torch", dp=8)).base_s, adam_s)

    slow = make_cluster(8, devices_per_node=1, inter_node_bytes_per_s=1e9)
    laws = laws_of(job, layout("torch", dp=8), cluster=slow)
    micro_batches = np.ceil(job.training_tokens / 8 / 16384)
    computing_s = (
        laws.per_token_s * job.training_tokens + laws.per_pair_s * job.training_pairs
    ) / 8
    moving_s = micro_batches * (2 + 2 + 4) * parameters * 7 / 8 / 1e9
    assert_allclose(laws.base_s, adam_s + moving_s - computing_s)


def test_a_critic_is_trained_and_scores_too() -> None:
    alone = make_job()
    both = replace(alone, critic=alone.policy, reference=True)
    one, two = (laws_of(job, layout("torch", dp=8)) for job in (alone, both))
    assert_allclose(two.per_token_s, 2 * one.per_token_s)
    # A scoring pass is that of one model: half as much of both models' training.
    assert_allclose(two.forward_share, one.forward_share / 2)
    assert two.num_forward_passes == 2


@pytest.mark.parametrize("num_devices", [8, 24, 64])
def test_layouts_use_all_devices_and_divide_what_they_must(num_devices: int) -> None:
    layouts = training_layouts(make_job(), make_cluster(64), num_devices)
    assert (layouts.num_devices == num_devices).all()
    # 28 heads and 28 layers; 4 key-value heads are copied.
    assert set(layouts.tp.tolist()) == {1, 2, 4}
    assert not (28 % layouts.pp).any()
    assert (layouts.max_tokens >= make_job().longest_sequence).all()
    assert (layouts.tp * layouts.pp == 1)[layouts.sharded].all()
    assert len({str(layouts[index]) for index in range(len(layouts))}) == len(layouts)
