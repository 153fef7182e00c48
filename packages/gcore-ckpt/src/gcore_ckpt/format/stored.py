"""The content of an index: tensors, their shards, and the files that hold these; checks that all versions share."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import DTYPES, Box, overlap
from gcore_ckpt.format.tree import Node, View


class StoredShard(NamedTuple):
    """A box of a tensor, row-major in a data file from byte `offset_bytes` on."""

    file: str
    offset_bytes: int
    size_bytes: int
    box: Box
    block_bytes: int
    checksums: str | None


class StoredTensor(NamedTuple):
    """A global tensor and the shards that make it up, each element once."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes

    def shape_of(self, view: View | None) -> tuple[int, ...]:
        """Return the shape of a view in its memory; None: its own."""
        return self.shape if view is None else view.shape


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """The size of a data file and of the header before its data, and the header's checksum, if its owner keeps one.

    `writer` is the rank and the host that wrote it, and the step if it is an earlier one.
    """

    size_bytes: int
    header_size_bytes: int
    header_checksum: str | None
    writer: str = ""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything in a step but the tensors' bytes.

    `saved_at` is when the save started, ISO 8601 in UTC; `metric` what `keep_best` compares, if it was given.
    """

    tree: Node
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, DataFile]
    saved_at: str = ""
    num_ranks: int = 1
    metric: float | None = None


def checked_tensor(
    name: str, dtype: str, shape: tuple[int, ...], shards: Sequence[StoredShard]
) -> StoredTensor:
    """Return a tensor whose shards hold each element once: a reader returns memory that they fill."""
    if len(shards) != 1 or shards[0].box.shape != shape:
        num_held = sum(shard.box.size for shard in shards)
        expected = Box.of_shape(shape).size
        if num_held != expected:
            raise ValueError(
                f"tensor {name!r}: its shards hold {num_held} elements, its shape {shape} has {expected}"
            )
        if len(shards) > 1 and overlap([shard.box for shard in shards]) is not None:
            raise ValueError(f"tensor {name!r}: its shards overlap")
    return StoredTensor(dtype, shape, tuple(shards))


def check_places(file: str, spans: list[tuple[int, int, str]]) -> None:
    """Check that shards share no bytes of a file; else a small file could fill any amount of memory.

    The spans are the first byte of each shard in the file, its size and its tensor.
    """
    end = 0
    before = ""
    for start, size_bytes, name in sorted(spans):
        if size_bytes and start < end:
            raise ValueError(
                f"tensors {before!r} and {name!r} share bytes of {file}, from byte {start} on"
            )
        if size_bytes:
            end = start + size_bytes
            before = name


@contextmanager
def naming(tensor: str) -> Generator[None]:
    """Put the name of a tensor before the message of an error."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {tensor!r}: {validation.reason(error)}") from error


def check_inside(name: str, file: DataFile, offset_bytes: int, size_bytes: int) -> None:
    end = offset_bytes + size_bytes
    if offset_bytes < file.header_size_bytes or end > file.size_bytes:
        raise ValueError(
            f"shard at bytes {offset_bytes} to {end} is outside the data of {name}, "
            f"bytes {file.header_size_bytes} to {file.size_bytes}"
        )


def checked_dtype(value: object) -> str:
    dtype = validation.expect(str, value, "dtype")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    return dtype


def checked_box(start: object, extent: object, shape: tuple[int, ...]) -> Box:
    box = Box(validation.sizes(start, "start"), validation.sizes(extent, "shape"))
    if not box.inside(shape):
        raise ValueError(
            f"shard of shape {box.shape} at {box.start} is not inside the tensor's shape {shape}"
        )
    return box
