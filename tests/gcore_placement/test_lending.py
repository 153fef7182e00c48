"""Loans within a step: what they may cost on any course of events, and when they pay."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from gcore_placement import LendingRule, PlacementError
from gcore_placement.partition.lending import Loan

STEP_S = 0.05
counts = st.tuples(*[st.integers(0, 4)] * 3)


@settings(max_examples=200)
@given(
    events=st.lists(st.tuples(counts, counts, counts, st.floats(0, 5)), max_size=200),
    lending_s=st.floats(0.01, 10),
    first_s=st.floats(0, 10),
)
def test_loans_take_no_longer_than_devices_idled(
    events: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float]],
    lending_s: float,
    first_s: float,
) -> None:
    rule = LendingRule(3, first_s)
    now_s, idled_s, taken_s = 0.0, 0.0, 0.0
    finished = [0, 0, 0]
    for idle, waiting, more, wait_s in events:
        now_s += wait_s
        idled_s += wait_s * sum(idle)
        finished = [before + new for before, new in zip(finished, more, strict=True)]
        before_s = rule.lending_s
        serving = [count + 1 for count in idle]
        loan = rule.observe(now_s, idle=idle, waiting=waiting, finished=finished, serving=serving)
        if loan is not None:
            giver, taker, num_devices = loan
            assert giver != taker
            assert 0 < num_devices <= idle[giver], "the lent devices were idle"
            assert num_devices <= waiting[taker], "each has something to do"
            taken_s += before_s * num_devices
            rule.lent(lending_s)
        assert taken_s <= idled_s * (1 + 1e-9) + 1e-9


@dataclass
class Queues:
    """Devices of roles with a queue each; a sample takes ``sample_s`` of a device of its role."""

    sample_s: tuple[float, ...]
    serving: list[int]
    waiting: list[float]
    rule: LendingRule | None
    lending_s: float = 1.0
    now_s: float = 0.0
    loans: list[int] = field(default_factory=list[int])

    def run(self) -> float:
        """Work until both queues are empty; return the seconds. A device on its way does no work."""
        first, finished = list(self.waiting), [0] * len(self.serving)
        on_its_way: list[tuple[float, Loan]] = []
        while any(count > 0 for count in self.waiting):
            self.now_s += STEP_S
            for role in range(len(self.serving)):
                self.waiting[role] -= self.serving[role] * STEP_S / self.sample_s[role]
                finished[role] = int(first[role] - max(0.0, self.waiting[role]))
            for arrives_s, loan in on_its_way:
                if arrives_s <= self.now_s:
                    assert self.rule is not None
                    self.rule.lent(self.lending_s)
                    self.serving[loan.taker] += loan.num_devices
            on_its_way = [(at_s, loan) for at_s, loan in on_its_way if at_s > self.now_s]
            if self.rule is None:
                continue
            loan = self.rule.observe(
                self.now_s,
                idle=[
                    n - 1 if w <= 0 else 0 for n, w in zip(self.serving, self.waiting, strict=True)
                ],
                waiting=[max(0, int(w)) for w in self.waiting],
                finished=finished,
                serving=self.serving,
                arriving=[
                    sum(o.num_devices for _, o in on_its_way if o.taker == r)
                    for r in range(len(first))
                ],
            )
            if loan is not None:
                self.loans += [loan.giver] * loan.num_devices
                self.serving[loan.giver] -= loan.num_devices
                on_its_way.append((self.now_s + self.lending_s, loan))
        return self.now_s


def test_idle_devices_shorten_a_long_queue() -> None:
    alone_s = Queues((1.0, 1.0), [1, 7], [100, 0], None).run()
    helped = Queues((1.0, 1.0), [1, 7], [100, 0], LendingRule(2, 1.0))
    # All seven but one that stays, one after the other: 100 = 1 + 2 + ... + 6 + 7 t - 21, and rents before them.
    assert helped.run() < 0.25 * alone_s
    assert helped.loans == [1] * 6


def test_many_idle_devices_are_lent_at_a_time() -> None:
    """A hundred judges with a queue of 100 s each get most of 900 idle devices about two loans after these idle."""
    rule = LendingRule(2, 5.0)
    rule.lent(5.0)
    queues = Queues((1.0, 1.0), [100, 900], [10_000, 0], rule, lending_s=5.0)
    # A rent and a loan, and a tenth of the rest.
    assert queues.run() < 5 + 5 + 9 + 3
    assert len(queues.loans) > 700


def test_devices_return_when_the_load_turns() -> None:
    rule = LendingRule(2, 1.0)
    queues = Queues((1.0, 1.0), [1, 7], [100, 0], rule)
    queues.run()
    queues.waiting, queues.loans = [0, 100], []
    queues.run()
    assert queues.loans
    assert set(queues.loans) == {0}


@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_loan_for_a_queue_that_is_done_before_it_pays(count: int) -> None:
    rule = LendingRule(2, 1.0)
    queues = Queues((0.25, 0.25), [4, 4], [100, 0], rule)
    queues.run()
    queues.waiting, queues.serving, queues.loans = [count, 0], [1, 7], []
    queues.run()
    assert queues.loans == []


def test_the_first_loan_may_cost_less_than_it_seems() -> None:
    """A queue of 9 s is worth a try where a loan may take 10 s, and one of 4 s is not; the try says 1 s."""
    for seconds, loans in ((9, [1, 1]), (4, [])):
        queues = Queues((0.1, 1.0), [1, 20], [10 * seconds, 0], LendingRule(2, 10.0))
        queues.run()
        assert queues.loans[:2] == loans


def test_slower_samples_than_ever_before_show_in_time() -> None:
    """The known rate says that the queue is soon done; that nothing is finished says that it is not."""
    rule = LendingRule(2, 1.0)
    queues = Queues((0.05, 1.0), [1, 3], [100, 0], rule)
    queues.run()
    slow = Queues((20.0, 1.0), [1, 3], [10, 0], rule, now_s=queues.now_s)
    assert slow.run() < 0.5 * 200
    assert slow.loans == [1, 1]


@pytest.mark.parametrize("lending_s", [-1.0, float("nan")])
def test_seconds_are_amounts(lending_s: float) -> None:
    with pytest.raises(PlacementError, match=r"lending_s is .*; expected"):
        LendingRule(2, lending_s)
    with pytest.raises(PlacementError, match=r"seconds is .*; expected"):
        LendingRule(2).lent(lending_s)


def test_a_device_goes_where_it_saves_most() -> None:
    """Of two queues the longer one gets the first loans, and both are helped in the end."""
    queues = Queues((1.0, 1.0, 1.0), [1, 1, 6], [40, 100, 0], LendingRule(3, 1.0))
    assert queues.run() < 0.4 * 100
    assert set(queues.loans[:5]) == {2}
