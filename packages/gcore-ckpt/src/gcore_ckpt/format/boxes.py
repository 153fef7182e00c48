"""Boxes of tensors, that ranks hold, files store and loads ask for: element types, data files, the format's checksum.

The headers of data files are written here rather than by the safetensors library because they are known before the
first byte is copied: memory is staged as it will lie in the file, and a file is one write of it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import xxhash

_quoted = (
    json.encoder.encode_basestring_ascii
)  # what `json.dumps` does to a string, without its overhead

BLOCK_BYTES = 4 << 20
"""Size of the blocks of a shard that have a checksum each, so that a part can be read and checked."""
DIGITS = 16
"""Hex digits of a block's checksum, xxh3 of 64 bits. Those of a shard's blocks stand one after another."""
PREFIX = "xxh3_64:"
SMALL_BYTES = 64 << 10
"""Boxes below this size that are adjacent in a file are copied and read together: each on its own costs more."""
JOINT_BYTES = 1 << 20
"""Largest size of what is copied or read together; it fits into a processor's cache."""

_ALIGNMENT_BYTES = 64
_FILE_BYTES = 256 << 20
_MAX_FILES = 16


class DType(NamedTuple):
    """An element type.

    `safetensors` is its code in a data file's header; None where some safetensors readers know no code and would refuse
    the file: such a tensor is stored as U8 with one more dimension of `size_bytes`.
    """

    size_bytes: int  # of one element, a power of two
    safetensors: str | None
    in_numpy: bool = True


# By torch's name, which is numpy's too wherever both have the type.
DTYPES: Mapping[str, DType] = {
    "bool": DType(1, "BOOL"),
    "uint8": DType(1, "U8"),
    "int8": DType(1, "I8"),
    "uint16": DType(2, "U16"),
    "int16": DType(2, "I16"),
    "uint32": DType(4, "U32"),
    "int32": DType(4, "I32"),
    "uint64": DType(8, "U64"),
    "int64": DType(8, "I64"),
    "float16": DType(2, "F16"),
    "float32": DType(4, "F32"),
    "float64": DType(8, "F64"),
    "complex64": DType(8, None),
    "complex128": DType(16, None),
    "complex32": DType(4, None, in_numpy=False),
    "bfloat16": DType(2, "BF16", in_numpy=False),
    "float8_e4m3fn": DType(1, "F8_E4M3", in_numpy=False),
    "float8_e5m2": DType(1, "F8_E5M2", in_numpy=False),
    "float8_e4m3fnuz": DType(1, None, in_numpy=False),
    "float8_e5m2fnuz": DType(1, None, in_numpy=False),
    "float8_e8m0fnu": DType(1, None, in_numpy=False),
    "float4_e2m1fn_x2": DType(1, None, in_numpy=False),
}
MAX_ITEM_BYTES = max(dtype.size_bytes for dtype in DTYPES.values())
"""Size of the widest elements, of which all other sizes are divisors."""


class Box(NamedTuple):
    """A part of a tensor: its first index and its extent in each dimension. A scalar is the box of no dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Self:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(start + extent for start, extent in zip(self.start, self.shape, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies in a tensor of this shape."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            start >= 0 and extent >= 0 and start + extent <= dim_size
            for start, extent, dim_size in zip(self.start, self.shape, shape, strict=True)
        )

    def intersect(self, box: "Box") -> "Box | None":
        """Return the intersection of both boxes; None if it is empty."""
        start = tuple(map(max, self.start, box.start))
        stop = tuple(map(min, self.stop, box.stop))
        shape = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start, shape) if all(extent > 0 for extent in shape) else None

    def relative_to(self, outer: "Box") -> "Box":
        """Return the same box, counted from the first index of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box in an array of the whole."""
        return tuple(map(slice, self.start, self.stop))

    def flat_span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the first element and one past the last in a row-major tensor of `shape`; the box is not empty."""
        first = last = 0
        for start, extent, dim_size in zip(self.start, self.shape, shape, strict=True):
            first = first * dim_size + start
            last = last * dim_size + start + extent - 1
        return first, last + 1

    def is_flat_in(self, shape: Sequence[int]) -> bool:
        """Return whether its elements follow each other without gaps in a row-major tensor of `shape`."""
        first, last = self.flat_span(shape)
        return last - first == self.size

    def parts_in_span(self, shape: Sequence[int], first: int, last: int) -> Iterator["Box"]:
        """Yield the parts of the box between elements `first` and `last` of a row-major tensor of `shape`."""
        begin, end = self.flat_span(shape)
        if first <= begin and end <= last:
            yield self
        elif begin < last and first < end:
            dim = next(dim for dim, extent in enumerate(self.shape) if extent > 1)
            step = math.prod(shape[dim + 1 :])
            size = end - begin - (self.shape[dim] - 1) * step  # of the span of each row
            rows = range(
                max(0, -((begin + size - 1 - first) // step)),
                min(self.shape[dim], -((begin - last) // step)),
            )
            full_rows = range(
                max(0, -((begin - first) // step)),
                min(self.shape[dim], (last - size - begin) // step + 1),
            )
            for row in rows:
                if row not in full_rows:
                    yield from self._rows(dim, row, row + 1).parts_in_span(shape, first, last)
                elif row == full_rows.start:
                    yield self._rows(dim, full_rows.start, full_rows.stop)

    def _rows(self, dim: int, start: int, stop: int) -> "Box":
        """Return a part of the box, its indices from `start` up to `stop` in one dimension."""
        starts = (*self.start[:dim], self.start[dim] + start, *self.start[dim + 1 :])
        return Box(starts, (*self.shape[:dim], stop - start, *self.shape[dim + 1 :]))

    def split(self, max_size: int) -> Iterator["Box"]:
        """Yield parts of at most `max_size` elements (but at least one), cut across the outermost dimensions."""
        if self.size <= max(1, max_size):
            yield self
            return
        dim = next(dim for dim, extent in enumerate(self.shape) if extent > 1)
        rows = max(1, max_size // (self.size // self.shape[dim]))
        for first in range(0, self.shape[dim], rows):
            yield from self._rows(dim, first, min(first + rows, self.shape[dim])).split(max_size)

    def __str__(self) -> str:
        ranges = map("{}:{}".format, self.start, self.stop)
        return f"[{', '.join(ranges)}]"


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of one tensor that share an element, or None. Sorting keeps a grid of boxes cheap."""
    ordered = sorted((box for box in boxes if box.size), key=lambda box: box.start)
    open_boxes: list[Box] = []
    for box in ordered:
        open_boxes = [
            open_box
            for open_box in open_boxes
            if not open_box.stop or open_box.stop[0] > box.start[0]
        ]
        for open_box in open_boxes:
            if box.intersect(open_box) is not None:
                return open_box, box
        open_boxes.append(box)
    return None


class HeldBox(NamedTuple):
    """A box of the global tensor `name`, of element type `dtype` and shape `shape`, that a rank holds in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def from_json(
        cls, name: str, dtype: str, shape: Sequence[int], box: Sequence[Sequence[int]]
    ) -> Self:
        """Return the box whose fields went through JSON, which makes lists of tuples."""
        start, extent = box
        return cls(name, dtype, tuple(shape), Box(tuple(start), tuple(extent)))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.box.shape) * DTYPES[self.dtype].size_bytes

    @property
    def is_whole(self) -> bool:
        """Return whether the box, which lies in its tensor, is all of it."""
        return self.box.shape == self.shape


def digest(data: bytes | memoryview) -> str:
    """Return the hex digits of the checksum of `data`."""
    hasher = xxhash.xxh3_64()
    hasher.update(data)  # the one-shot function would hold the GIL, and with it the training thread
    return hasher.hexdigest()


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of `data` with the name of its kind before it."""
    return f"{PREFIX}{digest(data)}"


def block_count(size_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a shard; the last may be shorter."""
    return -(-size_bytes // block_bytes)


@dataclass(frozen=True)
class FileLayout:
    """A data file before it has data: its header, and the places of its boxes, in columns.

    Box `boxes[i]` is a part of box `numbers[i]` of the rank, in the bytes from `offsets[i]` to `offsets[i + 1]` of the
    file. `runs` are the boxes again, in order: in one range those that are small, adjacent and of one element type.
    """

    header: bytes
    numbers: Sequence[int]
    boxes: Sequence[HeldBox]
    offsets: Sequence[int]
    runs: Sequence[range]

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]


def lay_out(boxes: Mapping[int, HeldBox], max_file_bytes: int | None = None) -> list[FileLayout]:
    """Place numbered boxes in data files without gaps, as safetensors demands.

    There are several files where there is much to write, so that an incremental save can link some of them. The
    widest elements come first, so that all are aligned. A box that is larger than a file may be (its header not
    counted) is cut across its outermost dimension.
    """

    def widest_first(number: int) -> tuple[int, str]:
        dtype = boxes[number].dtype
        return -DTYPES[dtype].size_bytes, dtype

    total_bytes = sum(box.size_bytes for box in boxes.values())
    full_bytes = max(_FILE_BYTES, total_bytes // _MAX_FILES)
    if max_file_bytes is not None:
        full_bytes = min(full_bytes, max_file_bytes)
    layouts: list[FileLayout] = []
    numbers: list[int] = []
    parts: list[HeldBox] = []
    used_bytes = 0
    for number in sorted(boxes, key=widest_first):
        for part in _cut(boxes[number], max_file_bytes):
            if parts and used_bytes + part.size_bytes > full_bytes:
                layouts.append(lay_out_file(numbers, parts))
                numbers = []
                parts = []
                used_bytes = 0
            numbers.append(number)
            parts.append(part)
            used_bytes += part.size_bytes
    if parts:
        layouts.append(lay_out_file(numbers, parts))
    return layouts


def _cut(held_box: HeldBox, max_bytes: int | None) -> Iterator[HeldBox]:
    if max_bytes is None or held_box.size_bytes <= max_bytes:
        yield held_box
        return
    for box in held_box.box.split(max_bytes // DTYPES[held_box.dtype].size_bytes):
        yield held_box._replace(box=box)


def lay_out_file(numbers: Sequence[int], boxes: Sequence[HeldBox]) -> FileLayout:
    """Place boxes in one data file, in their order."""
    header = safetensors_header(boxes)
    offsets = [len(header)]
    runs: list[range] = []
    start = 0
    joint_bytes = 0
    for i, box in enumerate(boxes):
        size_bytes = box.size_bytes
        offsets.append(offsets[-1] + size_bytes)
        joint_bytes += size_bytes
        is_joined = (
            box.dtype == boxes[start].dtype
            and size_bytes < SMALL_BYTES
            and joint_bytes <= JOINT_BYTES
        )
        if i > start and not is_joined:
            runs.append(range(start, i))
            start = i
            joint_bytes = size_bytes
    runs.append(range(start, len(boxes)))
    return FileLayout(header, numbers, boxes, offsets, runs)


def safetensors_header(boxes: Sequence[HeldBox]) -> bytes:
    """Return all that precedes the data in a safetensors file: the length, then JSON padded so that data are aligned.

    A box that is a whole tensor has the tensor's name, a part is followed by its box: `weight[0:4, 0:8]`.
    """
    entries = ['{"__metadata__":{"format":"pt"}']
    start = 0
    for name, box in zip(_names(boxes), boxes, strict=True):
        end = start + box.size_bytes
        code = _safetensors_type(box.dtype, box.box.shape)
        entries.append(f',{_quoted(name)}:{{{code},"data_offsets":[{start},{end}]}}')
        start = end
    header = "".join(entries).encode() + b"}"
    length = _align(8 + len(header))
    return (length - 8).to_bytes(8, "little") + header.ljust(length - 8)


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _names(boxes: Sequence[HeldBox]) -> list[str]:
    """Return the names of boxes in a data file, which differ from each other and from safetensors' name for itself."""
    names: list[str] = []
    used_names = {"__metadata__"}
    for box in boxes:
        name = box.name
        if not box.is_whole:
            name += str(box.box)
        while name in used_names:  # a tensor may be called like another's part
            name += "#"
        used_names.add(name)
        names.append(name)
    return names


def _safetensors_type(dtype: str, shape: tuple[int, ...]) -> str:
    size_bytes, code, _ = DTYPES[dtype]
    if code is None:
        code = "U8"
        shape = (*shape, size_bytes)
    return f'"dtype":"{code}","shape":[{",".join(map(str, shape))}]'
