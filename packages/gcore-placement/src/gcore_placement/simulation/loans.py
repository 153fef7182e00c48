"""Loans within a simulated wave: engines of the policy that are done become judges while judgements wait."""

from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from gcore_placement.costs import JobCosts
from gcore_placement.partition.lending import LendingRule
from gcore_placement.quantities import Floats
from gcore_placement.simulation.continuous_batching import EngineRun, Requests, run_replicas

_POLLS_PER_LOAN = 8
_POLLS_PER_WAVE = 64
"""Observations of the rule in the time that a loan takes, or, where that is rarer, in the time of generation."""


@dataclass(frozen=True, kw_only=True)
class EngineLoan:
    """Devices that leave the policy within a wave, and judge from some time on."""

    num_devices: int
    start_s: float
    arrive_s: float


def replicas_done_s(run: EngineRun, num_replicas: int) -> Floats:
    """Return the seconds at which each replica is done: [num_replicas]."""
    done_R = np.zeros(num_replicas)
    np.maximum.at(done_R, run.requests.replica, run.finish)
    return done_R


def _count_until(moment_s: float, times_s: Floats) -> int:
    return int(np.count_nonzero(times_s <= moment_s))


def judge_with_loans(
    costs: JobCosts, replicas: tuple[int, ...], generated: EngineRun, judged: EngineRun
) -> tuple[EngineRun, list[EngineLoan]]:
    """Simulate the judging of a wave where `LendingRule` lends engines of the policy that are done; one of them stays.

    As a loan arrives, the judgements that have not started are divided over all judges again. Loans of judges to the
    policy, and of engines whose last sequences others could continue, are not simulated.

    Args:
        replicas: the policy's and the judge's.
        generated: the run of the policy's.
        judged: that of the judge's without loans.

    Returns:
        The run of the judge's replicas, lent ones last, and the loans.
    """
    assert costs.reward is not None
    num_engines, num_judges = replicas
    per_engine = costs.policy.devices_per_replica
    per_judge = costs.reward.devices_per_replica
    unit = lcm(per_engine, per_judge)
    engines_per_unit = unit // per_engine
    max_units = (num_engines - 1) // engines_per_unit
    done_s = replicas_done_s(generated, num_engines)
    loan_s = costs.swap.sleep_s + costs.swap.load_s
    rule = LendingRule(2, loan_s)
    rule.lent(loan_s)
    interval_s = max(loan_s / _POLLS_PER_LOAN, float(done_s.max()) / _POLLS_PER_WAVE)
    arrival = judged.requests.arrival
    run = judged
    loans: list[EngineLoan] = []
    now_s = float(done_s.min())
    while now_s < run.start.max():
        lent = sum(loan.num_devices for loan in loans) // unit
        arrived = sum(loan.num_devices for loan in loans if loan.arrive_s <= now_s) // unit
        num_idle = _count_until(now_s, done_s) // engines_per_unit
        num_waiting = _count_until(now_s, arrival) - _count_until(now_s, run.start)
        loan = rule.observe(
            now_s,
            idle=(max(0, min(max_units, num_idle) - lent), 0),
            waiting=(0, num_waiting),
            finished=(0, _count_until(now_s, run.finish)),
            serving=(1, max(1, num_judges * per_judge // unit + arrived)),
            arriving=(0, lent - arrived),
        )
        if loan is not None:
            arrive_s = now_s + loan_s
            num_old = num_judges + lent * unit // per_judge
            num_new = loan.num_devices * unit // per_judge
            requests = _add_judges(run, arrive_s, num_old, num_new, costs.reward.max_num_seqs)
            run = run_replicas(costs.reward, num_old + num_new, requests)
            # Judgements that wait do so since their responses are there.
            run = replace(run, requests=replace(requests, arrival=arrival))
            loans.append(
                EngineLoan(num_devices=loan.num_devices * unit, start_s=now_s, arrive_s=arrive_s)
            )
        now_s += interval_s
    return run, loans


def _add_judges(
    run: EngineRun, arrive_s: float, num_old: int, num_new: int, max_num_seqs: int
) -> Requests:
    """Return the requests of a run on `num_new` more replicas from `arrive_s` on.

    Those that have started stay. New replicas get equal parts of what waits, as much as they run at once; all replicas
    get the others in turn.
    """
    requests = run.requests
    arrival = requests.arrival.copy()
    replica = requests.replica.copy()
    has_started = run.start < arrive_s
    arrival[has_started] = run.start[has_started]
    later = np.flatnonzero(~has_started)
    later = later[np.argsort(arrival[later], kind="stable")]
    num_waiting = _count_until(arrive_s, arrival[later])
    num_first = min(num_waiting, num_new * max_num_seqs)
    arrival[later] = np.maximum(arrival[later], arrive_s)
    replica[later[:num_first]] = num_old + np.arange(num_first) % num_new
    replica[later[num_first:]] = np.arange(len(later) - num_first) % (num_old + num_new)
    return replace(requests, arrival=arrival, replica=replica)
