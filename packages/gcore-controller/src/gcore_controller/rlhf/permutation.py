"""Permutations of the rows of a data set; those of large ones take no memory."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = 2**64 - 1
_LARGE = 2**20
"""Number of rows above which entries are computed one by one."""


def shuffle_entry(entry: int, num_rows: int, *, seed: int, epoch: int) -> int:
    """Return the row at an entry of the order of ``num_rows`` rows in an epoch."""
    if num_rows > _LARGE:
        return permute_entry(entry, num_rows, seed=seed, epoch=epoch)
    return int(_draw_order(num_rows, seed, epoch)[entry])


@lru_cache(maxsize=16)
def _draw_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def permute_entry(entry: int, num_rows: int, *, seed: int, epoch: int) -> int:
    """Return an entry of a permutation of ``range(num_rows)``, in constant memory.

    A balanced Feistel network of six rounds, with the finalizer of SplitMix64 as its round function, permutes the
    numbers of the next even number of bits; numbers beyond ``num_rows`` are permuted again until they are within it
    (cycle walking; J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3), less
    than four times on average.
    """
    num_half_bits = max((num_rows - 1).bit_length() + 1, 2) // 2
    keys = _draw_keys(seed, epoch)
    entry = _permute(entry, num_half_bits, keys)
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
