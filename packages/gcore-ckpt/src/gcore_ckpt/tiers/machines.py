"""Which ranks share a machine, and whose files a rank keeps a copy of."""

from collections.abc import Sequence


class Machines:
    """The machines of a group, numbered from 0 in the order of their first ranks.

    Args:
        names: The name of each rank's machine.
    """

    def __init__(self, names: Sequence[str]) -> None:
        order = list(dict.fromkeys(names))
        self.of = [order.index(name) for name in names]
        """The machine of each rank."""
        self.ranks = [
            [rank for rank, number in enumerate(self.of) if number == machine]
            for machine in range(len(order))
        ]
        """The ranks of each machine, ascending; the first leads: it alone commits and deletes on the machine."""

    def leader(self, rank: int) -> int:
        """Return the rank that leads a rank's machine."""
        return self.ranks[self.of[rank]][0]

    def holder(self, rank: int, leaders: Sequence[int], number: int) -> int:
        """Return the rank to ask for file `number`, which the leaders' machines have; -1 if the rank's own has it."""
        if self.leader(rank) in leaders:
            return -1
        ranks = self.ranks[self.of[leaders[number % len(leaders)]]]
        return ranks[number % len(ranks)]

    def target(self, rank: int, distance: int) -> int:
        """Return the rank that keeps a copy of a rank's files, `distance` machines after it."""
        position = self.ranks[self.of[rank]].index(rank)
        ranks = self.ranks[(self.of[rank] + distance) % len(self.ranks)]
        return ranks[position % len(ranks)]

    def sources(self, rank: int, distance: int) -> list[int]:
        """Return the ranks that have this rank as their target."""
        machine = (self.of[rank] - distance) % len(self.ranks)
        return [source for source in self.ranks[machine] if self.target(source, distance) == rank]
