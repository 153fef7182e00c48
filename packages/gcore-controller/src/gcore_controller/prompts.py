"""Resumable prompt loading: every prompt once an epoch, in an order fixed by the seed, sliced by controller."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils import data
from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

from gcore_controller.errors import StateError
from gcore_controller.stages import StageTimer

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
        self._rank = rank
        self._world_size = world_size
        self._start = start
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
        index = first_index(self._start, rank=self._rank, world_size=self._world_size)
        while True:
            yield self.row(index)
            index += self._world_size


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
        """Advance by ``count`` rows over all controllers, and return this controller's, each with its prompt index.

        All controllers together get exactly ``count`` rows, whatever their number: a controller gets none if there are
        fewer rows than controllers. A prompt index is a position in the global order.
        """
        first = first_index(self._cursor, rank=self._rank, world_size=self._world_size)
        self._cursor += count
        with self._stage():
            return [(index, next(self._iterator)) for index in range(first, self._cursor, self._world_size)]

    def row(self, prompt_index: int) -> RowT:
        """Return the row that a prompt index stands for."""
        sampler = ShardedSampler(len(self._rows), seed=self._seed, rank=self._rank, world_size=self._world_size)
        with self._stage():
            return self._rows[sampler.row(prompt_index)]

    @property
    def cursor(self) -> int:
        """The first prompt index of the next `take` over all controllers."""
        return self._cursor

    @property
    def epoch(self) -> float:
        """Passes over the data set so far, of all controllers together."""
        return self._cursor / len(self._rows)

    def state(self) -> dict[str, int]:
        """Return the position in the global order, the same on every controller after the same calls of `take`."""
        return {"cursor": self._cursor, "num_rows": len(self._rows), "seed": self._seed}

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
        self._cursor = state["cursor"]
        self._iterator = self._open()
