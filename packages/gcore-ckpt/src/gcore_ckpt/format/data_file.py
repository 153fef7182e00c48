"""The layout of boxes in the data files of a rank, and the safetensors headers that record it.

The headers are written here rather than by the safetensors library because they are known before the first byte is
copied: memory is staged as it will lie in the file, and a file is one write of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.dtypes import DTYPES
from gcore_ckpt.saving.plan import HeldBox

_ALIGNMENT_BYTES = 64
_FILE_BYTES = 256 << 20
_MAX_FILES = 16


@dataclass(frozen=True, kw_only=True)
class PlacedBox:
    """A box in a data file.

    Attributes:
        number: Which of the rank's boxes it is a part of.
        held: The box itself.
        offset_bytes: Start of its bytes from the start of the file.
    """

    number: int
    held: HeldBox
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A data file before it has data: its header and the places of its boxes."""

    header: bytes
    boxes: tuple[PlacedBox, ...]
    size_bytes: int


def lay_out(boxes: Mapping[int, HeldBox], max_file_bytes: int | None = None) -> list[FileLayout]:
    """Place boxes in data files without gaps, as safetensors demands.

    There are several files where there is much to write, so that the first is written while the next is copied. The
    widest elements come first, so that all are aligned. A box that is larger than a file may be is cut across its
    outermost dimension.

    Args:
        boxes: The boxes to write, by number.
        max_file_bytes: Largest file, its header not counted; None for no limit.
    """
    total_bytes = sum(held.size_bytes for held in boxes.values())
    full_bytes = max(_FILE_BYTES, total_bytes // _MAX_FILES)
    if max_file_bytes is not None:
        full_bytes = min(full_bytes, max_file_bytes)
    files: list[list[tuple[int, HeldBox]]] = [[]]
    used_bytes = 0
    for number, held in sorted(boxes.items(), key=lambda item: _order(item[1].dtype)):
        itemsize = DTYPES[held.dtype].size_bytes
        parts = [held.box] if max_file_bytes is None else held.box.split(max_file_bytes // itemsize)
        for part in (held.part(box) for box in parts):
            if files[-1] and used_bytes + part.size_bytes > full_bytes:
                files.append([])
                used_bytes = 0
            files[-1].append((number, part))
            used_bytes += part.size_bytes
    return [lay_out_file(file) for file in files if file]


def lay_out_file(boxes: Sequence[tuple[int, HeldBox]]) -> FileLayout:
    """Place boxes in one data file, in their order."""
    header = safetensors_header([held for _, held in boxes])
    placed: list[PlacedBox] = []
    end = len(header)
    for number, held in boxes:
        placed.append(PlacedBox(number=number, held=held, offset_bytes=end))
        end += held.size_bytes
    return FileLayout(header=header, boxes=tuple(placed), size_bytes=end)


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
        offsets = [end, end + held.size_bytes]
        entries[_entry_name(held, entries)] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        end += held.size_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header


def _entry_name(held: HeldBox, taken: Mapping[str, object]) -> str:
    name = held.name if held.box == Box.whole(held.shape) else f"{held.name}{held.box}"
    while name in taken:  # safetensors' own "__metadata__", or a tensor that is called like another's part
        name += "#"
    return name


def _order(dtype: str) -> tuple[int, str]:
    return -DTYPES[dtype].size_bytes, dtype
