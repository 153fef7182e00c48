"""Permutations of the rows of a data set; those of large ones take no memory."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = 2**64 - 1


class FeistelPermutation:
    """A permutation of ``range(num_rows)`` that is computed entry by entry, in constant memory.

    A balanced Feistel network of six rounds, with the finalizer of SplitMix64 as its round function, permutes the
    numbers of the next even number of bits; numbers beyond ``num_rows`` are permuted again until they are within it
    (cycle walking; J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3), less
    than four times on average.
    """

    def __init__(self, num_rows: int, *, seed: int, epoch: int = 0) -> None:
        self._num_rows = num_rows
        self._half = max((num_rows - 1).bit_length() + 1, 2) // 2
        seeds = np.random.SeedSequence([seed, epoch])
        self._keys: list[int] = seeds.generate_state(_ROUNDS, np.uint64).tolist()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, entry: int) -> int:
        if not 0 <= entry < self._num_rows:
            raise IndexError(f"entry is {entry}; expected 0 to {self._num_rows - 1}")
        entry = self._permute(entry)
        while entry >= self._num_rows:
            entry = self._permute(entry)
        return entry

    def _permute(self, entry: int) -> int:
        low = (1 << self._half) - 1
        high_bits = entry >> self._half
        low_bits = entry & low
        for key in self._keys:
            mixed_bits = high_bits ^ (_mix(low_bits ^ key) & low)
            high_bits = low_bits
            low_bits = mixed_bits
        return high_bits << self._half | low_bits


def _mix(value: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@lru_cache(maxsize=16)
def permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64] | FeistelPermutation:
    """Return the order of the rows in an epoch; of more than 2**20 rows it is computed entry by entry."""
    if num_rows > 2**20:
        return FeistelPermutation(num_rows, seed=seed, epoch=epoch)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
