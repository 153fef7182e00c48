"""Prompts in a resumable order, which controllers share."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import StageTimer
from gcore_controller.errors import ControllerError
from gcore_controller.rlhf.curriculum import Curriculum

RowT = TypeVar("RowT")

_ROUNDS = 6
_MASK = 2**64 - 1
_LARGE = 2**20
"""Number of rows above which positions are looked up one by one, without the whole order in memory."""


def shuffle_index(index: int, num_rows: int, *, seed: int) -> int:
    """Return the row that an index stands for: ``num_rows`` rows are shuffled again in each epoch."""
    epoch, position = divmod(index, num_rows)
    if num_rows > _LARGE:
        return permute_entry(position, num_rows, seed=seed, epoch=epoch)
    return int(_draw_order(num_rows, seed, epoch)[position])


@lru_cache(maxsize=16)
def _draw_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def permute_entry(position: int, num_rows: int, *, seed: int, epoch: int) -> int:
    """Return the number at a position of a permutation of ``range(num_rows)``, in constant memory.

    A balanced Feistel network of six rounds, with the finalizer of SplitMix64 as its round function, permutes the
    numbers of the next even number of bits; numbers beyond ``num_rows`` are permuted again until they are within it
    (cycle walking; J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3), less
    than four times on average.
    """
    num_half_bits = max((num_rows - 1).bit_length() + 1, 2) // 2
    keys = _draw_keys(seed, epoch)
    entry = _permute(position, num_half_bits, keys)
    while entry >= num_rows:
        entry = _permute(entry, num_half_bits, keys)
    return entry


@lru_cache(maxsize=16)
def _draw_keys(seed: int, epoch: int) -> list[int]:
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64).tolist()


def _permute(entry: int, num_half_bits: int, keys: list[int]) -> int:
    low = (1 << num_half_bits) - 1
    high_bits = entry >> num_half_bits
    low_bits = entry & low
    for key in keys:
        mixed_bits = high_bits ^ (_mix(low_bits ^ key) & low)
        high_bits = low_bits
        low_bits = mixed_bits
    return high_bits << num_half_bits | low_bits


def _mix(value: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _first_index(start: int, rank: int, world_size: int) -> int:
    """Return the first prompt index from ``start`` on that belongs to a controller."""
    return start + (rank - start) % world_size


@dataclass(eq=False)
class PromptLoader(Generic[RowT]):
    """Loads one controller's slice of a data set, prefetched by torchdata and resumed from one cursor.

    The order is endless and shuffled: prompt index i stands for entry ``i mod num_rows`` of a permutation of the rows
    that is drawn for epoch ``i // num_rows``. It belongs to controller ``i mod world_size``.

    ``rows`` are the data set; indexing may be slow (it happens in ``num_workers`` threads, in order). ``seed`` is that
    of the shuffle; data sets with a method ``locate``, such as a `Mixture`, have an order of their own. The ``timer``
    times the waits for rows as its stage ``data``. A ``curriculum`` passes over some prompt indices; then those that
    are left belong to the controllers in turn, and no row is prefetched.

    Example:
        >>> loader = PromptLoader(["a", "b", "c", "d"], seed=0, rank=0, world_size=2)
        >>> [index for index, row in loader.take(4)]  # the others are those of rank 1
        [0, 2]
        >>> alone = PromptLoader(["a", "b", "c", "d"], seed=0)
        >>> alone.load_state(loader.state())  # resumes with one controller
        >>> [index for index, row in alone.take(2)], alone.epoch
        ([4, 5], 1.5)
    """

    rows: Sequence[RowT]
    _: KW_ONLY
    seed: int
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    timer: StageTimer = field(default_factory=StageTimer)
    curriculum: Curriculum | None = None
    cursor: int = field(default=0, init=False)
    """The first prompt index that was never taken by any controller."""
    returned: list[int] = field(default_factory=list[int], init=False)
    """Prompt indices that `give_back` returned, the next ones of `take`; the same on every controller."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}; expected 0 or more")
        if len(self.rows) < 1:
            raise ValueError(f"num_rows is {len(self.rows)}; expected at least 1")
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank}; expected a rank from 0 to {self.world_size - 1}"
            )
        self._open()

    def _open(self) -> None:
        if self.curriculum is not None:
            return
        first = _first_index(self.cursor, self.rank, self.world_size)
        indices: Any = IterableWrapper(itertools.count(first, self.world_size))
        node: Any = ParallelMapper(indices, self._read, num_workers=self.num_workers, in_order=True)
        self._iterator: Iterator[RowT] = iter(Loader(node))

    def _read(self, prompt_index: int) -> RowT:
        """Return the row that a prompt index stands for."""
        return self.rows[self.locate(prompt_index)]

    def locate(self, prompt_index: int) -> int:
        """Return the number of the row that a prompt index stands for."""
        if prompt_index < 0:
            raise ValueError(f"prompt_index is {prompt_index}; expected 0 or more")
        locate = getattr(self.rows, "locate", None)
        if locate is not None:
            return locate(prompt_index, self.seed)
        return shuffle_index(prompt_index, len(self.rows), seed=self.seed)

    def take(self, count: int) -> list[tuple[int, RowT]]:
        """Take ``count`` rows over all controllers, and return this controller's, each with its prompt index.

        All controllers together get exactly ``count`` rows, whatever their number: a controller gets none if there are
        fewer rows than controllers.
        """
        if count < 0:
            raise ValueError(f"count is {count}; expected 0 or more")
        returned = self.returned[:count]
        del self.returned[:count]
        own_indices = returned[self.rank :: self.world_size]
        prompts = [(index, self.row(index)) for index in own_indices]
        return prompts + self._take_new(count - len(returned))

    def give_back(self, indices: Iterable[int]) -> None:
        """Have prompts taken again, before any other; every controller must return the same."""
        self.returned = sorted([*self.returned, *indices])

    def _take_new(self, count: int) -> list[tuple[int, RowT]]:
        if self.curriculum is not None:
            return self._take_chosen(self.curriculum, count)
        first = _first_index(self.cursor, self.rank, self.world_size)
        self.cursor += count
        with self.timer.stage("data"):
            return [
                (index, next(self._iterator))
                for index in range(first, self.cursor, self.world_size)
            ]

    def _take_chosen(self, curriculum: Curriculum, count: int) -> list[tuple[int, RowT]]:
        indices: list[int] = []
        while len(indices) < count:
            if curriculum.takes(self.cursor, self.locate(self.cursor)):
                indices.append(self.cursor)
            self.cursor += 1
        return [(index, self.row(index)) for index in indices[self.rank :: self.world_size]]

    def row(self, prompt_index: int) -> RowT:
        """Return the row that a prompt index stands for."""
        with self.timer.stage("data"):
            return self._read(prompt_index)

    @property
    def epoch(self) -> float:
        """Passes over the data set so far."""
        return (self.cursor - len(self.returned)) / len(self.rows)

    def state(self) -> dict[str, Any]:
        """Return the position in the global order, the same on every controller after the same calls of `take`."""
        return {
            "cursor": self.cursor,
            "num_rows": len(self.rows),
            "seed": self.seed,
            "returned": list(self.returned),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with any number of controllers.

        Raises:
            ControllerError: it was taken on a data set of another size, or another shuffle.
        """
        for name in ("num_rows", "seed"):
            expected = self.state()[name]
            if state[name] != expected:
                raise ControllerError(
                    f"{name} of the saved position is {state[name]}; expected {expected}"
                )
        if state["cursor"] < 0:
            raise ControllerError(
                f"cursor of the saved position is {state['cursor']}; expected 0 or more"
            )
        self.cursor = state["cursor"]
        self.returned = list(state.get("returned", []))
        self._open()


class SharedPrompts(Generic[RowT]):
    """Work stealing: a controller takes the prompts of its own slice of a wave, and then one by one those of others.

    A wave is the prompts that all controllers sample together before they look whether the batch is complete. Where
    response lengths have heavy tails or depend on the prompt, the slowest slice would determine the time of the step.
    The prompts of a wave do not depend on which controllers take them. Every controller opens the same waves; `open` is
    a collective.
    """

    def __init__(self, loader: PromptLoader[RowT], group: Collectives) -> None:
        self._loader = loader
        self._group = group
        self._own: list[tuple[int, RowT]] = []
        self._slices: list[list[int]] = [[] for _ in range(group.world_size)]
        """Prompt indices of this wave, by owner."""
        self._num_earlier = [0] * group.world_size
        """Prompts of earlier waves, by owner: the tickets of a slice are numbered from the first wave on."""
        self._others: list[int] = []

    async def open(self, own: list[tuple[int, RowT]]) -> None:
        """Open the next wave, to which each controller brings its slice, in the order in which prompts are taken."""
        for owner, indices in enumerate(self._slices):
            self._num_earlier[owner] += len(indices)
        self._own = own
        self._slices = await self._group.all_gather([index for index, _ in own])
        ranks = range(self._group.world_size)
        self._others = [*ranks[self._group.rank + 1 :], *ranks[: self._group.rank]]

    async def take(self, count: int) -> list[tuple[int, RowT]]:
        """Return at most ``count`` further prompts with their prompt indices; none: the wave is complete.

        A call returns prompts of the own slice or of others, so that a controller can start on its own first.
        """
        prompts = [self._own[position] for position in await self._places(self._group.rank, count)]
        if prompts:
            return prompts
        while len(prompts) < count and self._others:
            other_rank = self._others.pop(0)
            for position in await self._places(other_rank, 1):
                index = self._slices[other_rank][position]
                prompts.append((index, self._loader.row(index)))
                self._others.append(other_rank)
        return prompts

    async def _places(self, owner: int, count: int) -> list[int]:
        """Take places in a slice of this wave, at most those that are left."""
        before = self._num_earlier[owner]
        limit = before + len(self._slices[owner])
        tickets = await self._group.take_tickets(count, counter="prompts", at=owner, limit=limit)
        return [ticket - before for ticket in tickets]
