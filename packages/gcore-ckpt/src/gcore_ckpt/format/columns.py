"""Version 3 of an index: columns of what there is of each tensor and shard, a tree that refers to tensors by number.

So a state of many small tensors has a small index: no name stands there twice.
"""

from collections.abc import Callable, Mapping, Sequence
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
    files: dict[str, dict[str, Any]] = {}
    for name, file in index.files.items():
        columns = {"tensors": [], "offsets_bytes": [], "parts": [], "checksums": []}
        files[name] = asdict(file) | columns
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
    rows = [_Row(name, *types[number], []) for name, number in zip(names, type_of, strict=True)]
    for file, columns in content["files"].items():
        _add_shards(rows, file, files[file], columns, block_bytes)
    tensors: dict[str, StoredTensor] = {}
    for name, dtype, shape, shards in rows:
        tensors[name] = checked_tensor(name, dtype, shape, shards)
    return tree, tensors


class _Row(NamedTuple):
    """A tensor whose shards are still being read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: list[StoredShard]


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


def _add_shards(
    tensors: Sequence[_Row],
    name: str,
    file: DataFile,
    columns: Mapping[str, Any],
    block_bytes: int,
) -> None:
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
        tensor = tensors[rows[number]]
        with naming(tensor.name):
            parts[number] = checked_box(start, extent, tensor.shape)
    checksums = validation.member(columns, "checksums", str)
    digits = 0
    spans: list[tuple[int, int, str]] = []
    for number, (row, offset_bytes) in enumerate(zip(rows, offsets, strict=True)):
        tensor = tensors[row]
        box = parts.get(number) or Box.of_shape(tensor.shape)
        size_bytes = box.size * DTYPES[tensor.dtype].size_bytes
        end_bytes = offset_bytes + size_bytes
        if offset_bytes < file.header_size_bytes or end_bytes > file.size_bytes:
            with naming(tensor.name):
                check_inside(name, file, offset_bytes, size_bytes)
        start = digits
        digits += DIGITS * block_count(size_bytes, block_bytes)
        shard = StoredShard(
            name, offset_bytes, size_bytes, box, block_bytes, checksums[start:digits]
        )
        tensor.shards.append(shard)
        spans.append((offset_bytes, size_bytes, tensor.name))
    if digits != len(checksums):
        raise ValueError(
            f"{name} has {len(checksums)} digits of checksums; expected {digits} for what it holds"
        )
    check_places(name, spans)


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
            prefix = "rank " if tag == "per_rank" else ""
            fields: dict[str, Node] = {}
            for key, child in cast("dict[str, Node]", value).items():
                fields[key] = _map_references(child, change, _join(path, prefix + key))
            return {tag: fields}
        case "items", list():
            pairs: list[Node] = []
            for item in cast("list[Node]", value):
                if not isinstance(item, list | tuple) or len(item) != 2:
                    return node
                key, child = cast("Sequence[Node]", item)
                pairs.append([key, _map_references(child, change, _join(path, key))])
            return {tag: pairs}
        case "tuple", list():
            return {tag: _map_references(value, change, path)}
        case _:
            return node


def _join(path: str | None, key: object) -> str | None:
    if path is None or len(path) > _MAX_PATH:
        return None
    if not path:
        return str(key)
    return f"{path}.{key}"
