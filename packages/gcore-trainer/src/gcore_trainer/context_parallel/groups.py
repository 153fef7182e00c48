"""The process groups of context parallelism, and the places of a packed row that each rank of a group holds.

Ranks are ring-major: rank = ring_rank * ulysses_size + ulysses_rank. With R ring ranks every segment is cut in 2R equal
chunks, and ring rank r holds chunks r and 2R - 1 - r of each: an early chunk sees few tokens and a late one many, so
causal work is even (zig-zag; Llama 3, arXiv:2407.21783, section 3.3.2; compare striped attention, arXiv:2311.09431).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.packing.pack import PackedBatch


class PaddingMultiples(NamedTuple):
    """Arguments of `pack` for a row that can be divided; `share_prefix` must be off if segments are padded."""

    multiple_of: int
    segment_multiple_of: int


class EqualSegments(NamedTuple):
    """Segments of one length, whose chunks lie side by side in a ring rank's shard."""

    start: int
    """Place of the first segment's part in the shard."""
    num_segments: int
    chunk_length: int
    """Each segment has two chunks here."""


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """This rank's place in its context-parallel group, which divides one packed row.

    Attributes:
        ulysses: The ranks that exchange tokens for heads; None: this rank alone.
        ring: The ranks that pass keys and values on; None: this rank alone.
    """

    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else self.ulysses.size()

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses is None else self.ulysses.rank()

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else self.ring.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else self.ring.rank()

    @property
    def size(self) -> int:
        """Ranks that divide the row."""
        return self.ring_size * self.ulysses_size

    @property
    def rank(self) -> int:
        """Among them, ring-major."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank

    @property
    def padding(self) -> PaddingMultiples:
        """Multiples that `pack` must pad rows and segments to."""
        return padding_multiples(ring_size=self.ring_size, ulysses_size=self.ulysses_size)

    def places(self, batch: PackedBatch) -> NDArray[np.int64]:
        """Return `local_places` of the row on this rank."""
        return local_places(
            batch.segment_lengths, ring_size=self.ring_size, ulysses_size=self.ulysses_size, rank=self.rank
        )


def make_context_parallel(cp_groups: list[list[int]], ulysses_size: int) -> ContextParallel:
    """Make the process groups of all context-parallel groups; every rank of the world calls it with the same arguments.

    Args:
        cp_groups: world ranks of each context-parallel group, ascending, ring-major: consecutive `ulysses_size` ranks
            exchange heads. Each rank of the world is in one of them.
        ulysses_size: ranks that exchange tokens for heads; the others of a group make the ring.

    Returns:
        This rank's own.

    Raises:
        ConfigError: the groups do not hold every rank once, are not ascending, or do not divide by `ulysses_size`.
    """
    world_size = dist.get_world_size()
    if sorted(rank for ranks in cp_groups for rank in ranks) != list(range(world_size)):
        raise ConfigError(f"cp_groups is {cp_groups}; expected each of the {world_size} ranks once")
    for ranks in cp_groups:
        # torch orders a group's ranks by their number, whatever order was given.
        if ranks != sorted(ranks):
            raise ConfigError(f"cp_groups has {ranks}; expected ascending ranks")
        if ulysses_size < 1 or len(ranks) % ulysses_size:
            raise ConfigError(
                f"ulysses_size is {ulysses_size}; expected a divisor of {len(ranks)}, the ranks of {ranks}"
            )
    ulysses = [ranks[i : i + ulysses_size] for ranks in cp_groups for i in range(0, len(ranks), ulysses_size)]
    ring = [ranks[i::ulysses_size] for ranks in cp_groups for i in range(ulysses_size)]
    return ContextParallel(ulysses=_own_group(ulysses), ring=_own_group(ring))


def _own_group(all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
    own: dist.ProcessGroup | None = None
    for ranks in all_ranks:
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own = group
    return own


def padding_multiples(*, ring_size: int, ulysses_size: int) -> PaddingMultiples:
    """Return the multiples that the lengths of the row and of its segments must be of."""
    if ring_size == 1:
        return PaddingMultiples(ulysses_size, 1)
    return PaddingMultiples(math.lcm(2 * ring_size, ring_size * ulysses_size), 2 * ring_size)


def local_places(
    segment_lengths: NDArray[np.int64], *, ring_size: int, ulysses_size: int, rank: int
) -> NDArray[np.int64]:
    """Return the places [T / (ring_size * ulysses_size)] of the row that a rank holds, in its order.

    A ring shard has segments of equal length side by side, shorter ones first; its Ulysses ranks hold equal contiguous
    slices of it.

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
    return np.split(shard, ulysses_size)[ulysses_rank]


def equal_segments(segment_lengths: NDArray[np.int64], *, ring_size: int) -> list[EqualSegments]:
    """Return the segments of every ring rank's shard, in order."""
    result: list[EqualSegments] = []
    start = 0
    for length, count in zip(*np.unique(segment_lengths, return_counts=True), strict=True):
        result.append(EqualSegments(start, int(count), int(length) // (2 * ring_size)))
        start += int(length * count) // ring_size
    return result


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
