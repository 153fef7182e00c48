"""Loans within a simulated wave: engines of the policy that are done become judges while judgements wait."""

from dataclasses import dataclass
from math import lcm

from gcore_placement.costs import JobCosts
from gcore_placement.partition.lending import LendingRule
from gcore_placement.simulation.role_run import RoleRun

_POLLS_PER_LOAN = 8
_POLLS_PER_WAVE = 64
"""Observations of the rule in the time that a loan takes, or, where that is rarer, in the time of generation."""


@dataclass(frozen=True, kw_only=True)
class EngineLoan:
    """Devices that leave the policy within a wave, and judge from some time on."""

    num_devices: int
    start_s: float
    arrive_s: float


def judge_with_loans(costs: JobCosts, generated: RoleRun, judged: RoleRun) -> list[EngineLoan]:
    """Serve a wave's judgements where `LendingRule` lends engines of the policy that are done; one of them stays.

    As a loan arrives, the judgements that have not started are divided over all judges again. Loans of judges to the
    policy, and of engines whose last sequences others could continue, are not simulated.

    Args:
        generated: the run of the policy's replicas, which are done.
        judged: the judge's replicas, to which all judgements are assigned; lent ones are added to them.
    """
    per_engine = generated.costs.devices_per_replica
    per_judge = judged.costs.devices_per_replica
    unit = lcm(per_engine, per_judge)
    engines_per_unit = unit // per_engine
    judges_per_unit = unit // per_judge
    num_judges = judged.num_replicas
    max_units = (generated.num_replicas - 1) // engines_per_unit
    done_s = generated.done_s()
    loan_s = costs.swap.sleep_s + costs.swap.load_s
    rule = LendingRule(2, loan_s)
    rule.lent(loan_s)
    interval_s = max(loan_s / _POLLS_PER_LOAN, max(done_s) / _POLLS_PER_WAVE)
    loans: list[EngineLoan] = []
    num_arrived = 0
    now_s = min(done_s)
    while True:
        while num_arrived < len(loans) and loans[num_arrived].arrive_s <= now_s:
            loan = loans[num_arrived]
            _add_judges(judged, loan.num_devices // per_judge, loan.arrive_s)
            num_arrived += 1
        judged.run(now_s)
        if not judged.has_unstarted:
            judged.run()
            return loans
        lent = sum(loan.num_devices for loan in loans) // unit
        arrived = (judged.num_replicas - num_judges) // judges_per_unit
        num_idle = sum(done <= now_s for done in done_s) // engines_per_unit
        offer = rule.observe(
            now_s,
            idle=(max(0, min(max_units, num_idle) - lent), 0),
            waiting=(0, judged.num_waiting),
            finished=(0, judged.num_finished),
            serving=(1, max(1, num_judges * per_judge // unit + arrived)),
            arriving=(0, lent - arrived),
        )
        if offer is not None:
            loan = EngineLoan(
                num_devices=offer.num_devices * unit, start_s=now_s, arrive_s=now_s + loan_s
            )
            loans.append(loan)
        now_s += interval_s


def _add_judges(judged: RoleRun, num_new: int, arrive_s: float) -> None:
    """Add judges, and divide the judgements that have not started over all of them again.

    New judges get equal parts of what waits, as much as they run at once; all judges get the others in turn.
    """
    judged.run(arrive_s)
    num_waiting = judged.num_waiting
    num_old = judged.num_replicas
    unstarted = judged.take_unstarted(arrive_s)
    judged.add_replicas(num_new)
    if num_waiting:
        judged.queued_until_s = max(judged.queued_until_s, arrive_s)
    num_first = min(num_waiting, num_new * judged.costs.max_num_seqs)
    for number in range(num_new):
        judged.assign(num_old + number, unstarted[number:num_first:num_new])
    for number in range(judged.num_replicas):
        judged.assign(number, unstarted[num_first + number :: judged.num_replicas])
