"""Decisions within a step: idle devices of one role work for another role, which has a queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gcore_placement.quantities import check_amounts, check_positive


@dataclass(eq=False)
class _Queue:
    """The queue of a role, since it was last empty."""

    since_s: float | None = None
    """None: it is empty."""
    finished_before: int = 0
    device_rate: float = float("inf")
    """Samples that a device last finished in a second while others waited."""

    def observe(self, now_s: float, waiting: int, finished: int, serving: int) -> None:
        if not waiting:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s
            self.finished_before = finished
        elif finished > self.finished_before and now_s > self.since_s:
            self.device_rate = (finished - self.finished_before) / (now_s - self.since_s) / serving

    def rest_s(
        self, now_s: float, waiting: int, finished: int, serving: int, arriving: int
    ) -> float:
        """Return the seconds until the queue is empty, with the serving devices and those on their way."""
        assert self.since_s is not None
        rate = self.device_rate * serving
        if finished == self.finished_before and now_s > self.since_s:
            # As long as no sample is finished, the rate is at most that of one now.
            rate = min(rate, 1 / (now_s - self.since_s))
        return waiting / rate * serving / (serving + arriving)


class Loan(NamedTuple):
    """Devices of one role that work for another one from now on. Roles are numbered from 0.

    Example:
        >>> num_devices = [4, 4]
        >>> loan = Loan(giver=0, taker=1, num_devices=2)
        >>> num_devices[loan.giver] -= loan.num_devices
        >>> num_devices[loan.taker] += loan.num_devices
        >>> num_devices
        [2, 6]
    """

    giver: int
    taker: int
    num_devices: int


class LendingRule:
    """Decides when idle devices of one role are lent to another, by rent or buy.

    A device that idles while samples of other roles wait pays rent: the time that it idles. Once the idle devices of a
    role have paid as much as a loan takes, one of them is lent to the role whose queue that shortens most, if it pays;
    of many idle devices several are lent at a time, as many as have paid, also while others are on their way. With k
    more devices than the n that serve a role, its queue of ``rest`` seconds is done ``(rest - loan) k / (n + k)``
    seconds earlier, and that must be more than a loan takes: the devices have to return. So all loans, each as long as
    the one before it, take no longer than devices have idled while others had a queue, whatever the load does, and
    nothing need be known of the work ahead: it is the argument of ski rental (Karlin, Manasse, Rudolph and Sleator,
    "Competitive snoopy caching", Algorithmica 3, 1988).

    Roles are numbered from 0. Deterministic, given the times of its calls.

    Args:
        num_roles: at least 2.
        lending_s: seconds that a loan may take, such as those of a first start, which often takes longer: the first
            loan, which measures it, is of one device and need only pay a quarter of it.

    Example:
        >>> rule = LendingRule(num_roles=2, lending_s=5.0)
        >>> for now_s in range(0, 20, 2):
        ...     loan = rule.observe(now_s, idle=[2, 0], waiting=[0, 30], finished=[64, now_s], serving=[4, 4])
        ...     if loan is not None:
        ...         break
        >>> now_s, loan
        (4, Loan(giver=0, taker=1, num_devices=1))
    """

    def __init__(self, num_roles: int, lending_s: float = 0.0) -> None:
        check_positive("num_roles", num_roles)
        check_amounts("lending_s", lending_s)
        self.lending_s = lending_s
        self._is_measured = False
        self._rent_s = [0.0] * num_roles
        self._paid_at_s: list[float | None] = [None] * num_roles
        """Time of the last observation at which each role idled while another had a queue; None: not at the last."""
        self._queues = [_Queue() for _ in range(num_roles)]

    def observe(
        self,
        now_s: float,
        *,
        idle: Sequence[int],
        waiting: Sequence[int],
        finished: Sequence[int],
        serving: Sequence[int],
        arriving: Sequence[int] = (),
    ) -> Loan | None:
        """Observe all roles; return which devices are lent now, or None.

        Args:
            now_s: never falls.
            idle: devices of each role that have nothing to do and that it can spare.
            waiting: samples that wait until a device has a place for them.
            finished: samples that each role has finished so far.
            serving: devices that work for each role, at least 1.
            arriving: devices that were lent to each role and are on their way; empty: none.
        """
        arriving = arriving or [0] * len(self._queues)
        for role, queue in enumerate(self._queues):
            queue.observe(now_s, waiting[role], finished[role], serving[role])
        for giver, paid_at_s in enumerate(self._paid_at_s):
            takers = [role for role, count in enumerate(waiting) if count and role != giver]
            if not (idle[giver] and takers):
                self._paid_at_s[giver] = None
                continue
            self._paid_at_s[giver] = now_s
            if paid_at_s is None:
                continue
            self._rent_s[giver] += (now_s - paid_at_s) * idle[giver]
            num_paid = self._num_paid(giver, idle[giver], sum(arriving))
            if not num_paid:
                continue
            least_s = self.lending_s if self._is_measured else self.lending_s / 4
            loans: list[tuple[float, Loan]] = []
            for role in takers:
                rest_s = self._queues[role].rest_s(
                    now_s, waiting[role], finished[role], serving[role], arriving[role]
                )
                count = min(num_paid, waiting[role])
                saved_s = (rest_s - least_s) * count / (serving[role] + arriving[role] + count)
                loans.append((saved_s, Loan(giver, role, count)))
            saved_s, loan = max(loans)
            if saved_s > least_s:
                self._rent_s[giver] -= loan.num_devices * self.lending_s
                return loan
        return None

    def _num_paid(self, giver: int, num_idle: int, num_arriving: int) -> int:
        """Return how many of a role's idle devices have paid their loan."""
        if not self._is_measured:
            return int(self._rent_s[giver] >= self.lending_s and not num_arriving)
        if not self.lending_s:
            return num_idle
        return int(min(num_idle, self._rent_s[giver] // self.lending_s))

    def lent(self, seconds: float) -> None:
        """Observe the seconds that the loan of a device took."""
        check_amounts("seconds", seconds)
        self.lending_s = seconds
        self._is_measured = True
