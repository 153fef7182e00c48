"""`index.json`: the tree of a step, its tensors and their shards, and what its files must look like.

The file is one JSON object. Its first line holds the format, the version and a checksum of every byte after that line.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from gcore_ckpt.checksum import checksum
from gcore_ckpt.data_file import TensorSpec
from gcore_ckpt.dtypes import DTYPES
from gcore_ckpt.errors import CorruptCheckpointError
from gcore_ckpt.tree import Node

INDEX_FILE = "index.json"
FORMAT = "gcore-ckpt"
VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A box of a tensor, row-major in a data file.

    Attributes:
        file: Name of the data file.
        offset_bytes: Start of the shard's bytes from the start of the file.
        start: First index of the box in each dimension of the global tensor.
        shape: Extent of the box in each dimension.
        checksum: Checksum of the shard's bytes.
    """

    file: str
    offset_bytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A global tensor and the shards that make it up."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def spec(self) -> TensorSpec:
        """The element type and the global shape."""
        return TensorSpec(dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """The size of a data file and of the header before its data, and the header's checksum."""

    size_bytes: int
    header_size_bytes: int
    header_checksum: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything in a step but the tensors' bytes."""

    tree: Node
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, DataFile]


def encode_index(index: Index) -> bytes:
    """The bytes of `index.json`."""
    content = {
        "tree": index.tree,
        "tensors": {key: asdict(entry) for key, entry in index.tensors.items()},
        "files": {name: asdict(file) for name, file in index.files.items()},
    }
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
    return f'{{"format":"{FORMAT}","version":{VERSION},"checksum":"{checksum(body)}",\n'.encode() + body


def decode_index(data: bytes, where: str) -> Index:
    """Reads and checks `index.json`; shards are checked against the files it names, not against the disk.

    Raises:
        CorruptCheckpointError: With `where`, the path of the file, and what is wrong in it.
    """
    try:
        content = _expect(dict, json.loads(data), "index")
        _check_first_line(content, data)
        files = {_plain_name(name): _data_file(file) for name, file in _member(content, "files", dict).items()}
        tensors = {key: _tensor(key, entry, files) for key, entry in _member(content, "tensors", dict).items()}
        return Index(tree=content["tree"], tensors=tensors, files=files)
    except (ValueError, KeyError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CorruptCheckpointError(f"{where}: {reason}") from error


def _check_first_line(content: Mapping[str, Any], data: bytes) -> None:
    if content.get("format") != FORMAT:
        raise ValueError(f"format is {content.get('format')!r}, expected {FORMAT!r}")
    version = _member(content, "version", int)
    if version > VERSION:
        raise ValueError(f"format version {version} is newer than {VERSION}, the newest read here: upgrade {FORMAT}")
    if version != VERSION:
        raise ValueError(f"unknown format version {version}, expected {VERSION}")
    found = checksum(data.partition(b"\n")[2])
    if content["checksum"] != found:
        raise ValueError(f"checksum is {found}, its first line says {content['checksum']}")


def _data_file(file: object) -> DataFile:
    fields = _expect(dict, file, "file")
    return DataFile(
        size_bytes=_size(fields["size_bytes"], "size_bytes"),
        header_size_bytes=_size(fields["header_size_bytes"], "header_size_bytes"),
        header_checksum=_member(fields, "header_checksum", str),
    )


def _tensor(key: str, entry: object, files: Mapping[str, DataFile]) -> TensorEntry:
    try:
        fields = _expect(dict, entry, "entry")
        dtype = _member(fields, "dtype", str)
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
        shape = _box(fields["shape"], "shape")
        shards = tuple(_shard(shard, dtype, shape, files) for shard in _member(fields, "shards", list))
    except ValueError as error:
        raise ValueError(f"tensor {key!r}: {error}") from error
    except KeyError as error:
        raise ValueError(f"tensor {key!r}: {error} is missing") from error
    return TensorEntry(dtype=dtype, shape=shape, shards=shards)


def _shard(shard: object, dtype: str, shape: tuple[int, ...], files: Mapping[str, DataFile]) -> Shard:
    fields = _expect(dict, shard, "shard")
    box = Shard(
        file=_plain_name(_member(fields, "file", str)),
        offset_bytes=_size(fields["offset_bytes"], "offset_bytes"),
        start=_box(fields["start"], "start"),
        shape=_box(fields["shape"], "shape"),
        checksum=_member(fields, "checksum", str),
    )
    if not len(box.start) == len(box.shape) == len(shape) or any(
        start + extent > whole for start, extent, whole in zip(box.start, box.shape, shape, strict=True)
    ):
        raise ValueError(f"shard of shape {box.shape} at {box.start} is not inside the tensor's shape {shape}")
    if box.file not in files:
        raise ValueError(f"shard is in {box.file!r}, which is not one of the step's files {sorted(files)}")
    file = files[box.file]
    end = box.offset_bytes + math.prod(box.shape) * DTYPES[dtype].size_bytes
    if box.offset_bytes < file.header_size_bytes or end > file.size_bytes:
        raise ValueError(
            f"shard at bytes {box.offset_bytes} to {end} is outside the data of {box.file}, "
            f"bytes {file.header_size_bytes} to {file.size_bytes}"
        )
    return box


def _plain_name(name: str) -> str:
    # A name of another folder would make a downloaded index read (and, once re-saved, publish) any file of its reader.
    if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
        raise ValueError(f"file name {name!r} is not a plain name inside the step's folder")
    return name


def _box(value: object, name: str) -> tuple[int, ...]:
    return tuple(_size(item, name) for item in _expect(list, value, name))


def _size(value: object, name: str) -> int:
    if _expect(int, value, name) < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
    return cast("int", value)


def _member(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    return _expect(kind, fields[name], name)


def _expect(kind: type[T], value: object, name: str) -> T:
    # By exact type: bool is an int to isinstance.
    if type(value) is not kind:
        raise ValueError(f"{name} is {str(value)[:80]}, expected {kind.__name__}")
    return cast("T", value)
