"""Resumable prompt loading: every prompt once an epoch, in an order fixed by the seed, sliced by controller."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Sampler
from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

from gcore_controller.errors import StateError
from gcore_controller.stages import StageTimer

RowT = TypeVar("RowT")


class ShardedSampler(Sampler[int]):
    """An endless, shuffled walk over tickets 0, 1, 2, ... of which one controller yields every ``world_size``-th.

    Ticket t is entry ``t mod num_rows`` of a permutation of the rows that is drawn for epoch ``t // num_rows``. It
    belongs to controller ``t mod world_size``.
    """

    def __init__(self, num_rows: int, *, seed: int, rank: int, world_size: int, start: int = 0) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}: a data set needs at least one row")
        self._num_rows = num_rows
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._start = start
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def row(self, ticket: int) -> int:
        """The row that a ticket stands for."""
        epoch, entry = divmod(ticket, self._num_rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._order[entry])

    def __iter__(self) -> Iterator[int]:
        ticket = first_ticket(self._start, rank=self._rank, world_size=self._world_size)
        while True:
            yield self.row(ticket)
            ticket += self._world_size


def first_ticket(start: int, *, rank: int, world_size: int) -> int:
    """Return the first ticket from ``start`` on that belongs to a controller."""
    return start + (rank - start) % world_size


class PromptLoader(Generic[RowT]):
    """One controller's slice of a data set, prefetched by torchdata, resumed from one number.

    Args:
        rows: the data set; indexing may be slow (it happens in ``num_workers`` threads, in order).
        seed: of the shuffle.
        timer: what waits for rows is its stage ``data``.
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
        self._rows = rows
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._stage = nullcontext if timer is None else partial(timer.stage, "data")
        self._cursor = 0
        self._iterator = self._open()

    def _open(self) -> Iterator[RowT]:
        sampler = ShardedSampler(
            len(self._rows), seed=self._seed, rank=self._rank, world_size=self._world_size, start=self._cursor
        )
        node: Any = SamplerWrapper(sampler)
        node = ParallelMapper(node, self._rows.__getitem__, num_workers=self._num_workers, in_order=True)
        return iter(Loader(node))

    def take(self, count: int) -> list[tuple[int, RowT]]:
        """Advance by ``count`` rows, and return those of them that are this controller's, each with its ticket.

        All controllers together get exactly ``count`` rows, whatever their number: a controller gets none if there are
        fewer rows than controllers. A ticket is a row's place in the global order.
        """
        first = first_ticket(self._cursor, rank=self._rank, world_size=self._world_size)
        self._cursor += count
        with self._stage():
            return [(ticket, next(self._iterator)) for ticket in range(first, self._cursor, self._world_size)]

    def row(self, ticket: int) -> RowT:
        """The row that a ticket stands for."""
        sampler = ShardedSampler(len(self._rows), seed=self._seed, rank=self._rank, world_size=self._world_size)
        with self._stage():
            return self._rows[sampler.row(ticket)]

    @property
    def cursor(self) -> int:
        """The first ticket of the next `take` of all controllers."""
        return self._cursor

    @property
    def epoch(self) -> float:
        """How often the data set has been drawn so far, by all controllers together."""
        return self._cursor / len(self._rows)

    def state(self) -> dict[str, int]:
        """Position in the global order: the same on every controller after the same calls of `take`."""
        return {"cursor": self._cursor, "num_rows": len(self._rows), "seed": self._seed}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken, with any number of controllers.

        Raises:
            StateError: it was taken on a data set of another size, or another shuffle.
        """
        for field, own in (("num_rows", len(self._rows)), ("seed", self._seed)):
            if state[field] != own:
                raise StateError(f"the saved position has {field}={state[field]}: this data set has {field}={own}")
        self._cursor = state["cursor"]
        self._iterator = self._open()
