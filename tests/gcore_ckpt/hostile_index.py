"""Edits of `index.json` as a hostile writer would make them, and damage that must be found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gcore_ckpt import CorruptCheckpointError
from gcore_ckpt.format.boxes import checksum
from gcore_ckpt.format.index import decode_index

INDEX = "index.json"


def edit_index(step_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index of a step, and give it a checksum that fits."""
    content = json.loads((step_dir / INDEX).read_text())
    edit(content)
    del content["checksum"]
    write_index(step_dir, content)


def write_index(step_dir: Path, content: dict[str, Any]) -> None:
    """Write the index of a step with a checksum that fits."""
    first = json.dumps({name: content.pop(name) for name in ("format", "version")})[:-1]
    body = json.dumps(content).encode()[1:]
    (step_dir / INDEX).write_bytes(f'{first}, "checksum": "{checksum(body)}",\n'.encode() + body)


def assert_every_flipped_bit_is_found(intact: bytes) -> None:
    """Every bit of an index, that of a step of any version."""
    decode_index(intact, "index.json")
    for bit in range(len(intact) * 8):
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match=r"^index\.json: "):
            decode_index(bytes(damaged), "index.json")
