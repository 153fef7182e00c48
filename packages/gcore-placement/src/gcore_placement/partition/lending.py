"""Decisions within a step: an idle device of one role works for another one, which has more to do than it can."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_placement.quantities import check_amounts, check_positive


@dataclass(eq=False)
class _Queue:
    """The queue of a role, since it last was empty."""

    since_s: float | None = None
    """None: it is empty."""
    finished_before: int = 0
    device_rate: float = float("inf")
    """Samples that a device last finished in a second while others waited."""

    def observe(self, now_s: float, waiting: int, finished: int, serving: int) -> None:
        if not waiting:
            self.since_s = None
        elif self.since_s is None:
            self.since_s, self.finished_before = now_s, finished
        elif finished > self.finished_before and now_s > self.since_s:
            self.device_rate = (finished - self.finished_before) / (now_s - self.since_s) / serving

    def saved_s(self, now_s: float, waiting: int, finished: int, serving: int) -> float:
        """Return the seconds until it is empty that another device would save."""
        assert self.since_s is not None
        # As long as no sample is finished, the rate is at most that of one now.
        most = 1 / (now_s - self.since_s) if finished == self.finished_before and now_s > self.since_s else float("inf")
        return waiting / min(self.device_rate * serving, most) / (serving + 1)


class LendingRule:
    """Decides when an idle device of one role is lent to another, by rent or buy.

    A device that idles while samples of other roles wait pays rent: the time that it idles. Once the idle devices of a
    role have paid as much as a loan takes, one of them is lent to the role whose queue it shortens most, if that is not
    done before the loan pays: another device saves ``remaining / (devices + 1)`` seconds of a queue, at the rate at
    which the role's devices have last finished samples. So all loans, each as long as the one before it, take no longer
    than devices have idled while others had a queue, whatever the load does, and nothing need be known of the work
    ahead: it is the argument of ski rental (Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching",
    Algorithmica 3, 1988).

    Roles are numbered from 0. Deterministic, given the times of its calls.

    Args:
        num_roles: at least 2.
        lending_s: seconds that a loan may take, such as those of a first start, which often takes longer: the first
            loan, which measures it, need only pay a quarter of it.
    """

    def __init__(self, num_roles: int, lending_s: float = 0.0) -> None:
        check_positive("num_roles", num_roles)
        check_amounts("lending_s", lending_s)
        self.lending_s = lending_s
        self._is_measured = False
        self._rent_s = [0.0] * num_roles
        self._paid_at_s: list[float | None] = [None] * num_roles
        """When each role last idled while another had a queue; None: it did not at the last observation."""
        self._queues = [_Queue() for _ in range(num_roles)]

    def observe(
        self,
        now_s: float,
        *,
        idle: Sequence[int],
        waiting: Sequence[int],
        finished: Sequence[int],
        serving: Sequence[int],
    ) -> tuple[int, int] | None:
        """Observe all roles; return the one that lends a device now and the one that gets it, or None.

        Args:
            now_s: never falls.
            idle: devices of each role that have nothing to do and that it can spare.
            waiting: samples that wait until a device has a place for them.
            finished: samples that each role has finished so far.
            serving: devices that work for each role, at least 1.
        """
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
            saved_s, taker = max(
                (self._queues[role].saved_s(now_s, waiting[role], finished[role], serving[role]), role)
                for role in takers
            )
            least_s = self.lending_s if self._is_measured else self.lending_s / 4
            if self._rent_s[giver] >= self.lending_s and saved_s > least_s:
                self._rent_s[giver] -= self.lending_s
                return giver, taker
        return None

    def lent(self, seconds: float) -> None:
        """Take in how long a loan took, during which nothing was observed."""
        check_amounts("seconds", seconds)
        self.lending_s, self._is_measured = seconds, True
        self._paid_at_s = [None] * len(self._queues)
