"""Seconds of engines and steps against token-by-token simulations, and the roofline at its ends."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from planning_jobs import QWEN_7B, make_cluster, make_job

from gcore_placement import (
    Efficiency,
    EngineCosts,
    Job,
    JobCosts,
    Lengths,
    ModelShape,
    PlacementError,
    SwapCosts,
    TrainingCosts,
    predict_step,
)
from gcore_placement.forecast import waves_seconds
from gcore_placement.planning.options import EngineRoofline
from gcore_placement.strategies import Strategy

ENGINE = EngineCosts(
    devices_per_replica=2,
    max_num_seqs=64,
    decode_base_s=1e-2,
    decode_per_sequence_s=1e-4,
    decode_per_context_token_s=1e-8,
    prefill_per_token_s=1e-5,
)
TRAINING = TrainingCosts(
    base_s=1.0, per_token_s=1e-3, per_pair_s=1e-7, num_forward_passes=2, sync_s=0.5
)
SWAP = SwapCosts(sleep_s=2.0, wake_s=3.0)


def decoded(engine: EngineCosts, prompts: np.ndarray, lengths: np.ndarray) -> float:
    """Seconds of one replica, token by token: waiting sequences begin, in order, as others end."""
    waiting, running, seconds = list(range(len(lengths))), dict[int, int](), 0.0
    while waiting or running:
        while waiting and len(running) < engine.max_num_seqs:
            running[waiting.pop(0)] = 0
        context = sum(prompts[i] + done + 1 for i, done in running.items())
        seconds += engine.decode_base_s + engine.decode_per_sequence_s * len(running)
        seconds += engine.decode_per_context_token_s * context
        running = {i: done + 1 for i, done in running.items() if done + 1 < lengths[i]}
    return seconds


@pytest.mark.parametrize(("num_sequences", "tolerance"), [(8, 0.03), (64, 0.02), (640, 0.03)])
def test_an_engine_takes_what_a_simulation_takes(num_sequences: int, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    seconds: list[float] = []
    lengths = Lengths.log_normal(median=100, sigma=0.8, longest=600)
    for _ in range(3200 // num_sequences):
        drawn = np.clip(rng.lognormal(np.log(100), 0.8, num_sequences), 1, 600).round()
        seconds.append(decoded(ENGINE, np.full(num_sequences, 50), drawn))
    job = make_job(
        train_batch_size=num_sequences,
        n=1,
        response_lengths=lengths,
        prompt_lengths=Lengths.recorded([50]),
    )
    predicted = waves_seconds(ENGINE, job, "generation", np.ones(1))[0, 0]
    prefill = ENGINE.prefill_per_token_s * 50 * num_sequences
    assert_allclose(predicted - prefill, np.mean(seconds), rtol=tolerance)


def test_prompts_are_read_once_for_a_group() -> None:
    free = replace(
        ENGINE, decode_base_s=0.0, decode_per_sequence_s=0.0, decode_per_context_token_s=0.0
    )
    job = make_job(train_batch_size=12, n=5, prompt_lengths=Lengths.recorded([100, 300]))
    assert_allclose(
        waves_seconds(free, job, "generation", np.array([1.0, 3.0])), [[12 * 200e-5, 4 * 200e-5]]
    )


def costs_of(*, with_judge: bool) -> JobCosts:
    return JobCosts(
        policy=ENGINE, reward=ENGINE if with_judge else None, training=TRAINING, swap=SWAP
    )


def test_a_step_without_a_judge() -> None:
    job = make_job()
    step = predict_step(
        costs_of(with_judge=False),
        job,
        strategy="colocated",
        num_devices=8,
        policy_devices=8,
        reward_devices=0,
    )
    work_s = (1e-3 * job.training_tokens + 1e-7 * job.training_pairs) / 8
    assert_allclose([step.training_s, step.preparation_s], [1 + work_s, 2 / 3 * work_s])
    assert (step.swap_s, step.weight_sync_s, step.reward_s) == (5.0, 0.5, 0.0)
    assert_allclose(step.total_s, step.generation_s + step.training_s + step.preparation_s + 5.5)


def test_training_work_is_that_of_the_groups() -> None:
    """Against `group_flops` over drawn groups, the prompt counted once."""
    prompts, responses = Lengths.recorded([100, 300]), Lengths.recorded([10, 70, 1000])
    job = make_job(train_batch_size=2, n=3, prompt_lengths=prompts, response_lengths=responses)
    workload = job.policy.workload
    expected = workload.group_flops([100, 300], [[10, 70, 1000]] * 2).sum()
    found = (
        workload.flops_per_token * job.training_tokens
        + workload.flops_per_attended_pair * job.training_pairs
    )
    assert_allclose(found, expected)


def seconds_of(strategy: Strategy, policy_devices: int, reward_devices: int, job: Job) -> float:
    return predict_step(
        costs_of(with_judge=True),
        job,
        strategy=strategy,
        num_devices=32,
        policy_devices=policy_devices,
        reward_devices=reward_devices,
    ).total_s


def test_roles_coexist_or_take_turns() -> None:
    job = make_job(judge=QWEN_7B, acceptance=0.7)
    coexisting = predict_step(
        costs_of(with_judge=True),
        job,
        strategy="dynamic",
        num_devices=32,
        policy_devices=16,
        reward_devices=16,
    )
    in_turns = predict_step(
        costs_of(with_judge=True),
        job,
        strategy="colocated",
        num_devices=32,
        policy_devices=32,
        reward_devices=32,
    )
    # Every step has a wave, every second one another; in turns, each wakes and puts to sleep both roles.
    assert (coexisting.swap_s, in_turns.swap_s) == (5.0, 1.5 * 10)
    assert coexisting.reward_s < in_turns.reward_s
    assert seconds_of("split", 16, 16, job) == coexisting.total_s
    assert seconds_of("split", 30, 2, job) > coexisting.total_s


def test_waves_have_the_prompts_that_acceptance_asks_for() -> None:
    job = make_job(train_batch_size=100, acceptance=0.5)
    assert_allclose(job.wave_chances @ job.wave_prompts, 200)
    assert_allclose(job.wave_prompts[1], np.sqrt(100 * 0.5) / 0.5)
    assert make_job(train_batch_size=100).wave_prompts.tolist() == [100.0]


def test_the_roofline_at_its_ends() -> None:
    """One sequence reads the weights; very many are as fast as products are."""
    shape, cluster = ModelShape.from_config(QWEN_7B), make_cluster(8)
    bare = Efficiency(decode_step_s=0.0, decode_sequence_s=0.0, all_reduce_s=0.0)
    roofline = EngineRoofline(model=shape, cluster=cluster, tp=1, compute_bytes=2, efficiency=bare)
    assert_allclose(
        roofline.decode_s(np.array([1.0])), 2 * shape.num_multiplied_parameters / (3.35e12 * 0.75)
    )
    assert_allclose(
        roofline.decode_s(np.array([1e6])), 2e6 * shape.num_multiplied_parameters / (989e12 * 0.4)
    )
    laws = roofline.laws(np.array([1.0, 100.0, 1000.0]))
    for index, most in enumerate(laws.max_num_seqs.tolist()):
        law = laws.costs(index)
        counts = np.linspace(1, most, 50)
        line = law.decode_base_s + law.decode_per_sequence_s * counts
        assert_allclose(line[[0, -1]], roofline.decode_s(counts[[0, -1]]))
        assert (line >= roofline.decode_s(counts) * (1 - 1e-12)).all()


def test_wrong_partitions_are_refused() -> None:
    job = make_job(judge=QWEN_7B)
    with pytest.raises(
        PlacementError,
        match=r"policy_devices is 1; expected at least a replica \(2\), at most all \(32\)",
    ):
        seconds_of("dynamic", 1, 30, job)
    with pytest.raises(PlacementError, match=r"reward_devices is 33; expected .*"):
        seconds_of("split", 2, 33, job)
    with pytest.raises(
        PlacementError, match=r"job.judge is .*; expected a model where costs.reward is given"
    ):
        seconds_of("dynamic", 2, 30, make_job())
    with pytest.raises(PlacementError, match=r"judge_lengths is .*; expected given with a judge"):
        make_job(judge=QWEN_7B, judge_lengths=None)
    with pytest.raises(
        PlacementError, match=r"acceptance is 1.5; expected a number above 0, at most 1"
    ):
        make_job(acceptance=1.5)
    with pytest.raises(
        PlacementError, match=r"strategy is 'other'; expected one of colocated, split, dynamic"
    ):
        seconds_of("other", 2, 2, job)  # pyright: ignore[reportArgumentType]
