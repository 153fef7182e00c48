"""Waves of prompts of which idle controllers take from the slices of loaded ones.

G-Core (arXiv 2507.22789) leaves every controller its own slice, whose work the law of large numbers makes even. Where
responses have heavy tails, or those of a prompt are alike, it does not: then the slowest slice is the step.
"""

from typing import Generic

from gcore_controller.collectives.base import Collectives
from gcore_controller.prompts import PromptLoader, RowT, first_ticket

_COUNTER = "prompts"


class SharedPrompts(Generic[RowT]):
    """One controller's end of waves of prompts: it takes from its own slice, and then one by one from those of others.

    Which prompts a wave has does not depend on who takes them. Every controller opens the same waves, and meets the
    others between two of them.
    """

    def __init__(self, loader: PromptLoader[RowT], group: Collectives) -> None:
        self._loader = loader
        self._group = group
        # A slice's prompts are numbered from the first wave on, which starts at this ticket.
        self._base: int | None = None
        self._num_earlier = 0
        self._own: list[tuple[int, RowT]] = []
        self._others: list[int] = []

    def open(self, count: int) -> None:
        """Open the next wave, of ``count`` prompts in all slices together."""
        self._num_earlier += len(self._own)
        if self._base is None:
            self._base = self._loader.cursor
        self._own = self._loader.take(count)
        rank, size = self._group.rank, self._group.world_size
        self._others = [(rank + distance) % size for distance in range(1, size)]

    async def take(self, count: int) -> list[tuple[int, RowT]]:
        """The next prompts with their tickets, at most ``count``; none: the wave has been taken.

        Those of others come by a call of their own, so that whoever is early can be busy with its own first.
        """
        taken = [self._own[place - self._num_earlier] for place in await self._places(self._group.rank, count)]
        if taken:
            return taken
        while len(taken) < count and self._others:
            victim = self._others.pop(0)
            for place in await self._places(victim, 1):
                ticket = self._first_ticket(victim) + place * self._group.world_size
                taken.append((ticket, self._loader.row(ticket)))
                self._others.append(victim)
        return taken

    async def _places(self, owner: int, count: int) -> range:
        """Take numbers of a slice's prompts that no controller has taken, up to the end of this wave."""
        limit = len(range(self._first_ticket(owner), self._loader.cursor, self._group.world_size))
        return await self._group.take_tickets(count, counter=_COUNTER, at=owner, limit=limit)

    def _first_ticket(self, owner: int) -> int:
        """Return the ticket of a slice's first prompt in the first wave."""
        assert self._base is not None
        return first_ticket(self._base, rank=owner, world_size=self._group.world_size)
