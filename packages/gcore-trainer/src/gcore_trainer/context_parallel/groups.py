"""The process groups of context parallelism, and a rank's place in them."""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_trainer.context_parallel.layout import PaddingMultiples, local_places, padding_multiples
from gcore_trainer.errors import ConfigError
from gcore_trainer.packing.pack import PackedBatch


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
        """Return the places [T / size] of the row that this rank holds, in its order.

        Raises:
            BatchError: the row does not divide.
        """
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
