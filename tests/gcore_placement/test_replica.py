"""A replica moved forward by its caller, and the ledger that counts while replicas run."""

import pytest
from hypothesis import given, strategies as st

from gcore_placement import EngineCosts, ReplicaRequest, RunningLedger, SimulatedReplica

COSTS = EngineCosts(
    devices_per_replica=1,
    max_num_seqs=4,
    decode_base_s=0.01,
    decode_per_sequence_s=0.002,
    decode_per_context_token_s=1e-5,
)


@given(steps=st.floats(0.01, 1000), running=st.integers(1, 64), held=st.floats(0, 1e5))
def test_steps_within_is_the_inverse_of_decode_s(steps: float, running: int, held: float) -> None:
    seconds = COSTS.decode_s(steps, float(running), held)
    assert COSTS.steps_within(seconds, float(running), held) == pytest.approx(steps, rel=1e-9)


def test_a_withdrawn_sequence_has_the_tokens_that_it_was_given() -> None:
    replica: SimulatedReplica[ReplicaRequest] = SimulatedReplica(COSTS)
    requests = {name: ReplicaRequest(length=100.0) for name in "abcdef"}
    replica.submit(requests.values(), 0.0)
    now_s = COSTS.decode_s(40.0, 4.0, 0.0)
    taken = dict(replica.withdraw(lambda request: request in (requests["b"], requests["f"]), now_s))
    assert taken == {requests["f"]: 0.0, requests["b"]: pytest.approx(40.0)}
    # Another has taken its place, and the tokens that are held are those of the four that run.
    assert (replica.num_running, replica.num_waiting) == (4, 0)
    assert replica.next_end_s == pytest.approx(now_s + COSTS.decode_s(60.0, 4.0, 120.0))


def test_a_held_replica_stands_still() -> None:
    replica: SimulatedReplica[ReplicaRequest] = SimulatedReplica(COSTS)
    replica.submit([ReplicaRequest(length=100.0)], 0.0)
    alone_s = COSTS.decode_s(100.0, 1.0, 0.0)
    replica.hold(0.5)
    assert replica.next_end_s is None
    later = ReplicaRequest(length=1.0)
    replica.submit([later], 3.0)
    assert (replica.num_running, replica.num_waiting) == (1, 1)
    assert replica.withdraw(lambda request: request is later, 4.0) == [(later, 0.0)]
    replica.release(10.5)
    assert replica.next_end_s == pytest.approx(10 + alone_s)


def test_the_running_ledger_names_the_cause() -> None:
    now_s = 0.0
    ledger = RunningLedger(
        num_devices=4, num_reward_devices=1, num_controllers=2, clock=lambda: now_s
    )
    ledger.enter(0, "gen")
    ledger.enter(1, "gen")
    ledger.change("generation", 2)
    now_s = 10.0
    ledger.change("generation", -1)
    ledger.change("reward", 1)
    ledger.enter(0, "reward")
    ledger.enter(1, None)
    now_s = 14.0
    ledger.change("generation", -1)
    ledger.change("reward", -1)
    with ledger.occupy_all("training", 0.75):
        now_s = 22.0
    assert ledger.cut() == pytest.approx(
        {
            **{"generation": 20 + 4, "reward": 4, "preparation": 0, "training": 24, "sync": 0},
            **{
                "long_tail": 10,
                "waiting_for_reward": 4,
                "reward_devices": 10,
                "imbalance": 8,
                "barriers": 4,
            },
        }
    )
