"""The running sequences of many replicas, and the one on each that ends next."""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 16
"""Slots whose soonest end is kept, so that a change looks at few: about the root of the most that are common."""


class RunningSequences:
    """Slots of all replicas, mutable. Those in use are the first of each replica's; methods take a replica once.

    Args:
        num_replicas: rows.
        num_slots: most sequences that run on a replica.
    """

    def __init__(self, num_replicas: int, num_slots: int) -> None:
        num_blocks = -(-num_slots // _BLOCK)
        self.num_running = np.zeros(num_replicas, dtype=np.intp)
        """[num_replicas]"""
        self.first_end = np.full(num_replicas, np.inf)
        """[num_replicas], when the next sequence ends, in the replica's decoding steps; infinite where none runs."""
        self._first_slot = np.zeros(num_replicas, dtype=np.intp)
        self._end = np.full((num_replicas, num_blocks, _BLOCK), np.inf)
        self._item = np.zeros((num_replicas, num_blocks, _BLOCK), dtype=np.int32)
        self._block_end = np.full((num_replicas, num_blocks), np.inf)

    def add(self, replicas: NDArray[np.intp], items: NDArray[np.intp], ends: NDArray[np.float64]) -> None:
        """Add a sequence to each of the replicas."""
        slot = self.num_running[replicas]
        block, place = slot // _BLOCK, slot % _BLOCK
        self._end[replicas, block, place] = ends
        self._item[replicas, block, place] = items
        self._block_end[replicas, block] = np.minimum(self._block_end[replicas, block], ends)
        self.num_running[replicas] = slot + 1
        is_first = ends < self.first_end[replicas]
        self.first_end[replicas[is_first]] = ends[is_first]
        self._first_slot[replicas[is_first]] = slot[is_first]

    def remove_first(self, replicas: NDArray[np.intp]) -> NDArray[np.intp]:
        """Remove the sequence that ends next on each of the replicas; return their items."""
        block, place = np.divmod(self._first_slot[replicas], _BLOCK)
        item = self._item[replicas, block, place].astype(np.intp)
        last = self.num_running[replicas] - 1
        last_block, last_place = np.divmod(last, _BLOCK)
        # The last running sequence takes the free slot.
        self._end[replicas, block, place] = self._end[replicas, last_block, last_place]
        self._item[replicas, block, place] = self._item[replicas, last_block, last_place]
        self._end[replicas, last_block, last_place] = np.inf
        self._block_end[replicas, block] = self._end[replicas, block].min(axis=1)
        self._block_end[replicas, last_block] = self._end[replicas, last_block].min(axis=1)
        self.num_running[replicas] = last

        used = self._block_end[replicas, : int(last.max()) // _BLOCK + 1]
        first_block = used.argmin(axis=1)
        first_place = self._end[replicas, first_block].argmin(axis=1)
        self._first_slot[replicas] = first_block * _BLOCK + first_place
        self.first_end[replicas] = used[np.arange(len(replicas)), first_block]
        return item
