"""Strategies on traces: an obvious simulation as oracle, accounts that add up, and a bound that holds."""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from planning_jobs import QWEN_7B, make_job

from gcore_placement import (
    Drift,
    EngineCosts,
    JobCosts,
    PartitionSpace,
    PlacementError,
    RoleLimits,
    Simulator,
    SwapCosts,
    Trace,
    TraceRecipe,
    TrainingCosts,
    forecast as step_time,
    predict_ages,
    predict_step,
)
from gcore_placement.partition.space import Partition
from gcore_placement.simulation.scenarios import SCENARIOS, scenario
from gcore_placement.simulation.simulator import SimulatedStep, StrategyRun, wave_loads
from gcore_placement.simulation.waves import least_seconds, simulate_wave
from gcore_placement.strategies import PLANNED, STRATEGIES, StrategyTraits
from gcore_placement.workload.traces import steady

COSTS = JobCosts(
    policy=EngineCosts(
        devices_per_replica=2,
        max_num_seqs=3,
        decode_base_s=0.01,
        decode_per_sequence_s=0.002,
        decode_per_context_token_s=1e-5,
        prefill_per_token_s=1e-4,
    ),
    reward=EngineCosts(
        devices_per_replica=1,
        max_num_seqs=4,
        decode_base_s=0.02,
        decode_per_sequence_s=0.001,
        prefill_per_token_s=2e-4,
    ),
    training=TrainingCosts(
        base_s=0.5, per_token_s=1e-3, per_pair_s=1e-6, num_forward_passes=2, sync_s=0.3
    ),
    swap=SwapCosts(sleep_s=0.2, wake_s=0.4, load_s=1.5),
)


def trace(seed: int, *, num_steps: int = 4, groups: int = 5, noise: float = 0.3) -> Trace:
    return TraceRecipe(
        name="small",
        num_steps=num_steps,
        train_batch_size=groups,
        n=3,
        prompt_median=20,
        response_median=Drift(first=20, last=60),
        max_response_length=300,
        judge_median=Drift(first=40, last=15),
        max_judge_length=200,
        acceptance=Drift(first=0.9, last=0.4),
        noise=noise,
        seed=seed,
    ).trace()


def space(num_devices: int = 11) -> PartitionSpace:
    return PartitionSpace(
        num_devices=num_devices,
        roles=(RoleLimits(devices_per_replica=2), RoleLimits(devices_per_replica=1)),
    )


def slow_engine(
    costs: EngineCosts, queues: list[list[tuple[float, float, float, float]]]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Finish times, in order of the queues, and busy seconds: in time steps of one event each, a replica at a time.

    Requests are (arrival, prefill, context, length).
    """
    finishes: list[float] = []
    busy: list[tuple[float, float]] = []
    for queue in queues:
        time, waiting = 0.0, list(range(len(queue)))
        left: dict[int, float] = {}
        held: dict[int, float] = {}
        done: dict[int, float] = {}
        while waiting or left:
            arrival = queue[waiting[0]][0] if waiting and len(left) < costs.max_num_seqs else np.inf
            steps = min(left.values(), default=0.0)
            step_s = costs.decode_base_s + costs.decode_per_sequence_s * len(left)
            a, b = costs.decode_per_context_token_s * len(left) / 2, step_s
            b += costs.decode_per_context_token_s * sum(held.values())
            duration = a * steps**2 + b * steps
            comes = bool(waiting) and arrival < np.inf and (not left or arrival < time + duration)
            if comes:
                wait = max(0.0, arrival - time) if left else 0.0
                steps = (
                    min(np.roots([a, b, -wait]).max() if a else wait / b, steps) if wait else 0.0
                )
                duration = wait
            for item in left:
                left[item] -= steps
                held[item] += steps
            if left:
                busy.append((time, time + duration))
                time += duration
            if comes:
                item = waiting.pop(0)
                start = max(time, arrival)
                time = start + queue[item][1] * costs.prefill_per_token_s
                busy.append((start, time))
                left[item], held[item] = queue[item][3], queue[item][2]
            else:
                item = min(left, key=lambda i: left[i])
                del left[item], held[item]
                done[item] = time
        finishes += [done[item] for item in range(len(queue))]
    return finishes, busy


def slow_wave_s(
    costs: JobCosts, small: Trace, step: int, partition: Partition
) -> tuple[float, float, float]:
    """Seconds of a step's waves, and device-seconds of generation and reward."""
    assert costs.reward is not None
    total, generation, judging = 0.0, 0.0, 0.0
    for wave in small.waves(step):
        num_groups, n = wave.response_length.shape
        items = [(g, j) for g in range(num_groups) for j in range(n)]
        num_replicas = partition.replicas[0]
        queues: list[list[tuple[float, float, float, float]]] = [[] for _ in range(num_replicas)]
        seen: set[tuple[int, int]] = set()
        for index, (g, j) in enumerate(items):
            replica = index * num_replicas // len(items)
            prompt = float(wave.prompt_length[g])
            prefill = 0.0 if (replica, g) in seen else prompt
            seen.add((replica, g))
            queues[replica].append((0.0, prefill, prompt, float(wave.response_length[g, j])))
        finishes, busy = slow_engine(costs.policy, queues)
        generation += sum(b - a for a, b in busy) * costs.policy.devices_per_replica
        by_time = sorted(range(len(items)), key=lambda index: finishes[index])
        queues = [[] for _ in range(partition.replicas[1])]
        for turn, index in enumerate(by_time):
            g, j = items[index]
            read = float(wave.prompt_length[g] + wave.response_length[g, j])
            queues[turn % len(queues)].append(
                (finishes[index], read, read, float(wave.judge_length[g, j]))
            )
        finishes, busy = slow_engine(costs.reward, queues)
        judging += sum(b - a for a, b in busy) * costs.reward.devices_per_replica
        total += max(finishes)
    return total, generation, judging


# The same seeds each time: with a few others two responses end at the same step, and which is judged first is open.
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_steps_take_what_an_obvious_simulation_says(seed: int) -> None:
    small = trace(seed)
    # Where responses wait, and two end at the same step, which of them is first is open; test_continuous_batching
    # has engines with a queue.
    costs = replace(COSTS, policy=replace(COSTS.policy, max_num_seqs=100))
    for partition in space().partitions:
        for step, simulated in enumerate(Simulator(small, costs, space()).split(partition).steps):
            seconds, generation, judging = slow_wave_s(costs, small, step, partition)
            tokens, pairs = small.training_tokens(step)
            share_s = (1e-3 * tokens + 1e-6 * pairs) / 11
            assert simulated.stage_s["generation"] == pytest.approx(seconds, rel=1e-9)
            assert simulated.seconds == pytest.approx(
                seconds + 0.6 + 0.5 + share_s * (1 + 2 / 3) + 0.3, rel=1e-9
            )
            assert simulated.device_s["generation"] == pytest.approx(generation, rel=1e-9)
            assert simulated.device_s["reward"] == pytest.approx(judging, rel=1e-9)


def all_runs(simulator: Simulator) -> list[StrategyRun]:
    runs = [
        simulator.colocated(),
        simulator.dynamic(lends=False),
        simulator.clairvoyant(),
        simulator.best_split(),
    ]
    return runs + [simulator.split(partition) for partition in simulator.space.partitions]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), num_devices=st.integers(3, 12))
def test_columns_add_up_to_all_device_seconds(seed: int, num_devices: int) -> None:
    simulator = Simulator(trace(seed), COSTS, space(num_devices))
    for run in (*all_runs(simulator), simulator.dynamic()):
        for step in run.steps:
            assert sum(step.device_s.values()) == pytest.approx(
                num_devices * step.seconds, rel=1e-12
            )
            assert min(step.device_s.values()) >= 0
            assert sum(step.stage_s.values()) == pytest.approx(step.seconds, rel=1e-12)


@settings(max_examples=15, deadline=None)
@example(seed=2403, num_devices=6)
@given(seed=st.integers(0, 10**6), num_devices=st.integers(3, 12))
def test_no_strategy_is_faster_than_the_clairvoyant_in_any_step(
    seed: int, num_devices: int
) -> None:
    """But for what replicas that come late happen to gain: requests go to others, and that may suit their lengths."""
    simulator = Simulator(trace(seed), COSTS, space(num_devices))
    bound = simulator.clairvoyant()
    best = simulator.best_split()
    for run in all_runs(simulator)[1:]:
        for step, least in zip(run.steps, bound.steps, strict=True):
            late = 0.01 if any(step.moved_devices) else 1e-12
            assert least.seconds <= step.seconds * (1 + late)
    splits = [simulator.split(partition).seconds for partition in simulator.space.partitions]
    assert best.seconds == min(splits)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), max_num_seqs=st.sampled_from([1, 3, 100]))
def test_no_wave_is_faster_than_its_lower_bound(seed: int, max_num_seqs: int) -> None:
    costs = replace(COSTS, policy=replace(COSTS.policy, max_num_seqs=max_num_seqs))
    partitions = space().partitions
    for wave in trace(seed, num_steps=2).waves(1):
        least_s = least_seconds(costs, wave, partitions)
        simulated_s = [simulate_wave(costs, wave, partition).seconds for partition in partitions]
        assert (least_s <= simulated_s).all()
        # So tight that it is of use: one of a few groups on a few engines.
        assert least_s.max() > 0.5 * max(simulated_s)


def test_devices_that_move_come_late_and_that_is_swap() -> None:
    small = trace(0, num_steps=8, noise=0.0)
    run = Simulator(small, COSTS, space()).dynamic(space().partitions[0], lends=False)
    assert run.num_moves >= 1
    for step in run.steps:
        assert (step.device_s["swap"] > 11 * 0.6 + 1e-9) == any(step.moved_devices)


def test_a_move_within_a_step_takes_longer_than_one_between_steps() -> None:
    # A judge that is slow and a policy that is quick, from half of the devices each: all wish to move at once.
    costs = replace(
        COSTS,
        policy=replace(COSTS.policy, decode_base_s=1e-4),
        swap=replace(COSTS.swap, load_s=0.5),
    )
    small = trace(0, num_steps=3, groups=20, noise=0.0)
    run = Simulator(small, costs, space()).dynamic(space().partitions[-1], lends=False)
    first = run.steps[0]
    assert first.moved_devices[0] == 0
    assert first.moved_devices[1] > 0
    one_wave = replace(small, wave=np.zeros_like(small.wave))
    between = (
        Simulator(one_wave, costs, space()).dynamic(space().partitions[-1], lends=False).steps[1]
    )
    assert between.moved_devices[0] > 0
    # Late by the sleep of the old role and the load of the new; else only by what loading takes longer than waking.
    assert first.device_s["swap"] == pytest.approx(
        11 * 0.6 + late_devices(first, costs) * (0.2 + 0.5)
    )
    assert between.device_s["swap"] == pytest.approx(
        11 * 0.6 + late_devices(between, costs) * (0.5 - 0.4)
    )


def late_devices(step: SimulatedStep, costs: JobCosts) -> int:
    """Of the replicas that a step's only move begins with."""
    (number,) = np.flatnonzero(step.moved_devices)
    after = step.partitions[number]
    before = step.partitions[number - 1] if number else space().partitions[-1]
    policy, reward = (
        max(0, has - had) for had, has in zip(before.replicas, after.replicas, strict=True)
    )
    assert costs.reward is not None
    return policy * costs.policy.devices_per_replica + reward * costs.reward.devices_per_replica


@pytest.mark.parametrize("median", [100, 300, 800, 2400, 6000])
def test_loads_tell_what_a_wave_takes_on_every_partition(median: float) -> None:
    """The laws of both roles, from lengths alone, against the simulation of every decoding step."""
    simulator = scenario("steady", "32B", 64, num_steps=1)
    recipe = replace(
        SCENARIOS["steady"],
        num_steps=1,
        train_batch_size=256,
        judge_median=steady(median),
        max_judge_length=16_384,
    )
    wave = next(recipe.trace().waves(0))
    for partition in simulator.space.partitions[::3]:
        outcome = simulate_wave(simulator.costs, wave, partition)
        roles = zip(wave_loads(simulator.costs, wave, outcome), partition.devices, strict=True)
        told_s = max(load.floor_s + load.work_device_s / devices for load, devices in roles)
        assert told_s == pytest.approx(outcome.seconds, rel=0.15)


def test_a_judge_that_ends_a_little_late_on_full_engines_is_not_read_as_dearer() -> None:
    small = trace(0)
    wave = next(small.waves(0))
    outcome = simulate_wave(COSTS, wave, space().partitions[0])
    for late, was_waiting in ((1.0, True), (1.25, True), (1.4, False)):
        ended_late = replace(outcome, seconds=late * outcome.uncontended_s)
        _, reward = wave_loads(COSTS, wave, ended_late)
        assert reward.was_waiting == was_waiting
        assert (reward.correction(4, 1.0) <= 1.0) or not was_waiting


def test_turns_pay_for_swaps_in_every_wave() -> None:
    small = trace(1)
    free = replace(COSTS, swap=SwapCosts())
    num_waves = sum(len(list(small.waves(step))) for step in range(small.num_steps))
    dear, cheap = (Simulator(small, costs, space()).colocated() for costs in (COSTS, free))
    assert dear.seconds - cheap.seconds == pytest.approx(2 * num_waves * 0.6)
    assert cheap.share("swap") == 0.0


def test_believing_wrong_costs_changes_decisions_and_not_what_steps_take() -> None:
    small, right = trace(3, num_steps=10), Simulator(trace(3, num_steps=10), COSTS, space())
    assert COSTS.reward is not None
    wrong = replace(COSTS, reward=replace(COSTS.reward, decode_base_s=5.0))
    run = right.dynamic(believed=wrong)
    for number, step in enumerate(run.steps):
        if not any(step.moved_devices):
            assert step.seconds == right.split(step.partitions[0]).steps[number].seconds
    assert small.num_steps == len(run.steps)
    assert [step.partitions for step in run.steps] != [
        step.partitions for step in right.dynamic().steps
    ]


def test_what_cannot_be_simulated_is_refused() -> None:
    small = trace(0)
    assert COSTS.reward is not None
    with pytest.raises(PlacementError, match=r"costs\.reward is .*; expected"):
        Simulator(small, replace(COSTS, reward=None), space())
    with pytest.raises(
        PlacementError, match=r"space\.policy\.devices_per_replica is .*; expected 4"
    ):
        Simulator(
            small, replace(COSTS, policy=replace(COSTS.policy, devices_per_replica=4)), space()
        )
    still = replace(COSTS.reward, decode_base_s=0.0, decode_per_sequence_s=0.0)
    with pytest.raises(
        PlacementError, match=r"costs\.reward\.decode_base_s is .*; expected above 0"
    ):
        Simulator(small, replace(COSTS, reward=still), space())


class _Halving(Simulator):
    """A simulator with a strategy of its own, under which each role always has about half of the devices."""

    def halves(self) -> StrategyRun:
        run = self.split(self.space.nearest(self.space.num_devices / 2))
        return replace(run, strategy="halves")


def test_a_strategy_is_an_entry_for_plans_and_a_method_for_simulations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves: Any = "halves"
    monkeypatch.setitem(
        STRATEGIES, halves, StrategyTraits(is_time_shared=False, follows_load=False)
    )
    monkeypatch.setattr(step_time, "PLANNED", (*PLANNED, halves))
    sizes = {"num_devices": 32, "policy_devices": 16, "reward_devices": 16}
    job = make_job(judge=QWEN_7B)
    assert predict_step(COSTS, job, strategy=halves, **sizes) == predict_step(
        COSTS, job, strategy="split", **sizes
    )
    simulator = _Halving(trace(1), COSTS, space())
    run = simulator.halves()
    assert run.seconds >= simulator.best_split().seconds >= simulator.clairvoyant().seconds
    assert run.num_moves == 0
    for step in run.steps:
        assert sum(step.device_s.values()) == pytest.approx(11 * step.seconds)


def play_groups(
    draw_s: Callable[[], float], *, in_flight: int, batch: int, update_s: float, max_staleness: int
) -> tuple[list[float], float, float]:
    """Sample and train, event by event, and drop; return the shares of ages, of dropped groups, and seconds a step."""
    rng = np.random.default_rng(1)
    playing: list[tuple[float, int, int]] = []
    num_started, version, num_dropped = 0, 0, 0
    now_s, published_s = 0.0, math.inf
    trained_s: list[float] = []
    complete: list[int] = []
    ages = np.zeros(max_staleness + 1)
    while len(trained_s) < 1500:
        while len(playing) < in_flight:
            delay_s = float(rng.uniform(0, 4)) if num_started < in_flight else 0.0
            num_started += 1
            heapq.heappush(playing, (now_s + delay_s + draw_s(), num_started, version))
        if published_s <= playing[0][0]:
            version, published_s = len(trained_s), math.inf
            continue
        now_s, _, started = heapq.heappop(playing)
        complete.append(started)
        if len(complete) < batch:
            continue
        if published_s < math.inf:
            # The trainer is still at the batch before.
            now_s, version, published_s = published_s, len(trained_s), math.inf
        np.add.at(ages, len(trained_s) - np.array(complete), 1)
        complete.clear()
        trained_s.append(now_s)
        published_s = now_s + update_s
        young = [entry for entry in playing if len(trained_s) - entry[2] <= max_staleness]
        num_dropped += len(playing) - len(young)
        playing[:] = young
        heapq.heapify(playing)
    shares = (ages / ages.sum()).tolist()
    return shares, num_dropped / num_started, float(np.diff(trained_s)[100:].mean())


@pytest.mark.parametrize("max_staleness", [2, 3, 8])
@pytest.mark.parametrize("sigma", [0.02, 0.5, 1.0])
def test_ages_are_distributed_as_predicted(sigma: float, max_staleness: int) -> None:
    """For groups that take equally long, and for those of which a part is dropped."""
    rng = np.random.default_rng(0)
    draws = iter((4 * rng.lognormal(-(sigma**2) / 2, sigma, 300_000)).tolist())
    shares, stale, step_s = play_groups(
        lambda: next(draws), in_flight=96, batch=64, update_s=1.0, max_staleness=max_staleness
    )
    predicted = predict_ages(
        4 * rng.lognormal(-(sigma**2) / 2, sigma, 20_000),
        num_in_flight=96,
        train_batch_size=64,
        update_s=1.0,
        max_staleness=max_staleness,
    )
    assert predicted.shares == pytest.approx(shares, abs=0.04)
    assert predicted.stale_share == pytest.approx(stale, abs=0.01)
    assert predicted.step_s == pytest.approx(step_s, rel=0.02)
    assert predicted.shares.sum() == pytest.approx(1)
    if not predicted.stale_share:
        # Little's law.
        mean = float(predicted.shares @ np.arange(max_staleness + 1))
        assert mean == pytest.approx(96 / 64 + 1.0 / step_s, rel=0.02)


@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_ages_where_training_takes_longer(strategy: Any) -> None:
    ages = predict_ages(
        [3.0, 5.0],
        num_in_flight=8,
        train_batch_size=8,
        update_s=30.0,
        max_staleness=3,
        strategy=strategy,
    )
    assert (ages.step_s, ages.shares.tolist(), ages.stale_share) == (30.0, [0, 0, 0, 1], 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("group_s", [1.0, 0.0], "group_s is 0.0; expected a finite number above 0"),
        ("group_s", [], "group_s is inf; expected a finite number above 0"),
        ("num_in_flight", 0, "num_in_flight is 0; expected a finite number above 0"),
        ("update_s", -1.0, "update_s is -1.0; expected 0 or more"),
        ("max_staleness", 0, "max_staleness is 0; expected a finite number above 0"),
    ],
)
def test_ages_of_no_run(field: str, value: Any, message: str) -> None:
    fields: dict[str, Any] = {
        "group_s": [1.0],
        "num_in_flight": 8,
        "train_batch_size": 8,
        "update_s": 1.0,
        "max_staleness": 2,
    }
    with pytest.raises(PlacementError, match=message):
        predict_ages(**fields | {field: value})
