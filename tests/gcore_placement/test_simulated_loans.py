"""Loans within a simulated wave: less time where many are made, and none where judges keep up."""

from dataclasses import replace

import numpy as np
import pytest

from gcore_placement.simulation.loans import judge_with_loans
from gcore_placement.simulation.scenarios import scenario
from gcore_placement.simulation.simulator import wave_loads
from gcore_placement.simulation.waves import assign_wave, simulate_wave

SIMULATOR = scenario("judge_swap_back", "32B", 64, num_steps=6, seed=3)
"""Judgements are twenty times as long from step 2 to step 4."""
COSTS = SIMULATOR.costs
JUMP = next(SIMULATOR.trace.waves(2))


@pytest.mark.parametrize("policy_devices", [52, 56, 60])
def test_a_jump_costs_less_where_engines_that_are_done_judge(policy_devices: int) -> None:
    partition = SIMULATOR.space.nearest(policy_devices)
    alone = simulate_wave(COSTS, JUMP, partition)
    helped = simulate_wave(COSTS, JUMP, partition, lends=True)
    best = simulate_wave(COSTS, JUMP, SIMULATOR.space.nearest(24))
    assert helped.seconds - best.seconds < 0.6 * (alone.seconds - best.seconds)
    assert helped.lent_devices > 0
    assert sum(helped.device_s.values()) == pytest.approx(64 * helped.seconds, rel=1e-12)
    # One engine of the policy stays.
    assert sum(helped.replicas) == sum(partition.replicas)
    assert 1 <= helped.replicas[0] < partition.replicas[0]


def test_only_engines_that_are_done_are_lent_and_a_loan_takes_its_time() -> None:
    partition = SIMULATOR.space.nearest(52)
    generated, judged, ready_Q = assign_wave(COSTS, JUMP, partition)
    loans = judge_with_loans(COSTS, generated, judged)
    done_s = sorted(generated.done_s())
    num_lent = 0
    for loan in loans:
        num_lent += loan.num_devices // COSTS.policy.devices_per_replica
        assert done_s[num_lent - 1] <= loan.start_s
        assert loan.arrive_s - loan.start_s == pytest.approx(COSTS.swap.sleep_s + COSTS.swap.load_s)
    assert judged.num_replicas == partition.replicas[1] + num_lent
    lent_from = [from_s for replica, from_s, _ in judged.busy if replica >= partition.replicas[1]]
    assert min(lent_from) >= loans[0].arrive_s
    assert judged.num_finished == len(ready_Q)
    assert (np.array(judged.finish_s) > ready_Q).all()


def test_no_engine_is_lent_where_judges_keep_up() -> None:
    wave = next(SIMULATOR.trace.waves(0))
    partition = SIMULATOR.space.nearest(32)
    assert simulate_wave(COSTS, wave, partition, lends=True) == simulate_wave(
        COSTS, wave, partition
    )


def test_a_wave_with_loans_tells_the_work_of_its_judge() -> None:
    """The correction of exact costs is about 1, with any engines as judges."""
    helped = simulate_wave(COSTS, JUMP, SIMULATOR.space.nearest(56), lends=True)
    _, reward = wave_loads(COSTS, JUMP, helped)
    assert reward.correction(8, 1.0) == pytest.approx(1.0, rel=0.35)


def test_lent_engines_come_back_late() -> None:
    partition, judging = SIMULATOR.space.nearest(56), SIMULATOR.space.nearest(24)
    late = simulate_wave(COSTS, JUMP, partition, before=judging.replicas, late_s=50.0)
    there = simulate_wave(COSTS, JUMP, partition)
    assert late.late_s == 50.0
    assert late.generation_s > there.generation_s


def test_dynamic_with_loans_is_faster_over_a_jump_and_says_how_often_it_lent() -> None:
    with_loans, without = SIMULATOR.dynamic(), SIMULATOR.dynamic(lends=False)
    assert with_loans.seconds < without.seconds
    assert with_loans.num_loans > without.num_loans == 0
    assert any(devices > 0 for devices in with_loans.steps[2].lent_devices)


def test_engines_of_other_sizes_are_lent_in_whole_replicas() -> None:
    simulator = scenario("judge_swap_back", "7B, 32B judge", 64, num_steps=6, seed=3)
    partition = next(p for p in simulator.space.partitions if p.devices[1] == 8)
    wave = next(simulator.trace.waves(2))
    helped = simulate_wave(simulator.costs, wave, partition, lends=True)
    assert helped.lent_devices > 0
    gained = helped.replicas[1] - partition.replicas[1]
    assert partition.replicas[0] - helped.replicas[0] == 4 * gained
    assert sum(helped.device_s.values()) == pytest.approx(64 * helped.seconds, rel=1e-12)


def test_swaps_that_take_no_time_are_lent_at_once() -> None:
    costs = replace(COSTS, swap=replace(COSTS.swap, sleep_s=0.0, wake_s=0.0, load_s=0.0))
    partition = SIMULATOR.space.nearest(56)
    generated, judged, _ = assign_wave(costs, JUMP, partition)
    loans = judge_with_loans(costs, generated, judged)
    assert loans
    assert all(loan.arrive_s == loan.start_s for loan in loans)
