"""`index.json`: the tree of a step, its tensors and their shards, and what its files must look like.

The file is one JSON object. Its first line holds the format, the version and a checksum of every byte after that line.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import BLOCK_BYTES, DIGITS, DTYPES, PREFIX, Box, block_count, checksum, overlap
from gcore_ckpt.format.tree import Node

FORMAT = "gcore-ckpt"
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A box of a tensor, row-major in a data file from byte `offset_bytes` on."""

    file: str
    offset_bytes: int
    box: Box
    block_bytes: int
    checksums: str | None


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A global tensor and the shards that make it up, each element once."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        return Box.whole(self.shape).size * self.itemsize


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
    """Everything in a step but the tensors' bytes. `saved_at` is when the save started, ISO 8601 in UTC."""

    tree: Node
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, DataFile]
    saved_at: str = ""
    num_ranks: int = 1


def encode_shard(file: str, offset_bytes: int, box: Box, checksums: str | None) -> dict[str, Any]:
    """Return the JSON of a shard."""
    place = {"file": file, "offset_bytes": offset_bytes, "start": [*box.start], "shape": [*box.shape]}
    return {**place, "checksums": checksums}


def encode_index(index: Index) -> bytes:
    """Return the bytes of `index.json`."""
    content = {
        "saved_at": index.saved_at,
        "num_ranks": index.num_ranks,
        "checksum_block_bytes": BLOCK_BYTES,
        "tree": index.tree,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "shards": [encode_shard(s.file, s.offset_bytes, s.box, s.checksums) for s in tensor.shards],
            }
            for name, tensor in index.tensors.items()
        },
        "files": {name: asdict(file) for name, file in index.files.items()},
    }
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
    return f'{{"format":"{FORMAT}","version":{VERSION},"checksum":"{checksum(body)}",\n'.encode() + body


def decode_index(data: bytes, where: str) -> Index:
    """Read and check `index.json`; shards are checked against the files it names, not against the disk."""
    with validation.reading(where, KeyError, RecursionError):
        content = validation.expect(dict, json.loads(data), "index")
        is_first = _check_first_line(content, data) == 1
        block_bytes = None if is_first else validation.size(content["checksum_block_bytes"], "checksum_block_bytes")
        listed, tensors = validation.member(content, "files", dict), validation.member(content, "tensors", dict)
        files = {validation.plain_name(name): _data_file(file) for name, file in listed.items()}
        decoded = {name: decode_tensor(name, fields, files, block_bytes) for name, fields in tensors.items()}
        _check_places(decoded)
        return Index(
            tree=content["tree"],
            tensors=decoded,
            files=files,
            saved_at=str(content.get("saved_at", "")),
            num_ranks=1 if is_first else validation.size(content["num_ranks"], "num_ranks"),
        )


def _check_first_line(content: Mapping[str, Any], data: bytes) -> int:
    if content.get("format") != FORMAT:
        raise ValueError(f"format is {content.get('format')!r}; expected {FORMAT!r}")
    version = validation.member(content, "version", int)
    if version > VERSION:
        raise ValueError(f"format version {version} is newer than {VERSION}, the newest read here: upgrade {FORMAT}")
    if version < 1:
        raise ValueError(f"unknown format version {version}; expected 1 to {VERSION}")
    found = checksum(data.partition(b"\n")[2])
    if content["checksum"] != found:
        raise ValueError(f"checksum is {found}, its first line says {content['checksum']}")
    return version


def _data_file(file: object) -> DataFile:
    fields = validation.expect(dict, file, "file")
    return DataFile(
        size_bytes=validation.size(fields["size_bytes"], "size_bytes"),
        header_size_bytes=validation.size(fields["header_size_bytes"], "header_size_bytes"),
        header_checksum=validation.member(fields, "header_checksum", str),
        writer=str(fields.get("writer", "")),
    )


def decode_tensor(name: str, entry: object, files: Mapping[str, DataFile], block_bytes: int | None) -> StoredTensor:
    """Read and check a tensor, whose shards must hold each element once: a reader returns memory that they fill."""
    try:
        fields = validation.expect(dict, entry, "entry")
        dtype = validation.member(fields, "dtype", str)
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        shape = validation.shape(fields["shape"], "shape")
        entries = validation.member(fields, "shards", list)
        shards = tuple(_shard(shard, dtype, shape, files, block_bytes) for shard in entries)
        found, expected = sum(shard.box.size for shard in shards), Box.whole(shape).size
        if found != expected:
            raise ValueError(f"its shards hold {found} elements, its shape {shape} has {expected}")
        if len(shards) > 1 and overlap([shard.box for shard in shards]) is not None:
            raise ValueError("its shards overlap")
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {name!r}: {validation.reason(error)}") from error
    return StoredTensor(dtype=dtype, shape=shape, shards=shards)


def _check_places(tensors: Mapping[str, StoredTensor]) -> None:
    """Check that no bytes of a file are read twice: a small one could otherwise be made into any amount of memory."""
    places = sorted(
        (shard.file, shard.offset_bytes, shard.box.size * tensor.itemsize, name)
        for name, tensor in tensors.items()
        for shard in tensor.shards
        if shard.box.size
    )
    for (file, offset_bytes, size_bytes, name), (other, start, _, following) in pairwise(places):
        if file == other and start < offset_bytes + size_bytes:
            raise ValueError(f"tensors {name!r} and {following!r} share bytes of {file}, from byte {start} on")


def _shard(
    shard: object, dtype: str, shape: tuple[int, ...], files: Mapping[str, DataFile], block_bytes: int | None
) -> StoredShard:
    fields = validation.expect(dict, shard, "shard")
    name = validation.plain_name(validation.member(fields, "file", str))
    offset_bytes = validation.size(fields["offset_bytes"], "offset_bytes")
    box = Box(validation.sizes(fields["start"], "start"), validation.sizes(fields["shape"], "shape"))
    if not box.inside(shape):
        raise ValueError(f"shard of shape {box.shape} at {box.start} is not inside the tensor's shape {shape}")
    if name not in files:
        raise ValueError(f"shard is in {name!r}, which is not one of the step's files {sorted(files)}")
    file = files[name]
    size_bytes = box.size * DTYPES[dtype].size_bytes
    end = offset_bytes + size_bytes
    if offset_bytes < file.header_size_bytes or end > file.size_bytes:
        raise ValueError(
            f"shard at bytes {offset_bytes} to {end} is outside the data of {name}, "
            f"bytes {file.header_size_bytes} to {file.size_bytes}"
        )
    if block_bytes is None:  # version 1 has one checksum for a shard
        block_bytes = max(1, size_bytes)
        checksums = validation.member(fields, "checksum", str).removeprefix(PREFIX) if size_bytes else ""
    else:
        checksums = validation.member(fields, "checksums", str)
    if block_bytes < 1 or len(checksums) != DIGITS * block_count(size_bytes, block_bytes):
        raise ValueError(f"{len(checksums)} digits of checksums do not fit {size_bytes} bytes")
    return StoredShard(file=name, offset_bytes=offset_bytes, box=box, block_bytes=block_bytes, checksums=checksums)
