"""Several data sets as one, each with its share of the rows in training if it has a weight."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar, overload

import numpy as np

from gcore_controller.rlhf.prompts import shuffle_index

RowT = TypeVar("RowT")

_CYCLE = 1000
"""Rows over which a mixture has its weights exactly, to a thousandth."""


class Mixture(Sequence[RowT]):
    """Several data sets as one: their rows one after the other, which are read when they are indexed.

    Its order in training is that of `locate`. Without weights all rows are shuffled together. With weights, of every
    thousand prompt indices, each part has as many as its weight says, shuffled, and takes them from epochs of its own.
    So small parts are repeated sooner than large ones, and the position in all of them is one number.

    Raises:
        ValueError: the weights are not one positive number for each part, or one is below a thousandth of their sum.

    Example:
        >>> mixture = Mixture([["a", "b"], ["c", "d", "e"]], weights=[3, 1])
        >>> len(mixture), mixture[3], mixture[1:3], mixture.first_row(1)
        (5, 'd', ['b', 'c'], 2)
        >>> drawn = [mixture[mixture.locate(index, 0)] for index in range(1000)]
        >>> sum(row in "ab" for row in drawn), sum(row in "cde" for row in drawn)
        (750, 250)
    """

    def __init__(
        self, parts: Sequence[Sequence[RowT]], weights: Sequence[float] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(map(len, self.parts)))
        self.counts: tuple[int, ...] | None = None
        """Prompt indices of each part in a thousand; None: without weights."""
        if weights is not None:
            self.counts = self._count_shares(weights)

    def _count_shares(self, weights: Sequence[float]) -> tuple[int, ...]:
        if len(weights) != len(self.parts) or min(weights, default=0.0) <= 0:
            raise ValueError(
                f"weights are {list(weights)}; expected {len(self.parts)} numbers above 0"
            )
        shares = np.array(weights) / sum(weights) * _CYCLE
        counts = np.floor(shares).astype(int)
        # The largest remainders get what is left.
        counts[np.argsort(counts - shares, kind="stable")[: _CYCLE - counts.sum()]] += 1
        if counts.min() < 1:
            raise ValueError(
                f"weights are {list(weights)}; expected each to be at least a thousandth of their sum"
            )
        return tuple(counts.tolist())

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> RowT: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowT]: ...
    def __getitem__(self, index: int | slice) -> RowT | list[RowT]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        part = bisect_right(self._ends, index)
        return self.parts[part][index - self.first_row(part)]

    def first_row(self, part: int) -> int:
        """Return the number of the first row of a part."""
        return self._ends[part - 1] if part else 0

    def locate(self, prompt_index: int, seed: int) -> int:
        """Return the row of a prompt index, as a function of the seed and the index alone."""
        if self.counts is None:
            return shuffle_index(prompt_index, len(self), seed=seed)
        cycle, position = divmod(prompt_index, _CYCLE)
        parts, numbers = _make_cycle(self.counts, seed, cycle)
        part = parts[position]
        size = len(self.parts[part])
        index = cycle * self.counts[part] + numbers[position]
        # Parts of one size would otherwise have one order.
        seed += part * 2**32
        return self.first_row(part) + shuffle_index(index, size, seed=seed)


@lru_cache(maxsize=4)
def _make_cycle(counts: tuple[int, ...], seed: int, cycle: int) -> tuple[list[int], list[int]]:
    """Return the part of each place of a cycle, and how many places before it have the same part."""
    parts = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng([seed, cycle, _CYCLE]).shuffle(parts)
    numbers = np.empty_like(parts)
    for part, count in enumerate(counts):
        numbers[parts == part] = np.arange(count)
    return parts.tolist(), numbers.tolist()
