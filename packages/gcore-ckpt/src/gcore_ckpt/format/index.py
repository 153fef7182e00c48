"""`index.json`: the tree of a step, its tensors and their shards, and what its files must look like.

The file is one JSON object. Its first line holds the format, the version and a checksum of every byte after that line.
What there is of each tensor stands in columns, and the tree refers to tensors by their numbers, so that a state of many
small tensors has a small index. Versions 1 and 2, which have an object for each tensor and shard, are read too.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import BLOCK_BYTES, DIGITS, DTYPES, PREFIX, Box, block_count, checksum, overlap
from gcore_ckpt.format.tree import Node

FORMAT = "gcore-ckpt"
VERSION = 3

_MAX_PATH = 1000
"""Longest path in the tree that stands for a name, so that one long key is not made into much memory."""


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


def encode_index(index: Index) -> bytes:
    """Return the bytes of `index.json`."""
    rows = {name: row for row, name in enumerate(index.tensors)}
    paths: dict[int, str | None] = {}

    def number(name: object, path: str | None) -> int:
        row = rows[cast("str", name)]
        paths.setdefault(row, path)
        return row

    tree = _map_references(index.tree, number, "")
    types: dict[tuple[str, tuple[int, ...]], int] = {}
    files: dict[str, dict[str, Any]] = {
        name: {**asdict(file), "tensors": [], "offsets_bytes": [], "parts": [], "checksums": []}
        for name, file in index.files.items()
    }
    for row, tensor in enumerate(index.tensors.values()):
        types.setdefault((tensor.dtype, tensor.shape), len(types))
        for shard in tensor.shards:
            columns = files[shard.file]
            if shard.box.shape != tensor.shape:
                columns["parts"].append([len(columns["tensors"]), *shard.box])
            columns["tensors"].append(row)
            columns["offsets_bytes"].append(shard.offset_bytes)
            columns["checksums"].append(shard.checksums)
    for columns in files.values():
        columns["checksums"] = "".join(columns["checksums"])
    content = {
        "saved_at": index.saved_at,
        "num_ranks": index.num_ranks,
        "checksum_block_bytes": BLOCK_BYTES,
        "tree": tree,
        "tensors": {
            "types": list(types),
            "type": [types[tensor.dtype, tensor.shape] for tensor in index.tensors.values()],
            "names": [[row, name] for name, row in rows.items() if paths.get(row) != name],
        },
        "files": files,
    }
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
    return f'{{"format":"{FORMAT}","version":{VERSION},"checksum":"{checksum(body)}",\n'.encode() + body


def _map_references(node: Node, change: Callable[[object, str | None], str | int], path: str | None) -> Node:
    """Return a tree with what `change` makes of each reference to a tensor, a name or a number, and its dotted path.

    The path is None where it is long. What is no container of references is left as it is.
    """
    if isinstance(node, list):
        items = cast("list[Node]", node)
        return [_map_references(item, change, _join(path, i)) for i, item in enumerate(items)]
    if not isinstance(node, dict) or len(cast("dict[str, Any]", node)) != 1:
        return node
    [(tag, value)] = cast("dict[str, Any]", node).items()
    match tag, value:
        case "tensor" | "array", str() | int():
            return {tag: change(value, path)}
        case "dict" | "per_rank", dict():
            prefix = "" if tag == "dict" else "rank "
            fields = cast("dict[str, Node]", value)
            return {tag: {k: _map_references(child, change, _join(path, prefix + k)) for k, child in fields.items()}}
        case "items", list() if all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            pairs = cast("list[tuple[Node, Node]]", value)
            return {tag: [[key, _map_references(child, change, _join(path, key))] for key, child in pairs]}
        case "tuple", list():
            return {tag: _map_references(value, change, path)}
        case _:
            return node


def _join(path: str | None, key: object) -> str | None:
    if path is None or len(path) > _MAX_PATH:
        return None
    return f"{path}.{key}" if path else str(key)


def decode_index(data: bytes, where: str) -> Index:
    """Read and check `index.json`; shards are checked against the files it names, not against the disk."""
    with validation.reading(where, KeyError, RecursionError):
        content = validation.expect(dict, json.loads(data), "index")
        version = _check_first_line(content, data)
        block_bytes = validation.size(content["checksum_block_bytes"], "checksum_block_bytes") if version > 1 else None
        listed, tensors = validation.member(content, "files", dict), validation.member(content, "tensors", dict)
        files = {validation.plain_name(name): _data_file(file) for name, file in listed.items()}
        tree = content["tree"]
        if version < 3:
            decoded = {name: _tensor(name, fields, files, block_bytes) for name, fields in tensors.items()}
        else:
            types, type_of = _types(tensors)
            tree, names = _named(tree, tensors, len(type_of))
            shards = _shards(listed, files, [types[number] for number in type_of], names, block_bytes or 0)
            decoded = {
                name: checked_tensor(name, types[number].dtype, types[number].whole.shape, found)
                for name, number, found in zip(names, type_of, shards, strict=True)
            }
        _check_places(decoded)
        return Index(
            tree=tree,
            tensors=decoded,
            files=files,
            saved_at=str(content.get("saved_at", "")),
            num_ranks=validation.size(content["num_ranks"], "num_ranks") if version > 1 else 1,
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


class _Type(NamedTuple):
    """What tensors of one element type and shape have in common."""

    dtype: str
    whole: Box
    size_bytes: int


def _types(tensors: Mapping[str, Any]) -> tuple[list[_Type], list[int]]:
    """Return the types of an index and the number of the type of each tensor."""
    types: list[_Type] = []
    for entry in validation.member(tensors, "types", list):
        fields = validation.expect(list, entry, "type")
        if len(fields) != 2:
            raise ValueError(f"a type has {len(fields)} members; expected 2")
        dtype, shape = _dtype(fields[0]), validation.shape(fields[1], "shape")
        types.append(_Type(dtype, Box.whole(shape), Box.whole(shape).size * DTYPES[dtype].size_bytes))
    return types, validation.numbers(tensors["type"], "type", len(types))


def _named(tree: Node, tensors: Mapping[str, Any], count: int) -> tuple[Node, list[str]]:
    """Return a tree that refers to its tensors by name, and the names: the first path to each if not another one."""
    names: list[str | None] = [None] * count
    for entry in validation.member(tensors, "names", list):
        fields = validation.expect(list, entry, "name")
        if len(fields) != 2:
            raise ValueError(f"an entry of names has {len(fields)} members; expected 2")
        [row] = validation.numbers([fields[0]], "tensor in names", count)
        names[row] = validation.expect(str, fields[1], "name")

    def name(row: object, path: str | None) -> str:
        if type(row) is not int or not 0 <= row < count:
            raise ValueError(f"tree: tensor {str(row)[:80]} is not in the index")
        if (found := names[row]) is None:
            found = names[row] = path
        if found is None:
            raise ValueError(f"tree: tensor {row} has no name")
        return found

    named = _map_references(tree, name, "")
    if None in names:
        raise ValueError(f"tensor {names.index(None)} has no name")
    found = cast("list[str]", names)
    if len(set(found)) != count:
        raise ValueError(f"{count} tensors have {len(set(found))} names; expected one for each")
    return named, found


def _shards(
    listed: Mapping[str, Any],
    files: Mapping[str, DataFile],
    types: Sequence[_Type],
    names: Sequence[str],
    block_bytes: int,
) -> list[list[StoredShard]]:
    """Return the shards of each tensor from the columns of the files that hold them."""
    if block_bytes < 1:
        raise ValueError(f"checksum_block_bytes is {block_bytes}; expected 1 or more")
    found: list[list[StoredShard]] = [[] for _ in names]
    for file, columns in listed.items():
        start_bytes, end_bytes = files[file].header_size_bytes, files[file].size_bytes
        rows = validation.numbers(columns["tensors"], "tensors", len(names))
        offsets = validation.numbers(columns["offsets_bytes"], "offsets_bytes", end_bytes + 1)
        if len(rows) != len(offsets):
            raise ValueError(f"{file} has {len(rows)} tensors and {len(offsets)} offsets_bytes; expected one for each")
        parts = _parts(columns, rows, types, names)
        checksums, digits = validation.member(columns, "checksums", str), 0
        for number, (row, offset_bytes) in enumerate(zip(rows, offsets, strict=True)):
            box, size_bytes = parts[number] if number in parts else types[row][1:]
            if offset_bytes < start_bytes or offset_bytes + size_bytes > end_bytes:
                with _naming(names[row]):
                    _check_inside(file, files[file], offset_bytes, size_bytes)
            start, digits = digits, digits + DIGITS * block_count(size_bytes, block_bytes)
            shard = StoredShard(file, offset_bytes, size_bytes, box, block_bytes, checksums[start:digits])
            found[row].append(shard)
        if digits != len(checksums):
            raise ValueError(f"{file} has {len(checksums)} digits of checksums; expected {digits} for what it holds")
    return found


def _parts(
    columns: Mapping[str, Any], rows: Sequence[int], types: Sequence[_Type], names: Sequence[str]
) -> dict[int, tuple[Box, int]]:
    """Return the boxes, with their sizes in bytes, of those shards of a file that are not whole tensors."""
    parts: dict[int, tuple[Box, int]] = {}
    for entry in validation.member(columns, "parts", list):
        fields = validation.expect(list, entry, "part")
        if len(fields) != 3:
            raise ValueError(f"a part has {len(fields)} members; expected 3")
        [number] = validation.numbers([fields[0]], "part", len(rows))
        row = rows[number]
        with _naming(names[row]):
            box = _box(fields[1], fields[2], types[row].whole.shape)
        parts[number] = box, box.size * DTYPES[types[row].dtype].size_bytes
    return parts


def checked_tensor(name: str, dtype: str, shape: tuple[int, ...], shards: Sequence[StoredShard]) -> StoredTensor:
    """Return a tensor whose shards hold each element once: a reader returns memory that they fill."""
    if len(shards) != 1 or shards[0].box.shape != shape:
        found, expected = sum(shard.box.size for shard in shards), Box.whole(shape).size
        if found != expected:
            raise ValueError(f"tensor {name!r}: its shards hold {found} elements, its shape {shape} has {expected}")
        if len(shards) > 1 and overlap([shard.box for shard in shards]) is not None:
            raise ValueError(f"tensor {name!r}: its shards overlap")
    return StoredTensor(dtype, shape, tuple(shards))


def _check_places(tensors: Mapping[str, StoredTensor]) -> None:
    """Check that no bytes of a file are read twice: a small one could otherwise be made into any amount of memory."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        for file, offset_bytes, size_bytes, *_ in tensor.shards:
            if size_bytes:
                places.setdefault(file, []).append((offset_bytes, size_bytes, name))
    for file, spans in places.items():
        end, before = 0, ""
        for start, size_bytes, name in sorted(spans):
            if start < end:
                raise ValueError(f"tensors {before!r} and {name!r} share bytes of {file}, from byte {start} on")
            end, before = start + size_bytes, name


def _tensor(name: str, entry: object, files: Mapping[str, DataFile], block_bytes: int | None) -> StoredTensor:
    """Read and check a tensor of version 2, or of version 1, where `block_bytes` is None."""
    with _naming(name):
        fields = validation.expect(dict, entry, "entry")
        dtype, shape = _dtype(fields["dtype"]), validation.shape(fields["shape"], "shape")
        entries = validation.member(fields, "shards", list)
        shards = [_shard(shard, dtype, shape, files, block_bytes) for shard in entries]
    return checked_tensor(name, dtype, shape, shards)


@contextmanager
def _naming(tensor: str) -> Generator[None]:
    """Put the name of a tensor before the message of an error."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {tensor!r}: {validation.reason(error)}") from error


def _dtype(value: object) -> str:
    dtype = validation.expect(str, value, "dtype")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    return dtype


def _box(start: object, extent: object, shape: tuple[int, ...]) -> Box:
    box = Box(validation.sizes(start, "start"), validation.sizes(extent, "shape"))
    if not box.inside(shape):
        raise ValueError(f"shard of shape {box.shape} at {box.start} is not inside the tensor's shape {shape}")
    return box


def _shard(
    shard: object, dtype: str, shape: tuple[int, ...], files: Mapping[str, DataFile], block_bytes: int | None
) -> StoredShard:
    fields = validation.expect(dict, shard, "shard")
    name = validation.plain_name(validation.member(fields, "file", str))
    offset_bytes = validation.size(fields["offset_bytes"], "offset_bytes")
    box = _box(fields["start"], fields["shape"], shape)
    if name not in files:
        raise ValueError(f"shard is in {name!r}, which is not one of the step's files {sorted(files)}")
    size_bytes = box.size * DTYPES[dtype].size_bytes
    _check_inside(name, files[name], offset_bytes, size_bytes)
    if block_bytes is None:  # version 1 has one checksum for a shard
        block_bytes = max(1, size_bytes)
        checksums = validation.member(fields, "checksum", str).removeprefix(PREFIX) if size_bytes else ""
    else:
        checksums = validation.member(fields, "checksums", str)
    if block_bytes < 1 or len(checksums) != DIGITS * block_count(size_bytes, block_bytes):
        raise ValueError(f"{len(checksums)} digits of checksums do not fit {size_bytes} bytes")
    return StoredShard(name, offset_bytes, size_bytes, box, block_bytes, checksums)


def _check_inside(name: str, file: DataFile, offset_bytes: int, size_bytes: int) -> None:
    end = offset_bytes + size_bytes
    if offset_bytes < file.header_size_bytes or end > file.size_bytes:
        raise ValueError(
            f"shard at bytes {offset_bytes} to {end} is outside the data of {name}, "
            f"bytes {file.header_size_bytes} to {file.size_bytes}"
        )
