"""Random replicas and requests for tests of continuous batching, and their run."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gcore_placement import EngineCosts, ReplicaRequest
from gcore_placement.quantities import Floats, Ints
from gcore_placement.simulation.role_run import RoleRun


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests to several replicas, in order of arrival."""

    replica: Ints
    arrival: Floats
    """Seconds."""
    prefill: Floats
    """Tokens to compute before the first is decoded."""
    context: Floats
    length: Floats


def run_replicas(costs: EngineCosts, num_replicas: int, requests: Requests) -> RoleRun:
    """Run all requests to their end."""
    run = RoleRun(costs, num_replicas, requests.arrival.tolist())
    for index, replica in enumerate(requests.replica.tolist()):
        request = ReplicaRequest(
            index=index,
            prefill_s=float(requests.prefill[index]) * costs.prefill_per_token_s,
            context=float(requests.context[index]),
            length=float(requests.length[index]),
        )
        run.assign(replica, [request])
    run.run()
    return run


@st.composite
def cases(draw: st.DrawFn) -> tuple[EngineCosts, int, Requests]:
    number = draw(st.integers(1, 30))
    num_replicas = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    costs = EngineCosts(
        devices_per_replica=1,
        max_num_seqs=draw(st.integers(1, 8)),
        decode_base_s=draw(st.sampled_from([0.0, 0.01])),
        decode_per_sequence_s=draw(st.sampled_from([0.001, 0.02])),
        decode_per_context_token_s=draw(st.sampled_from([0.0, 1e-4])),
        prefill_per_token_s=draw(st.sampled_from([0.0, 1e-3])),
    )
    spread = draw(st.sampled_from([0.0, 0.5, 50.0]))
    longest = draw(st.sampled_from([3, 200]))
    # Sequences may end together where all arrive together; elsewhere rounding would decide whether they do.
    lengths = (
        rng.uniform(1, longest, number)
        if spread
        else rng.integers(1, longest, number).astype(np.float64)
    )
    return (
        costs,
        num_replicas,
        Requests(
            replica=rng.integers(0, num_replicas, number),
            arrival=np.sort(spread * rng.random(number)),
            prefill=rng.integers(0, 100, number).astype(np.float64),
            context=rng.integers(0, 100, number).astype(np.float64),
            length=lengths,
        ),
    )
