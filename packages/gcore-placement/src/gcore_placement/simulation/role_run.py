"""The replicas of one role in a simulated wave, and what becomes of the requests that they are given."""

from collections import deque
from collections.abc import Iterable
from math import fsum, inf

from gcore_placement.costs import EngineCosts
from gcore_placement.simulation.live import ReplicaRequest, SimulatedReplica


class RoleRun:
    """The replicas of one role, each of which serves its requests in order of arrival.

    Args:
        arrival_s: seconds at which each request arrives, by its index.
    """

    def __init__(self, costs: EngineCosts, num_replicas: int, arrival_s: list[float]) -> None:
        self.costs = costs
        self.arrival_s = arrival_s
        self.finish_s = [0.0] * len(arrival_s)
        """Seconds at which each request is done, by its index."""
        self.num_finished = 0
        self.busy: list[tuple[int, float, float]] = []
        """Stretches in which a replica runs any request: its number, start and end."""
        self.queued_until_s = 0.0
        """Seconds at which the last request that had to wait starts."""
        self._replicas: list[SimulatedReplica[ReplicaRequest]] = []
        self._inboxes: list[deque[ReplicaRequest]] = []
        """The requests that have yet to arrive at each replica, in order."""
        self._since_s: list[float] = []
        """Seconds since which each busy replica is busy."""
        self._earliest_s = 0.0
        """Seconds before which no request of an inbox arrives."""
        self.add_replicas(num_replicas)

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and not started."""
        return sum(replica.num_waiting for replica in self._replicas)

    @property
    def has_unstarted(self) -> bool:
        """True if any request waits, or has yet to arrive."""
        return any(self._inboxes) or self.num_waiting > 0

    def add_replicas(self, count: int) -> None:
        """Add replicas, numbered after all others."""
        for _ in range(count):
            self._replicas.append(SimulatedReplica(self.costs))
            self._inboxes.append(deque())
            self._since_s.append(0.0)

    def assign(self, replica: int, requests: Iterable[ReplicaRequest]) -> None:
        """Let requests, in order of arrival, arrive at a replica after those that are assigned to it already."""
        self._inboxes[replica].extend(requests)

    def take_unstarted(self, now_s: float) -> list[ReplicaRequest]:
        """Take out all requests that have not started, in order of arrival; none arrives again before now."""
        requests: list[ReplicaRequest] = []
        for replica, inbox in zip(self._replicas, self._inboxes, strict=True):
            requests.extend(replica.withdraw_waiting())
            requests.extend(inbox)
            inbox.clear()
        self._earliest_s = now_s
        return sorted(requests, key=lambda request: (self.arrival_s[request.index], request.index))

    def run(self, until_s: float = inf) -> None:
        """Serve the requests up to a moment."""
        for number in range(len(self._replicas)):
            self._run_replica(number, until_s)

    def _run_replica(self, number: int, until_s: float) -> None:
        replica = self._replicas[number]
        inbox = self._inboxes[number]
        while True:
            end_s = replica.next_end_s
            # A request that arrives just as another ends comes second, and takes its place.
            arrival_s = inf
            if inbox:
                arrival_s = max(self.arrival_s[inbox[0].index], self._earliest_s)
            if arrival_s < (inf if end_s is None else end_s):
                if arrival_s > until_s:
                    return
                if end_s is None:
                    self._since_s[number] = arrival_s
                requests: list[ReplicaRequest] = []
                while inbox and self.arrival_s[inbox[0].index] <= arrival_s:
                    requests.append(inbox.popleft())
                replica.submit(requests, arrival_s)
            elif end_s is None or end_s > until_s:
                return
            else:
                if replica.num_waiting:
                    self.queued_until_s = max(self.queued_until_s, end_s)
                for request in replica.complete(end_s):
                    self.finish_s[request.index] = end_s
                    self.num_finished += 1
                if not replica.num_running:
                    self.busy.append((number, self._since_s[number], end_s))

    def done_s(self) -> list[float]:
        """Return the seconds at which each replica is done with all its requests: [num_replicas]."""
        done_s = [0.0] * len(self._replicas)
        for replica, _, end_s in self.busy:
            done_s[replica] = end_s
        return done_s

    def busy_s(self, until_s: float = inf) -> float:
        """Return the busy seconds of all replicas up to a moment, summed."""
        return fsum(max(0.0, min(end_s, until_s) - start_s) for _, start_s, end_s in self.busy)
