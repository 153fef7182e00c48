"""The choice of the replica with the least load."""

from heapq import heapify, heappop, heappush


class LeastLoaded:
    """Loads of replicas, all 0 at first; among equal ones the first by index is chosen."""

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        # The heap holds each replica's present load, and past ones, which are skipped.
        self._heap = [(0, replica) for replica in range(num_replicas)]

    def take(self, amount: int) -> tuple[int, int]:
        """Add ``amount`` to the replica with the least load; return the replica and its new load."""
        load, replica = self._heap[0]
        while load != self._loads[replica]:
            heappop(self._heap)
            load, replica = self._heap[0]
        return replica, self.add(replica, amount)

    def add(self, replica: int, amount: int) -> int:
        """Change the load of a replica; return its new load."""
        self._loads[replica] += amount
        heappush(self._heap, (self._loads[replica], replica))
        if len(self._heap) > 8 * len(self._loads) + 64:
            self._heap = [(load, i) for i, load in enumerate(self._loads)]
            heapify(self._heap)
        return self._loads[replica]
