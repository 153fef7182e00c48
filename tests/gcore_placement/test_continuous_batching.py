"""Simulated replicas against one replica in plain Python, a sequence at a time."""

import numpy as np
import pytest
from continuous_batching_cases import Requests, cases, run_replicas
from hypothesis import given

from gcore_placement import EngineCosts

TOLERANCE = 1e-9


def slow_replica(
    costs: EngineCosts, requests: Requests, items: list[int]
) -> tuple[dict[int, float], float]:
    """Finish times of one replica's requests, and its busy seconds: the law of `EngineCosts`, a sequence at a time."""
    left: dict[int, float] = {}
    held: dict[int, float] = {}
    finish: dict[int, float] = {}
    waiting, time, busy_s = list(items), 0.0, 0.0

    def duration(steps: float) -> float:
        # The mean of what is held on the way, times the steps.
        mean_held = sum(held.values()) + len(left) * steps / 2
        step_s = costs.decode_base_s + costs.decode_per_sequence_s * len(left)
        return steps * (step_s + costs.decode_per_context_token_s * mean_held)

    def decode(steps: float) -> None:
        for item in left:
            left[item] -= steps
            held[item] += steps

    while waiting or left:
        first = min(left, key=lambda item: left[item], default=None)
        until_end = duration(left[first]) if first is not None else 0.0
        arrival = (
            requests.arrival[waiting[0]] if waiting and len(left) < costs.max_num_seqs else np.inf
        )
        has_ended = first is not None and left[first] <= 0
        if arrival < np.inf and not has_ended and (first is None or arrival < time + until_end):
            if first is not None and arrival > time:
                few, many = 0.0, left[first]
                for _ in range(100):
                    middle = (few + many) / 2
                    few, many = (
                        (middle, many) if duration(middle) < arrival - time else (few, middle)
                    )
                busy_s += arrival - time
                decode(few)
            item = waiting.pop(0)
            prefill_s = requests.prefill[item] * costs.prefill_per_token_s
            time = max(time, arrival) + prefill_s
            busy_s += prefill_s
            left[item], held[item] = requests.length[item], requests.context[item]
        elif first is not None:
            decode(left[first])
            time, busy_s = time + until_end, busy_s + until_end
            finish[first] = time
            del left[first], held[first]
    return finish, busy_s


@given(case=cases())
def test_replicas_do_what_one_after_another_does(case: tuple[EngineCosts, int, Requests]) -> None:
    costs, num_replicas, requests = case
    run = run_replicas(costs, num_replicas, requests)
    for replica in range(num_replicas):
        items = np.flatnonzero(requests.replica == replica)
        finish, busy_s = slow_replica(costs, requests, items.tolist())
        # Of sequences that are complete at the same step, which goes first is open.
        np.testing.assert_allclose(
            np.sort(np.array(run.finish_s)[items]), sorted(finish.values()), rtol=TOLERANCE
        )
        mine = sum(to_s - from_s for number, from_s, to_s in run.busy if number == replica)
        np.testing.assert_allclose(mine, busy_s, rtol=TOLERANCE, atol=1e-9)


@given(case=cases())
def test_stretches_of_busy_time_do_not_meet_and_hold_all_that_ends(
    case: tuple[EngineCosts, int, Requests],
) -> None:
    costs, num_replicas, requests = case
    run = run_replicas(costs, num_replicas, requests)
    for replica in range(num_replicas):
        stretches = [(since, until) for number, since, until in run.busy if number == replica]
        since, until = np.array(stretches).reshape(-1, 2).T
        assert (since <= until).all()
        assert (until[:-1] <= since[1:]).all()
        until = until + TOLERANCE
        ends = np.array(run.finish_s)[requests.replica == replica]
        assert all(((since <= end) & (end <= until)).any() for end in ends)


def test_a_sequence_alone_takes_what_the_law_says() -> None:
    costs = EngineCosts(
        devices_per_replica=1,
        max_num_seqs=4,
        decode_base_s=0.01,
        decode_per_sequence_s=0.002,
        decode_per_context_token_s=1e-5,
        prefill_per_token_s=1e-4,
    )
    one = Requests(
        replica=np.array([0]),
        arrival=np.array([3.0]),
        prefill=np.array([50.0]),
        context=np.array([50.0]),
        length=np.array([100.0]),
    )
    expected = 3.0 + 50 * 1e-4 + 100 * 0.012 + 1e-5 * (50 * 100 + 100**2 / 2)
    assert run_replicas(costs, 1, one).finish_s[0] == pytest.approx(expected, rel=1e-12)


def test_nothing_to_do_takes_nothing() -> None:
    nothing = np.empty(0)
    costs = EngineCosts(
        devices_per_replica=1, max_num_seqs=4, decode_base_s=0.01, decode_per_sequence_s=0.002
    )
    requests = Requests(
        replica=np.empty(0, dtype=np.intp),
        arrival=nothing,
        prefill=nothing,
        context=nothing,
        length=nothing,
    )
    run = run_replicas(costs, 3, requests)
    assert run.finish_s == run.busy == []
    assert run.done_s() == [0.0, 0.0, 0.0]
