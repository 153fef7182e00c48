"""The plan of a save: every element of every tensor is written once, replicas evenly by the ranks that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gcore_ckpt.format.boxes import Box, overlap
from gcore_ckpt.format.dtypes import DTYPES


@dataclass(frozen=True, kw_only=True)
class HeldBox:
    """A box of a global tensor that a rank holds in memory.

    Attributes:
        name: Name of the tensor.
        dtype: Element type, a name in `DTYPES`.
        shape: Shape of the global tensor.
        box: The box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        """Size of the box's data."""
        return self.box.size * DTYPES[self.dtype].size_bytes

    def part(self, box: Box) -> "HeldBox":
        """Return another box of the same tensor."""
        return HeldBox(name=self.name, dtype=self.dtype, shape=self.shape, box=box)


Assignment: TypeAlias = list[int]
"""The boxes that a rank writes, by their numbers in its list, ascending."""


def assign(held: Sequence[Sequence[HeldBox]]) -> list[Assignment]:
    """Distribute the boxes that ranks hold: one writer for each, the same bytes for all as far as that goes.

    Boxes of one holder stay there; then replicas, the largest first, go to the holder that has the least to write.

    Args:
        held: The boxes of each rank.

    Raises:
        ValueError: Ranks disagree on a tensor, or their boxes leave out or overlap some of it.
    """
    holders = _holders(held)
    _check_coverage(holders)
    writes: list[Assignment] = [[] for _ in held]
    load_bytes = [0] * len(held)
    replicated: list[tuple[HeldBox, Mapping[int, int]]] = []
    for box, numbers in holders.items():
        if len(numbers) == 1:
            [(rank, number)] = numbers.items()
            writes[rank].append(number)
            load_bytes[rank] += box.size_bytes
        else:
            replicated.append((box, numbers))
    for box, numbers in sorted(replicated, key=lambda item: -item[0].size_bytes):
        rank = min(numbers, key=lambda rank: (load_bytes[rank], rank))
        writes[rank].append(numbers[rank])
        load_bytes[rank] += box.size_bytes
    return [sorted(numbers) for numbers in writes]


def _holders(held: Sequence[Sequence[HeldBox]]) -> dict[HeldBox, dict[int, int]]:
    """Return each distinct box, with the ranks that hold it and its number in their lists."""
    holders: dict[HeldBox, dict[int, int]] = {}
    for rank, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            holders.setdefault(box, {}).setdefault(rank, number)
    return holders


def _check_coverage(holders: Mapping[HeldBox, Mapping[int, int]]) -> None:
    tensors: dict[str, list[HeldBox]] = {}
    for box in holders:
        tensors.setdefault(box.name, []).append(box)
    for name, boxes in tensors.items():
        first = boxes[0]
        for box in boxes[1:]:
            if (box.dtype, box.shape) != (first.dtype, first.shape):
                ranks = min(holders[first]), min(holders[box])
                raise ValueError(
                    f"tensor {name!r} has dtype {first.dtype} and shape {first.shape} on rank {ranks[0]}, "
                    f"dtype {box.dtype} and shape {box.shape} on rank {ranks[1]}; parts of one tensor are a DTensor or "
                    "a Shard, and what each rank has of its own is wrapped in PerRank"
                )
        shared = overlap([box.box for box in boxes])
        if shared is not None:
            raise ValueError(f"tensor {name!r}: the boxes {shared[0]} and {shared[1]} overlap without being the same")
        whole = Box.whole(first.shape)
        found = sum(box.box.size for box in boxes)
        if found != whole.size:
            raise ValueError(
                f"tensor {name!r} of shape {first.shape} is held in part: its boxes have {found} of its "
                f"{whole.size} elements"
            )
