"""Waves of prompts in which idle controllers take prompts from the slices of busy ones.

In G-Core (arXiv 2507.22789) every controller keeps its own slice, and the law of large numbers makes the work even. It
does not where response lengths have heavy tails or depend on the prompt: then the slowest slice determines the time of
the step.
"""

from typing import Generic

from gcore_controller.collectives.base import Collectives
from gcore_controller.prompts import PromptLoader, RowT, first_index

_COUNTER = "prompts"


class SharedPrompts(Generic[RowT]):
    """Waves of prompts from which a controller takes its own slice first, and then one by one those of others.

    The prompts of a wave do not depend on which controllers take them. Every controller opens the same waves, and meets
    the others in a collective between two of them.
    """

    def __init__(self, loader: PromptLoader[RowT], group: Collectives) -> None:
        self._loader = loader
        self._group = group
        # The prompts of a slice are numbered from the first wave on, which starts at this prompt index.
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
        """Return at most ``count`` further prompts with their prompt indices; none: the wave is complete.

        A call returns prompts of the own slice or of others, so that a controller can start on its own first.
        """
        taken = [self._own[place - self._num_earlier] for place in await self._places(self._group.rank, count)]
        if taken:
            return taken
        while len(taken) < count and self._others:
            victim = self._others.pop(0)
            for place in await self._places(victim, 1):
                index = self._first_index(victim) + place * self._group.world_size
                taken.append((index, self._loader.row(index)))
                self._others.append(victim)
        return taken

    async def _places(self, owner: int, count: int) -> range:
        """Take the numbers of prompts in a slice that no controller has taken, up to the end of this wave."""
        limit = len(range(self._first_index(owner), self._loader.cursor, self._group.world_size))
        return await self._group.take_tickets(count, counter=_COUNTER, at=owner, limit=limit)

    def _first_index(self, owner: int) -> int:
        """Return the prompt index of a slice's first prompt in the first wave."""
        assert self._base is not None
        return first_index(self._base, rank=owner, world_size=self._group.world_size)
