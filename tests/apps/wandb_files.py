"""The records in the files of offline runs of Weights & Biases, which are logs of LevelDB."""

import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a part of a record; 1: a whole record, 2 to 4: its first part, a middle and the last."""
_BLOCK_BYTES = 32 * 2**10


def records(file: Path) -> Iterator[Any]:
    """Every protocol buffer in the file, after the seven bytes that name the format."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    content, place, data = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place + _HEADER.size <= len(content):
        if _BLOCK_BYTES - place % _BLOCK_BYTES < _HEADER.size:
            place += _BLOCK_BYTES - place % _BLOCK_BYTES
        _, length, kind = _HEADER.unpack_from(content, place)
        place += _HEADER.size
        data += content[place : place + length]
        place += length
        if kind in (1, 4):
            yield messages.Record.FromString(data)
            data = b""
