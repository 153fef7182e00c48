"""Boxes: the parts of a global tensor that ranks hold, files store and loads ask for."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first index and its extent in each dimension. A scalar is the box of no dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(start + extent for start, extent in zip(self.start, self.shape, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies in a tensor of this shape."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            start >= 0 and extent >= 0 and start + extent <= whole
            for start, extent, whole in zip(self.start, self.shape, shape, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """Return what both boxes hold; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        shape = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start, shape) if all(extent > 0 for extent in shape) else None

    def relative_to(self, outer: "Box") -> "Box":
        """Return the same box, counted from the first index of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box in an array of the whole."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def flat_span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the first element and one past the last in a row-major tensor of `shape`; the box is not empty."""
        first = last = 0
        for start, extent, whole in zip(self.start, self.shape, shape, strict=True):
            first = first * whole + start
            last = last * whole + start + extent - 1
        return first, last + 1

    def is_flat_in(self, shape: Sequence[int]) -> bool:
        """Return whether its elements follow each other without gaps in a row-major tensor of `shape`."""
        first, last = self.flat_span(shape)
        return last - first == self.size

    def split(self, max_size: int) -> Iterator["Box"]:
        """Yield parts of at most `max_size` elements (but at least one), cut across the outermost dimensions."""
        if self.size <= max(1, max_size):
            yield self
            return
        dim = next(dim for dim, extent in enumerate(self.shape) if extent > 1)
        rows = max(1, max_size // (self.size // self.shape[dim]))
        for first in range(0, self.shape[dim], rows):
            extent = min(rows, self.shape[dim] - first)
            start = (*self.start[:dim], self.start[dim] + first, *self.start[dim + 1 :])
            yield from Box(start, (*self.shape[:dim], extent, *self.shape[dim + 1 :])).split(max_size)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.start, self.stop, strict=True))}]"


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of one tensor that share an element, or None. Sorting keeps a grid of boxes cheap."""
    ordered = sorted((box for box in boxes if box.size), key=lambda box: box.start)
    open_boxes: list[Box] = []
    for box in ordered:
        open_boxes = [other for other in open_boxes if not other.stop or other.stop[0] > box.start[0]]
        for other in open_boxes:
            if box.intersect(other) is not None:
                return other, box
        open_boxes.append(box)
    return None
