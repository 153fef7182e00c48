"""The payload of a step: samples with image features, and the work that makes and reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from gcore_bench.harness.options import BenchError

Features: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

_MEDIAN_TOKENS, _SIGMA = 500, 0.8


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The samples of a step."""

    num_samples: int
    num_floats: int
    """Number of features of a sample; even, because checksums add eight bytes at a time."""
    seed: int

    @classmethod
    def of(cls, *, nbytes: int, num_samples: int, seed: int) -> "Payload":
        """Return a payload of about ``nbytes``."""
        return cls(num_samples=num_samples, num_floats=max(1, nbytes // num_samples // 8) * 2, seed=seed)

    @property
    def nbytes(self) -> int:
        """Size of all features."""
        return 4 * self.num_samples * self.num_floats

    def parts(self, count: int) -> list[list[int]]:
        """Return the samples of each of ``count`` equal slices."""
        size = self.num_samples // count
        return [list(range(start, start + size)) for start in range(0, self.num_samples, size)]

    def length(self, index: int) -> int:
        """Return the tokens of a sample's response, which are lognormal."""
        return round(_MEDIAN_TOKENS * float(np.exp(_SIGMA * self._rng(index).normal())))

    def reward(self, index: int) -> float:
        """Return the reward of a sample, 0 or 1."""
        return float(self._rng(index).random() < 0.5)

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, index))


class FeatureMaker:
    """Makes the features of a sample, which differ from those of all others."""

    def __init__(self, payload: Payload) -> None:
        self.base: Features = np.linspace(1.0, 2.0, payload.num_floats, dtype=np.float32)

    @staticmethod
    @lru_cache(maxsize=1)
    def of(payload: Payload) -> "FeatureMaker":
        """Return the maker of this process; its first step creates it."""
        return FeatureMaker(payload)

    def fill(self, index: int, out: Features) -> None:
        """Write the features of a sample to ``out``, [num_floats]."""
        np.multiply(self.base, np.float32(1 + index), out=out)


def checksum(features: Features) -> int:
    """Return the sum of all bytes, eight at a time, modulo 2^64."""
    return int(features.view(np.int64).sum())


def check_read(made: Mapping[int, int], read: Mapping[int, int]) -> None:
    """Compare checksums by sample.

    Raises:
        BenchError: the checksum of a sample differs, or a sample is missing.
    """
    wrong = [index for index in made.keys() | read.keys() if made.get(index) != read.get(index)]
    if wrong:
        raise BenchError(f"{len(wrong)} samples, {min(wrong)} among them, were read with other bytes than were made")


def by_index(rows: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return checksums by sample.

    Raises:
        BenchError: a sample was read twice.
    """
    found = dict(rows)
    if len(found) < len(rows):
        raise BenchError(f"{len(rows)} samples were read; only {len(found)} of them are distinct")
    return found
