"""Where tensors lie in a data file, and the safetensors header that says so.

The header is written here rather than by the safetensors library because the staged bytes already lie in file order:
offsets are known before anything is written, and a save is one sequential write of memory that is not copied again.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gcore_ckpt.dtypes import DTYPES


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Element type (a name in `DTYPES`) and global shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offset of each tensor from the start of the data, in file order, and the size of the data (bytes)."""

    offsets: Mapping[str, int]
    size_bytes: int


def place(tensors: Mapping[str, TensorSpec]) -> Placement:
    """Places tensors without gaps, as safetensors demands.

    The widest elements come first, so that all are aligned; tensors of one dtype lie side by side.
    """
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: _order(tensors[key].dtype)):
        offsets[key] = end
        end += tensors[key].size_bytes
    return Placement(offsets=offsets, size_bytes=end)


def _order(dtype: str) -> tuple[int, str]:
    return -DTYPES[dtype].size_bytes, dtype


def safetensors_header(tensors: Mapping[str, TensorSpec], placement: Placement) -> bytes:
    """All that precedes the data in a safetensors file: the length, then JSON padded to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for key, start in placement.offsets.items():
        spec = tensors[key]
        dtype = DTYPES[spec.dtype]
        code, shape = dtype.safetensors, spec.shape
        if code is None:
            code, shape = "U8", (*shape, dtype.size_bytes)
        entries[key] = {"dtype": code, "shape": shape, "data_offsets": [start, start + spec.size_bytes]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
