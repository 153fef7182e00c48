"""Loans within a simulated wave: engines of the policy that are done become judges while judgements wait."""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import lcm

import numpy as np

from gcore_placement.costs import JobCosts
from gcore_placement.partition.lending import LendingRule
from gcore_placement.quantities import Floats
from gcore_placement.simulation.continuous_batching import EngineRun, Requests
from gcore_placement.simulation.live import ReplicaRequest, SimulatedReplica

_POLLS_PER_LOAN = 8
_POLLS_PER_WAVE = 64
"""Observations of the rule in the time that a loan takes, or, where that is rarer, in the time of generation."""


@dataclass(frozen=True, kw_only=True)
class EngineLoan:
    """Devices that leave the policy within a wave, and judge from some time on."""

    num_devices: int
    start_s: float
    arrive_s: float

    def moving_s(self, until_s: float) -> float:
        """Return the seconds up to `until_s` that the devices are on their way."""
        return max(0.0, min(self.arrive_s, until_s) - self.start_s)

    def lent_s(self, until_s: float) -> float:
        """Return the seconds up to `until_s` that the devices belong to the judge."""
        return max(0.0, until_s - self.arrive_s)


def replicas_done_s(run: EngineRun, num_replicas: int) -> Floats:
    """Return the seconds at which each replica is done: [num_replicas]."""
    done_R = np.zeros(num_replicas)
    np.maximum.at(done_R, run.requests.replica, run.finish)
    return done_R


def judge_with_loans(
    costs: JobCosts, replicas: tuple[int, ...], generated: EngineRun, judged: EngineRun
) -> tuple[EngineRun, list[EngineLoan]]:
    """Simulate the judging of a wave where `LendingRule` lends engines of the policy that are done; one of them stays.

    Once a loan arrives, judgements wait in one queue for a place in any judge. Loans of judges to the policy, and of
    engines whose last sequences others could continue, are not simulated.

    Args:
        replicas: the policy's and the judge's.
        generated: the run of the policy's.
        judged: that of the judge's without loans.

    Returns:
        The run of the judge's replicas, lent ones last, and the loans.
    """
    lender = Lender(costs, replicas, generated)
    arrival = np.sort(judged.requests.arrival)
    start = np.sort(judged.start)
    finish = np.sort(judged.finish)
    while lender.now_s < start[-1]:
        num_arrived = int(np.searchsorted(arrival, lender.now_s, "right"))
        num_started = int(np.searchsorted(start, lender.now_s, "right"))
        num_finished = int(np.searchsorted(finish, lender.now_s, "right"))
        lender.observe(num_arrived - num_started, num_finished)
        if lender.loans:
            judges = Judges(costs, judged.requests, replicas[1])
            return judges.run(Lender(costs, replicas, generated))
    return judged, []


class Lender:
    """The lending rule, its loans, and the time of its next observation."""

    def __init__(self, costs: JobCosts, replicas: tuple[int, ...], generated: EngineRun) -> None:
        assert costs.reward is not None
        num_engines, num_judges = replicas
        per_engine = costs.policy.devices_per_replica
        self._per_judge = costs.reward.devices_per_replica
        self._unit = lcm(per_engine, self._per_judge)
        self._engines_per_unit = self._unit // per_engine
        self._max_lent = (num_engines - 1) // self._engines_per_unit
        self._num_judges = num_judges
        self._done_s = np.sort(replicas_done_s(generated, num_engines))
        self._loan_s = costs.swap.sleep_s + costs.swap.load_s
        self._rule = LendingRule(2, self._loan_s)
        self._rule.lent(self._loan_s)
        self._interval_s = max(
            self._loan_s / _POLLS_PER_LOAN, float(self._done_s[-1]) / _POLLS_PER_WAVE
        )
        self.now_s = float(self._done_s[0])
        self.loans: list[EngineLoan] = []

    def num_judges(self, now_s: float) -> int:
        """Return the number of judges of the partition and of lent ones that have arrived."""
        return self._num_judges + self._num_lent(now_s) * self._unit // self._per_judge

    def observe(self, num_waiting: int, num_finished: int) -> None:
        """Observe the judgements at `now_s`, make the loan of the rule, if any, and advance the time."""
        now_s = self.now_s
        unit = self._unit
        num_lent = self._num_lent(np.inf)
        num_arrived = self._num_lent(now_s)
        num_idle = int(np.searchsorted(self._done_s, now_s, "right")) // self._engines_per_unit
        loan = self._rule.observe(
            now_s,
            idle=(max(0, min(self._max_lent, num_idle) - num_lent), 0),
            waiting=(0, num_waiting),
            finished=(0, num_finished),
            serving=(1, max(1, self.num_judges(now_s) * self._per_judge // unit)),
            arriving=(0, num_lent - num_arrived),
        )
        if loan is not None:
            num_devices = loan.num_devices * unit
            self.loans.append(
                EngineLoan(num_devices=num_devices, start_s=now_s, arrive_s=now_s + self._loan_s)
            )
        self.now_s = now_s + self._interval_s

    def _num_lent(self, now_s: float) -> int:
        """Return the units, of the devices of whole engines and judges, that have arrived until then."""
        return sum(loan.num_devices for loan in self.loans if loan.arrive_s <= now_s) // self._unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Judgement(ReplicaRequest):
    index: int


class Judges:
    """Judges of one wave, advanced from one arrival, end or observation to the next."""

    def __init__(self, costs: JobCosts, requests: Requests, num_judges: int) -> None:
        assert costs.reward is not None
        self._costs = costs.reward
        self._requests = requests
        values = zip(
            requests.length.tolist(),
            requests.prefill.tolist(),
            requests.context.tolist(),
            strict=True,
        )
        self._judgements = [
            _Judgement(
                length=length,
                prefill_s=tokens * self._costs.prefill_per_token_s,
                context=context,
                index=index,
            )
            for index, (length, tokens, context) in enumerate(values)
        ]
        self._start = np.empty(len(self._judgements))
        self._finish = np.empty(len(self._judgements))
        self._num_finished = self._num_waiting = 0
        self._replicas: list[SimulatedReplica[_Judgement]] = []
        self._queues: list[deque[_Judgement]] = []
        """Judgements that wait for each replica; one queue of all once loans have arrived."""
        self._ends: list[tuple[float, int]] = []
        """A heap of the times at which a replica has its next end; some are outdated."""
        self._busy_since: list[float] = []
        self._stretches: list[tuple[int, float, float]] = []
        self._loads: list[tuple[int, int]] = []
        """A heap of replicas by running sequences, once loans have arrived; some are outdated."""
        self._add(num_judges)

    def run(self, lender: Lender) -> tuple[EngineRun, list[EngineLoan]]:
        """Judge all requests while `lender` makes loans; return the run and the loans."""
        order = np.argsort(self._requests.arrival, kind="stable")
        arrivals = deque(zip(self._requests.arrival[order].tolist(), order.tolist(), strict=True))
        while arrivals or self._ends:
            arrival_s = arrivals[0][0] if arrivals else np.inf
            end_s = self._ends[0][0] if self._ends else np.inf
            now_s = min(arrival_s, end_s, lender.now_s)
            if end_s == now_s:
                self._complete(now_s)
            elif arrival_s == now_s:
                self._arrive(arrivals.popleft()[1], now_s)
            else:
                lender.observe(self._num_waiting, self._num_finished)
                count = lender.num_judges(now_s) - len(self._replicas)
                if count > 0:
                    self._join(count, now_s)
        replicas, since, until = (np.array(column) for column in zip(*self._stretches, strict=True))
        run = EngineRun(
            requests=self._requests,
            start=self._start,
            finish=self._finish,
            busy_replica=replicas,
            busy_from=since,
            busy_to=until,
        )
        return run, lender.loans

    def _add(self, count: int) -> None:
        self._replicas += [SimulatedReplica(self._costs) for _ in range(count)]
        self._queues += [deque() for _ in range(count)]
        self._busy_since += [0.0] * count

    def _complete(self, now_s: float) -> None:
        """Complete the sequences that end now on the replica that ends first."""
        _, index = heappop(self._ends)
        replica = self._replicas[index]
        if replica.next_end_s != now_s:
            return  # another sequence has started since
        ended = replica.complete(now_s)
        for judgement in ended:
            self._finish[judgement.index] = now_s
        self._num_finished += len(ended)
        if not replica.num_running:
            self._stretches.append((index, self._busy_since[index], now_s))
        self._fill(index, now_s)

    def _arrive(self, number: int, now_s: float) -> None:
        """Queue a judgement for its replica, or, once there are loans, for the one that runs fewest."""
        index = int(self._requests.replica[number])
        self._queues[index].append(self._judgements[number])
        self._num_waiting += 1
        if self._loads:
            num_running, index = self._loads[0]
            while num_running != self._replicas[index].num_running:
                heappop(self._loads)
                num_running, index = self._loads[0]
        self._fill(index, now_s)

    def _join(self, count: int, now_s: float) -> None:
        """Add `count` replicas; all replicas share one queue, from which each new one takes an equal part."""
        waiting: list[_Judgement] = []
        for queue in {id(queue): queue for queue in self._queues}.values():
            waiting.extend(queue)
        waiting.sort(key=lambda judgement: float(self._requests.arrival[judgement.index]))
        shared = deque(waiting)
        first = len(self._replicas)
        self._add(count)
        self._queues = [shared] * len(self._replicas)
        self._loads = sorted(
            (replica.num_running, index) for index, replica in enumerate(self._replicas)
        )
        for index in range(first, first + count):
            self._fill(index, now_s, at_most=-(-len(shared) // (first + count - index)))
        for index in range(first):
            self._fill(index, now_s)

    def _fill(self, index: int, now_s: float, at_most: float = np.inf) -> None:
        """Start waiting judgements on a replica, and note when its next sequence ends."""
        replica = self._replicas[index]
        queue = self._queues[index]
        count = int(min(self._costs.max_num_seqs - replica.num_running, len(queue), at_most))
        if count and not replica.num_running:
            self._busy_since[index] = now_s
        started = [queue.popleft() for _ in range(count)]
        self._start[[judgement.index for judgement in started]] = now_s
        self._num_waiting -= count
        replica.submit(started, now_s)
        if self._loads:
            heappush(self._loads, (replica.num_running, index))
        end_s = replica.next_end_s
        if end_s is not None:
            heappush(self._ends, (end_s, index))
