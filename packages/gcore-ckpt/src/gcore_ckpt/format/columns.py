"""Version 3 of an index: columns of what there is of each tensor and shard, a tree that refers to tensors by number.

So a state of many small tensors has a small index, which is read in little time: no name stands there twice, and no
object is kept for a tensor that is one shard.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, cast

from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import DIGITS, DTYPES, Box, block_count
from gcore_ckpt.format.stored import (
    DataFile,
    Index,
    StoredShard,
    StoredTensor,
    check_inside,
    check_places,
    checked_box,
    checked_dtype,
    checked_tensor,
    naming,
)
from gcore_ckpt.format.tree import Node

_MAX_PATH = 1000
"""Longest path in the tree that stands for a name, so that one long key is not made into much memory."""


def encode_columns(index: Index) -> dict[str, Any]:
    """Return the tree, the tensors and the files of an index, as JSON has them."""
    rows = {name: row for row, name in enumerate(index.tensors)}
    paths: dict[int, str | None] = {}

    def number(name: object, path: str | None) -> int:
        row = rows[cast("str", name)]
        paths.setdefault(row, path)
        return row

    tree = _map_references(index.tree, number, "")
    types: dict[tuple[str, tuple[int, ...]], int] = {}
    type_of: list[int] = []
    files: dict[str, dict[str, Any]] = {
        name: {**asdict(file), "tensors": [], "offsets_bytes": [], "parts": [], "checksums": []}
        for name, file in index.files.items()
    }
    for row, (dtype, shape, shards) in enumerate(index.tensors.values()):
        type_of.append(types.setdefault((dtype, shape), len(types)))
        for shard in shards:
            columns = files[shard.file]
            if shard.box.shape != shape:
                columns["parts"].append([len(columns["tensors"]), *shard.box])
            columns["tensors"].append(row)
            columns["offsets_bytes"].append(shard.offset_bytes)
            columns["checksums"].append(shard.checksums)
    for columns in files.values():
        columns["checksums"] = "".join(columns["checksums"])
    names = [[row, name] for name, row in rows.items() if paths.get(row) != name]
    return {
        "tree": tree,
        "tensors": {"types": [*types], "type": type_of, "names": names},
        "files": files,
    }


def decode_columns(
    content: Mapping[str, Any], files: Mapping[str, DataFile], block_bytes: int
) -> tuple[Node, Mapping[str, StoredTensor]]:
    """Read and check what `encode_columns` returned: the tree, with names in it, and the tensors."""
    if block_bytes < 1:
        raise ValueError(f"checksum_block_bytes is {block_bytes}; expected 1 or more")
    fields = validation.member(content, "tensors", dict)
    types = [_type(entry) for entry in validation.member(fields, "types", list)]
    type_of = validation.numbers(fields["type"], "type", len(types))
    tree, names = _resolve_names(content["tree"], fields, len(type_of))
    tensors = Tensors(block_bytes)
    for name, number in zip(names, type_of, strict=True):
        tensors.add(name, *types[number])
    for file, columns in content["files"].items():
        _add_shards(tensors, file, files[file], columns)
    tensors.check()
    return tree, tensors


def _type(entry: object) -> tuple[str, tuple[int, ...]]:
    dtype, shape = validation.members(entry, 2, "type")
    return checked_dtype(dtype), validation.shape(shape, "shape")


def _resolve_names(tree: Node, fields: Mapping[str, Any], count: int) -> tuple[Node, list[str]]:
    """Return the tree with names in place of row numbers, and the names: by default the first path of a tensor."""
    names: list[str | None] = [None] * count
    for entry in validation.member(fields, "names", list):
        number, name = validation.members(entry, 2, "entry of names")
        [row] = validation.numbers([number], "tensor in names", count)
        names[row] = validation.expect(str, name, "name")

    def name_of(row: object, path: str | None) -> str:
        if type(row) is not int or not 0 <= row < count:
            raise ValueError(f"tree: tensor {str(row)[:80]} is not in the index")
        name = names[row]
        if name is None:
            name = names[row] = path
        if name is None:
            raise ValueError(f"tree: tensor {row} has no name")
        return name

    named_tree = _map_references(tree, name_of, "")
    if None in names:
        raise ValueError(f"tensor {names.index(None)} has no name")
    if len({*names}) != count:
        raise ValueError(f"{count} tensors have {len({*names})} names; expected one for each")
    return named_tree, cast("list[str]", names)


def _add_shards(tensors: "Tensors", name: str, file: DataFile, columns: Mapping[str, Any]) -> None:
    """Read and check the columns of a file."""
    rows = validation.numbers(columns["tensors"], "tensors", len(tensors))
    offsets = validation.numbers(columns["offsets_bytes"], "offsets_bytes", file.size_bytes + 1)
    if len(rows) != len(offsets):
        raise ValueError(
            f"{name} has {len(rows)} tensors and {len(offsets)} offsets_bytes; expected one for each"
        )
    parts: dict[int, Box] = {}
    for entry in validation.member(columns, "parts", list):
        number, start, extent = validation.members(entry, 3, "part")
        [number] = validation.numbers([number], "part", len(rows))
        with naming(tensors.names[rows[number]]):
            parts[number] = checked_box(start, extent, tensors.type_of(rows[number]).full_box.shape)
    checksums = validation.member(columns, "checksums", str)
    digits = 0
    spans: list[tuple[int, int, str]] = []
    for number, (row, offset_bytes) in enumerate(zip(rows, offsets, strict=True)):
        dtype, box, size_bytes = tensors.type_of(row)
        if number in parts:
            box = parts[number]
            size_bytes = box.size * DTYPES[dtype].size_bytes
        if offset_bytes < file.header_size_bytes or offset_bytes + size_bytes > file.size_bytes:
            with naming(tensors.names[row]):
                check_inside(name, file, offset_bytes, size_bytes)
        start = digits
        digits += DIGITS * block_count(size_bytes, tensors.block_bytes)
        tensors.add_shard(row, name, offset_bytes, box, checksums[start:digits])
        spans.append((offset_bytes, size_bytes, tensors.names[row]))
    if digits != len(checksums):
        raise ValueError(
            f"{name} has {len(checksums)} digits of checksums; expected {digits} for what it holds"
        )
    check_places(name, spans)


class _Type(NamedTuple):
    """An element type and a shape, and what follows from them."""

    dtype: str
    full_box: Box
    size_bytes: int


class Tensors(Mapping[str, StoredTensor]):
    """The tensors of an index by name, in columns: each is made when it is asked for.

    Python's garbage collector would look through objects that are kept, again and again.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._types: dict[tuple[str, tuple[int, ...]], _Type] = {}
        self._type_of: list[_Type] = []
        # The shard of a tensor that is one; of the others, all of theirs.
        self._files: list[str | None] = []
        self._offsets: list[int] = []
        self._checksums: list[str] = []
        self._shards: dict[int, list[StoredShard]] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Add a tensor without shards; return its number."""
        tensor_type = self._types.get((dtype, shape))
        if tensor_type is None:
            full_box = Box.of_shape(shape)
            tensor_type = self._types[dtype, shape] = _Type(
                dtype, full_box, full_box.size * DTYPES[dtype].size_bytes
            )
        row = self._rows[name] = len(self.names)
        self.names.append(name)
        self._type_of.append(tensor_type)
        self._files.append(None)
        self._offsets.append(0)
        self._checksums.append("")
        return row

    def type_of(self, row: int) -> _Type:
        """Return the type of a tensor."""
        return self._type_of[row]

    def add_shard(self, row: int, file: str, offset_bytes: int, box: Box, checksums: str) -> None:
        """Add a box of a tensor, which lies in it."""
        dtype, full_box, _ = self._type_of[row]
        if self._files[row] is None and row not in self._shards and box.shape == full_box.shape:
            self._files[row] = file
            self._offsets[row] = offset_bytes
            self._checksums[row] = checksums
            return
        shards = self._shards.setdefault(row, [*self[self.names[row]].shards])
        self._files[row] = None
        size_bytes = box.size * DTYPES[dtype].size_bytes
        shards.append(StoredShard(file, offset_bytes, size_bytes, box, self.block_bytes, checksums))

    def check(self) -> None:
        """Check that the shards of each tensor hold each of its elements once."""
        for row, name in enumerate(self.names):
            if self._files[row] is None:
                dtype, full_box, _ = self._type_of[row]
                checked_tensor(name, dtype, full_box.shape, self._shards.get(row, ()))

    def __getitem__(self, name: str) -> StoredTensor:
        row = self._rows[name]
        dtype, full_box, size_bytes = self._type_of[row]
        file = self._files[row]
        if file is None:
            return StoredTensor(dtype, full_box.shape, tuple(self._shards.get(row, ())))
        shard = StoredShard(
            file, self._offsets[row], size_bytes, full_box, self.block_bytes, self._checksums[row]
        )
        return StoredTensor(dtype, full_box.shape, (shard,))

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _map_references(
    node: Node, change: Callable[[object, str | None], str | int], path: str | None
) -> Node:
    """Return a tree in which `change` has replaced each reference to a tensor, given the reference and its dotted path.

    The path is None where it is long. What is no container of references is left as it is.
    """
    if isinstance(node, list):
        items: list[Node] = node
        return [_map_references(item, change, _join(path, i)) for i, item in enumerate(items)]
    if not isinstance(node, dict):
        return node
    members = cast("dict[str, Any]", node)
    if len(members) != 1:
        return node
    [(tag, value)] = members.items()
    match tag, value:
        case "tensor" | "array", str() | int():
            return {tag: change(value, path)}
        case "dict" | "per_rank", dict():
            prefix = "" if tag == "dict" else "rank "
            fields = cast("dict[str, Node]", value)
            return {
                tag: {
                    k: _map_references(child, change, _join(path, prefix + k))
                    for k, child in fields.items()
                }
            }
        case "items", list() if all(
            isinstance(item, list | tuple) and len(item) == 2 for item in value
        ):
            pairs = cast("list[tuple[Node, Node]]", value)
            return {
                tag: [
                    [key, _map_references(child, change, _join(path, key))] for key, child in pairs
                ]
            }
        case "tuple", list():
            return {tag: _map_references(value, change, path)}
        case _:
            return node


def _join(path: str | None, key: object) -> str | None:
    if path is None or len(path) > _MAX_PATH:
        return None
    return f"{path}.{key}" if path else str(key)
