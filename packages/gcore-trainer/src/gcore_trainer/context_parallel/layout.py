"""The places of a packed row that each rank of a context-parallel group holds.

Ranks are ring-major: rank = ring_rank * ulysses_size + ulysses_rank. With R ring ranks every segment is cut in 2R equal
chunks, and ring rank r holds chunks r and 2R - 1 - r of each: an early chunk sees few tokens and a late one many, so
causal work is even (zig-zag; Llama 3, arXiv:2407.21783, section 3.3.2; compare striped attention, arXiv:2311.09431).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class PaddingMultiples:
    """Arguments of `pack` for a row that can be divided; `share_prefix` must be off if segments are padded."""

    multiple_of: int
    segment_multiple_of: int


@dataclass(frozen=True, kw_only=True)
class EqualSegments:
    """Segments of one length, whose chunks lie side by side in a ring rank's shard."""

    start: int
    """Place of the first segment's part in the shard."""
    num_segments: int
    chunk_length: int
    """Each segment has two chunks here."""


def padding_multiples(*, ring_size: int, ulysses_size: int) -> PaddingMultiples:
    """Return the multiples that the lengths of the row and of its segments must be of."""
    if ring_size == 1:
        return PaddingMultiples(multiple_of=ulysses_size, segment_multiple_of=1)
    return PaddingMultiples(
        multiple_of=math.lcm(2 * ring_size, ring_size * ulysses_size), segment_multiple_of=2 * ring_size
    )


def local_places(
    segment_lengths: NDArray[np.int64], *, ring_size: int, ulysses_size: int, rank: int
) -> NDArray[np.int64]:
    """Return the places [T / (ring_size * ulysses_size)] of the row that this rank holds, in its order.

    A ring shard has segments of equal length side by side, shorter ones first; its Ulysses ranks hold equal contiguous
    slices of it.

    Args:
        segment_lengths: of the segments that make up the row, in order, as in `PackedBatch`.
        ring_size: ranks that pass keys and values on.
        ulysses_size: ranks that exchange tokens for heads.
        rank: in the context-parallel group.

    Raises:
        BatchError: the row, or a segment, does not divide; `padding_multiples` says what would.
    """
    ring_rank, ulysses_rank = divmod(rank, ulysses_size)
    shard = _ring_shard(segment_lengths, ring_size=ring_size, ring_rank=ring_rank)
    if shard.size % ulysses_size:
        raise BatchError(
            f"a row of {segment_lengths.sum()} tokens cannot be divided among ring_size={ring_size} x "
            f"ulysses_size={ulysses_size} ranks; expected a multiple of their number"
        )
    length = shard.size // ulysses_size
    return shard[ulysses_rank * length : (ulysses_rank + 1) * length]


def equal_segments(segment_lengths: NDArray[np.int64], *, ring_size: int) -> list[EqualSegments]:
    """Return the segments of every ring rank's shard, in order."""
    result: list[EqualSegments] = []
    start = 0
    for length, count in zip(*np.unique(segment_lengths, return_counts=True), strict=True):
        result.append(EqualSegments(start=start, num_segments=int(count), chunk_length=int(length) // (2 * ring_size)))
        start += int(length * count) // ring_size
    return result


def local_predictions(
    predict_index: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The share of `PackedBatch.predict_index` that a rank computes.

    Args:
        predict_index: [U] places of the row whose next-token distribution is needed.
        places: [T / cp] places that the rank holds.

    Returns:
        Of the u distributions whose places it holds: where they stand among its own tokens [u], and among the U [u].
    """
    _, local_index, which = np.intersect1d(places, predict_index, assume_unique=True, return_indices=True)
    return local_index, which


def _ring_shard(segment_lengths: NDArray[np.int64], *, ring_size: int, ring_rank: int) -> NDArray[np.int64]:
    if ring_size == 1:
        return np.arange(segment_lengths.sum())
    if (segment_lengths % (2 * ring_size)).any():
        length = segment_lengths[segment_lengths % (2 * ring_size) != 0][0]
        raise BatchError(
            f"a segment of {length} tokens cannot be cut in {2 * ring_size} chunks for ring_size={ring_size}; expected "
            f"a multiple of {2 * ring_size}"
        )
    order = np.argsort(segment_lengths, kind="stable")
    starts = (np.cumsum(segment_lengths) - segment_lengths)[order]
    chunk_lengths = segment_lengths[order] // (2 * ring_size)
    chunk_starts = np.stack([starts + i * chunk_lengths for i in (ring_rank, 2 * ring_size - 1 - ring_rank)], axis=1)
    lengths = np.repeat(chunk_lengths, 2)
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(chunk_starts.ravel() - (ends - lengths), lengths)
