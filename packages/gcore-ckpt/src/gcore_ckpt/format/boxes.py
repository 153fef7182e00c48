"""Boxes of tensors, that ranks hold, files store and loads ask for: element types, data files, the format's checksum.

The headers of data files are written here rather than by the safetensors library because they are known before the
first byte is copied: memory is staged as it will lie in the file, and a file is one write of it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import xxhash

_quoted = json.encoder.encode_basestring_ascii  # what `json.dumps` does to a string, without its overhead

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


class Box(NamedTuple):
    """A part of a tensor: its first index and its extent in each dimension. A scalar is the box of no dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
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
        return tuple(map(slice, self.start, self.stop))

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


class HeldBox(NamedTuple):
    """A box of the global tensor `name`, of element type `dtype` and shape `shape`, that a rank holds in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def from_json(cls, name: str, dtype: str, shape: Sequence[int], box: Sequence[Sequence[int]]) -> Self:
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
    """A data file before it has data: its header and the places of its boxes, in columns.

    Box `held[i]` is a part of box `numbers[i]` of the rank, in the bytes from `offsets[i]` to `offsets[i + 1]` of the
    file. `runs` are the boxes again, in order: in one range those that are small, adjacent and of one element type.
    """

    header: bytes
    numbers: Sequence[int]
    held: Sequence[HeldBox]
    offsets: Sequence[int]
    runs: Sequence[range]

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]


def lay_out(boxes: Mapping[int, HeldBox], max_file_bytes: int | None = None) -> list[FileLayout]:
    """Place numbered boxes in data files without gaps, as safetensors demands.

    There are several files where there is much to write, so that the first is written while the next is copied. The
    widest elements come first, so that all are aligned. A box that is larger than a file may be (its header not
    counted) is cut across its outermost dimension.
    """
    by_dtype: dict[str, list[int]] = {}
    for number, held in boxes.items():
        by_dtype.setdefault(held.dtype, []).append(number)
    sizes = dict(zip(boxes, _sizes(boxes.values()), strict=True))
    full_bytes = max(_FILE_BYTES, sum(sizes.values()) // _MAX_FILES)
    if max_file_bytes is not None:
        full_bytes = min(full_bytes, max_file_bytes)
    files: list[FileLayout] = []
    numbers, parts, used_bytes = list[int](), list[HeldBox](), 0

    def add(number: int, held: HeldBox, size_bytes: int) -> None:
        nonlocal numbers, parts, used_bytes
        if numbers and used_bytes + size_bytes > full_bytes:
            files.append(lay_out_file(numbers, parts))
            numbers, parts, used_bytes = [], [], 0
        numbers.append(number)
        parts.append(held)
        used_bytes += size_bytes

    for dtype in sorted(by_dtype, key=lambda dtype: (-DTYPES[dtype].size_bytes, dtype)):
        for number in by_dtype[dtype]:
            held = boxes[number]
            if max_file_bytes is None or sizes[number] <= max_file_bytes:
                add(number, held, sizes[number])
                continue
            for box in held.box.split(max_file_bytes // DTYPES[dtype].size_bytes):
                part = held._replace(box=box)
                add(number, part, part.size_bytes)
    return [*files, lay_out_file(numbers, parts)] if numbers else files


def _sizes(boxes: Iterable[HeldBox]) -> list[int]:
    """Return the sizes of boxes in bytes; many are of the same type and shape."""
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    sizes: list[int] = []
    for held in boxes:
        kind = held.dtype, held.box.shape
        if kind not in known:
            known[kind] = held.size_bytes
        sizes.append(known[kind])
    return sizes


def lay_out_file(numbers: Sequence[int], held: Sequence[HeldBox]) -> FileLayout:
    """Place boxes in one data file, in their order."""
    sizes = _sizes(held)
    header = safetensors_header(held, sizes)
    runs: list[range] = []
    start, dtype, joint_bytes = 0, held[0].dtype, 0
    for i, (box, size_bytes) in enumerate(zip(held, sizes, strict=True)):
        joint_bytes += size_bytes
        if i > start and not (box.dtype == dtype and size_bytes < SMALL_BYTES and joint_bytes <= JOINT_BYTES):
            runs.append(range(start, i))
            start, dtype, joint_bytes = i, box.dtype, size_bytes
    runs.append(range(start, len(held)))
    return FileLayout(header, numbers, held, [*accumulate(sizes, initial=len(header))], runs)


def safetensors_header(boxes: Sequence[HeldBox], sizes: Sequence[int] | None = None) -> bytes:
    """Return all that precedes the data in a safetensors file: the length, then JSON padded so that data are aligned.

    A box that is a whole tensor has the tensor's name, a part is followed by its box: `weight[0:4, 0:8]`.
    """
    names = {"__metadata__"}
    entries = ['{"__metadata__":{"format":"pt"}']
    types: dict[tuple[str, tuple[int, ...]], str] = {}
    end = 0
    for held, size_bytes in zip(boxes, sizes or _sizes(boxes), strict=True):
        name = held.name if held.is_whole else f"{held.name}{held.box}"
        while name in names:  # safetensors' own "__metadata__", or a tensor that is called like another's part
            name += "#"
        names.add(name)
        kind = held.dtype, held.box.shape
        if kind not in types:
            types[kind] = _safetensors_type(*kind)
        entries.append(f'{_quoted(name)}:{{{types[kind]},"data_offsets":[{end},{end + size_bytes}]}}')
        end += size_bytes
    header = ",".join(entries).encode() + b"}"
    header += b" " * (-(len(header) + 8) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header


def _safetensors_type(dtype: str, shape: tuple[int, ...]) -> str:
    size_bytes, code, _ = DTYPES[dtype]
    if code is None:
        code, shape = "U8", (*shape, size_bytes)
    return json.dumps({"dtype": code, "shape": shape}, separators=(",", ":"))[1:-1]
