"""Waves of prompts of which idle controllers take from the slices of loaded ones.

G-Core (arXiv 2507.22789) leaves every controller its own slice, whose work the law of large numbers makes even. Where
responses have heavy tails, or those of a prompt are alike, it does not: then the slowest slice is the step.
"""

from typing import Generic

from gcore_controller.collectives import Collectives
from gcore_controller.prompts import PromptLoader, RowT

_COUNTER = "prompts"


class SharedPrompts(Generic[RowT]):
    """One controller's end of waves of prompts: it takes from its own slice, and then one by one from those of others.

    Which prompts a wave has does not depend on who takes them. Every controller opens the same waves, and meets the
    others between two of them.
    """

    def __init__(self, loader: PromptLoader[RowT], group: Collectives) -> None:
        self._loader = loader
        self._group = group
        # A slice's prompts are numbered from the first wave on; those of the present one are below `_stop`.
        self._start = self._stop = 0
        self._own: list[tuple[int, RowT]] = []
        self._first_ticket = 0
        self._others: list[int] = []

    def open(self, count: int) -> None:
        """The next wave, of ``count`` prompts in each slice."""
        self._first_ticket = self._loader.cursor
        self._own = self._loader.take(count)
        self._start, self._stop = self._stop, self._stop + count
        rank, size = self._group.rank, self._group.world_size
        self._others = [(rank + distance) % size for distance in range(1, size)]

    async def take(self, count: int) -> list[tuple[int, RowT]]:
        """The next prompts with their tickets, at most ``count``; none: the wave has been taken.

        Those of others come by a call of their own, so that whoever is early can be busy with its own first.
        """
        size = self._group.world_size
        taken = [self._own[place] for place in await self._places(self._group.rank, count)]
        if taken:
            return taken
        while len(taken) < count and self._others:
            victim = self._others.pop(0)
            for place in await self._places(victim, 1):
                ticket = self._first_ticket + place * size + victim
                taken.append((ticket, self._loader.row(ticket)))
                self._others.append(victim)
        return taken

    async def _places(self, owner: int, count: int) -> range:
        """Places in a slice of this wave that nobody had taken."""
        taken = await self._group.take_tickets(count, counter=_COUNTER, at=owner, limit=self._stop)
        return range(taken.start - self._start, taken.stop - self._start)
