"""Resumable prompt loading: every prompt once an epoch, in an order fixed by the seed, sliced by controller.

In G-Core (arXiv 2507.22789) every controller keeps its own slice, and the law of large numbers makes the work even. It
does not where response lengths have heavy tails or depend on the prompt: then the slowest slice determines the time of
the step. `SharedPrompts` lets idle controllers take prompts from the slices of busy ones.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils import data
from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import StageTimer
from gcore_controller.errors import StateError

RowT = TypeVar("RowT")


class ShardedSampler(data.Sampler[int]):
    """Yields one controller's rows in an endless, shuffled order: every ``world_size``-th prompt index.

    Prompt index i stands for entry ``i mod num_rows`` of a permutation of the rows that is drawn for epoch
    ``i // num_rows``. It belongs to controller ``i mod world_size``.
    """

    def __init__(self, num_rows: int, *, seed: int, rank: int, world_size: int, start: int = 0) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; expected at least 1")
        self._num_rows = num_rows
        self._seed = seed
        self._first = first_index(start, rank=rank, world_size=world_size)
        self._world_size = world_size
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def row(self, prompt_index: int) -> int:
        """Return the number of the row that a prompt index stands for."""
        epoch, entry = divmod(prompt_index, self._num_rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._order[entry])

    def __iter__(self) -> Iterator[int]:
        return map(self.row, itertools.count(self._first, self._world_size))


def first_index(start: int, *, rank: int, world_size: int) -> int:
    """Return the first prompt index from ``start`` on that belongs to a controller."""
    return start + (rank - start) % world_size


class PromptLoader(Generic[RowT]):
    """Loads one controller's slice of a data set, prefetched by torchdata and resumed from one number.

    Args:
        rows: the data set; indexing may be slow (it happens in ``num_workers`` threads, in order).
        seed: of the shuffle.
        timer: times the waits for rows as its stage ``data``.
    """

    def __init__(
        self,
        rows: Sequence[RowT],
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        timer: StageTimer | None = None,
    ) -> None:
        self.cursor = 0
        """The first prompt index of the next `take` over all controllers."""
        self._rows = rows
        self._seed = seed
        self._sampler = partial(ShardedSampler, len(rows), seed=seed, rank=rank, world_size=world_size)
        self._order = self._sampler()
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._stage = nullcontext if timer is None else partial(timer.stage, "data")
        self._iterator = self._open()

    def _open(self) -> Iterator[RowT]:
        node: Any = SamplerWrapper(self._sampler(start=self.cursor))
        node = ParallelMapper(node, self._rows.__getitem__, num_workers=self._num_workers, in_order=True)
        return iter(Loader(node))

    def take(self, count: int) -> list[tuple[int, RowT]]:
        """Advance by ``count`` rows over all controllers, and return this controller's, each with its prompt index.

        All controllers together get exactly ``count`` rows, whatever their number: a controller gets none if there are
        fewer rows than controllers. A prompt index is a position in the global order.
        """
        first = first_index(self.cursor, rank=self._rank, world_size=self._world_size)
        self.cursor += count
        with self._stage():
            return [(index, next(self._iterator)) for index in range(first, self.cursor, self._world_size)]

    def row(self, prompt_index: int) -> RowT:
        """Return the row that a prompt index stands for."""
        with self._stage():
            return self._rows[self._order.row(prompt_index)]

    @property
    def epoch(self) -> float:
        """Passes over the data set so far, of all controllers together."""
        return self.cursor / len(self._rows)

    def state(self) -> dict[str, int]:
        """Return the position in the global order, the same on every controller after the same calls of `take`."""
        return {"cursor": self.cursor, "num_rows": len(self._rows), "seed": self._seed}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken, with any number of controllers.

        Raises:
            StateError: it was taken on a data set of another size, or another shuffle.
        """
        for field, own in (("num_rows", len(self._rows)), ("seed", self._seed)):
            if state[field] != own:
                raise StateError(
                    f"{field} of the saved position is {state[field]}; expected {own}, as this data set has"
                )
        self.cursor = state["cursor"]
        self._iterator = self._open()


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
        return await self._group.take_tickets(count, counter="prompts", at=owner, limit=limit)

    def _first_index(self, owner: int) -> int:
        """Return the prompt index of a slice's first prompt in the first wave."""
        assert self._base is not None
        return first_index(self._base, rank=owner, world_size=self._group.world_size)
