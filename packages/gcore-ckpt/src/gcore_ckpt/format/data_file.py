"""The layout of boxes in the data files of a rank, their safetensors headers, and the one checksum of the format.

The headers are written here rather than by the safetensors library because they are known before the first byte is
copied: memory is staged as it will lie in the file, and a file is one write of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import xxhash

from gcore_ckpt.format.boxes import DTYPES, Box, HeldBox

BLOCK_BYTES = 4 << 20
"""Size of the blocks of a shard that have a checksum each, so that a part can be read and checked."""
DIGITS = 16
"""Hex digits of a block's checksum, xxh3 of 64 bits. Those of a shard's blocks stand one after another."""
PREFIX = "xxh3_64:"

_ALIGNMENT_BYTES = 64
_FILE_BYTES = 256 << 20
_MAX_FILES = 16


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
class PlacedBox:
    """A box in a data file: a part of box `number` of the rank, `offset_bytes` from the start of the file."""

    number: int
    held: HeldBox
    offset_bytes: int


@dataclass(frozen=True)
class FileLayout:
    """A data file before it has data: its header and the places of its boxes."""

    header: bytes
    boxes: tuple[PlacedBox, ...]
    size_bytes: int


def lay_out(boxes: Mapping[int, HeldBox], max_file_bytes: int | None = None) -> list[FileLayout]:
    """Place numbered boxes in data files without gaps, as safetensors demands.

    There are several files where there is much to write, so that the first is written while the next is copied. The
    widest elements come first, so that all are aligned. A box that is larger than a file may be (its header not
    counted) is cut across its outermost dimension.
    """
    full_bytes = max(_FILE_BYTES, sum(held.size_bytes for held in boxes.values()) // _MAX_FILES)
    if max_file_bytes is not None:
        full_bytes = min(full_bytes, max_file_bytes)
    files: list[list[tuple[int, HeldBox]]] = [[]]
    used_bytes = 0
    for number, held in sorted(boxes.items(), key=lambda item: (-DTYPES[item[1].dtype].size_bytes, item[1].dtype)):
        itemsize = DTYPES[held.dtype].size_bytes
        parts = [held.box] if max_file_bytes is None else held.box.split(max_file_bytes // itemsize)
        for part in (replace(held, box=box) for box in parts):
            if files[-1] and used_bytes + part.size_bytes > full_bytes:
                files.append([])
                used_bytes = 0
            files[-1].append((number, part))
            used_bytes += part.size_bytes
    return [lay_out_file(file) for file in files if file]


def lay_out_file(boxes: Sequence[tuple[int, HeldBox]]) -> FileLayout:
    """Place boxes in one data file, in their order."""
    header = safetensors_header([held for _, held in boxes])
    *starts, end = accumulate((held.size_bytes for _, held in boxes), initial=len(header))
    placed = (PlacedBox(number, held, start) for (number, held), start in zip(boxes, starts, strict=True))
    return FileLayout(header, tuple(placed), end)


def safetensors_header(boxes: Sequence[HeldBox]) -> bytes:
    """Return all that precedes the data in a safetensors file: the length, then JSON padded so that data are aligned.

    A box that is a whole tensor has the tensor's name, a part is followed by its box: `weight[0:4, 0:8]`.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for held in boxes:
        dtype = DTYPES[held.dtype]
        code, shape = dtype.safetensors, held.box.shape
        if code is None:
            code, shape = "U8", (*shape, dtype.size_bytes)
        name = held.name if held.box == Box.whole(held.shape) else f"{held.name}{held.box}"
        while name in entries:  # safetensors' own "__metadata__", or a tensor that is called like another's part
            name += "#"
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + held.size_bytes]}
        end += held.size_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header
