"""`index.json`: the tree of a step, its tensors and their shards, and what its files must look like.

The file is one JSON object. Its first line holds the format, the version and a checksum of every byte after that line.
Versions 1 and 2, which have an object for each tensor and for each shard, are read too.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import BLOCK_BYTES, DIGITS, DTYPES, PREFIX, block_count, checksum
from gcore_ckpt.format.columns import decode_columns, encode_columns
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

FORMAT = "gcore-ckpt"
VERSION = 3


def encode_index(index: Index) -> bytes:
    """Return the bytes of `index.json`."""
    content: dict[str, Any] = {"saved_at": index.saved_at, "num_ranks": index.num_ranks}
    if index.metric is not None:
        content["metric"] = index.metric
    content["checksum_block_bytes"] = BLOCK_BYTES
    content |= encode_columns(index)
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
    return (
        f'{{"format":"{FORMAT}","version":{VERSION},"checksum":"{checksum(body)}",\n'.encode()
        + body
    )


def decode_index(data: bytes, where: str) -> Index:
    """Read and check `index.json`; shards are checked against the files it names, not against the disk."""
    with validation.reading(where, KeyError, RecursionError):
        content = validation.expect(dict, json.loads(data), "index")
        version = _check_first_line(content, data)
        block_bytes = (
            validation.size(content["checksum_block_bytes"], "checksum_block_bytes")
            if version > 1
            else None
        )
        listed = validation.member(content, "files", dict)
        files = {validation.plain_name(name): _data_file(file) for name, file in listed.items()}
        if version < 3:
            entries = validation.member(content, "tensors", dict)
            tree = content["tree"]
            tensors = {
                name: _tensor(name, fields, files, block_bytes) for name, fields in entries.items()
            }
            _check_places(tensors)
        else:
            tree, tensors = decode_columns(content, files, block_bytes or 0)
        return Index(
            tree=tree,
            tensors=tensors,
            files=files,
            saved_at=str(content.get("saved_at", "")),
            num_ranks=validation.size(content["num_ranks"], "num_ranks") if version > 1 else 1,
            metric=_metric(content.get("metric")),
        )


def _metric(value: object) -> float | None:
    if value is None:
        return None
    metric = validation.expect(float, value, "metric")
    if not math.isfinite(metric):
        raise ValueError(f"metric is {metric}; expected a finite number")
    return metric


def _check_first_line(content: Mapping[str, Any], data: bytes) -> int:
    if content.get("format") != FORMAT:
        raise ValueError(f"format is {content.get('format')!r}; expected {FORMAT!r}")
    version = validation.member(content, "version", int)
    if version > VERSION:
        raise ValueError(
            f"format version {version} is newer than {VERSION}, the newest read here: upgrade {FORMAT}"
        )
    if version < 1:
        raise ValueError(f"unknown format version {version}; expected 1 to {VERSION}")
    actual = checksum(data.partition(b"\n")[2])
    if content["checksum"] != actual:
        raise ValueError(f"checksum is {actual}, its first line says {content['checksum']}")
    return version


def _data_file(file: object) -> DataFile:
    fields = validation.expect(dict, file, "file")
    return DataFile(
        size_bytes=validation.size(fields["size_bytes"], "size_bytes"),
        header_size_bytes=validation.size(fields["header_size_bytes"], "header_size_bytes"),
        header_checksum=validation.member(fields, "header_checksum", str),
        writer=str(fields.get("writer", "")),
    )


def _check_places(tensors: Mapping[str, StoredTensor]) -> None:
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        for shard in tensor.shards:
            spans.setdefault(shard.file, []).append((shard.offset_bytes, shard.size_bytes, name))
    for file, file_spans in spans.items():
        check_places(file, file_spans)


def _tensor(
    name: str, entry: object, files: Mapping[str, DataFile], block_bytes: int | None
) -> StoredTensor:
    """Read and check a tensor of version 2, or of version 1, where `block_bytes` is None."""
    with naming(name):
        fields = validation.expect(dict, entry, "entry")
        dtype = checked_dtype(fields["dtype"])
        shape = validation.shape(fields["shape"], "shape")
        entries = validation.member(fields, "shards", list)
        shards = [_shard(shard, dtype, shape, files, block_bytes) for shard in entries]
    return checked_tensor(name, dtype, shape, shards)


def _shard(
    shard: object,
    dtype: str,
    shape: tuple[int, ...],
    files: Mapping[str, DataFile],
    block_bytes: int | None,
) -> StoredShard:
    fields = validation.expect(dict, shard, "shard")
    name = validation.plain_name(validation.member(fields, "file", str))
    offset_bytes = validation.size(fields["offset_bytes"], "offset_bytes")
    box = checked_box(fields["start"], fields["shape"], shape)
    if name not in files:
        raise ValueError(
            f"shard is in {name!r}, which is not one of the step's files {sorted(files)}"
        )
    size_bytes = box.size * DTYPES[dtype].size_bytes
    check_inside(name, files[name], offset_bytes, size_bytes)
    if block_bytes is None:  # version 1 has one checksum for a shard
        block_bytes = max(1, size_bytes)
        checksums = (
            validation.member(fields, "checksum", str).removeprefix(PREFIX) if size_bytes else ""
        )
    else:
        checksums = validation.member(fields, "checksums", str)
    if block_bytes < 1 or len(checksums) != DIGITS * block_count(size_bytes, block_bytes):
        raise ValueError(f"{len(checksums)} digits of checksums do not fit {size_bytes} bytes")
    return StoredShard(name, offset_bytes, size_bytes, box, block_bytes, checksums)
