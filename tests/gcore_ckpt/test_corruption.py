"""Damaged, hostile and future checkpoints are refused, and the error says where. Version 3: `test_index.py`."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_index import INDEX, assert_every_flipped_bit_is_found, edit_index, write_index

from gcore_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    verify,
)
from gcore_ckpt.format.index import decode_index
from gcore_ckpt.format.stored import Index
from gcore_ckpt.storage.local import LocalStorage

DATA = "data-00000.safetensors"


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    state = {
        "w": torch.arange(6.0).view(2, 3),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "lr": 0.1,
        "big": 2**80,
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state)
    step_dir = tmp_path / "step-00000004"
    index = decode_index((step_dir / INDEX).read_bytes(), INDEX)
    write_index(step_dir, {"format": "gcore-ckpt", "version": 2, **version_2(index)})
    return step_dir


def version_2(index: Index) -> dict[str, Any]:
    """Return an index as version 2 wrote it, with an object for each tensor and each shard, which is easy to edit."""
    return {
        "saved_at": index.saved_at,
        "num_ranks": index.num_ranks,
        "checksum_block_bytes": 4194304,
        "tree": index.tree,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "shards": [
                    {
                        "file": shard.file,
                        "offset_bytes": shard.offset_bytes,
                        "start": shard.box.start,
                        "shape": shard.box.shape,
                        "checksums": shard.checksums,
                    }
                    for shard in tensor.shards
                ],
            }
            for name, tensor in index.tensors.items()
        },
        "files": {name: asdict(file) for name, file in index.files.items()},
    }


def assert_refused(
    step_dir: Path, message: str, error: type[CheckpointError] = CorruptCheckpointError
) -> None:
    with pytest.raises(error, match=message):
        Checkpointer(step_dir.parent).load()
    with pytest.raises(error, match=message):
        verify(step_dir.parent)


def test_edited_index_with_a_fitting_checksum_loads(step_dir: Path) -> None:
    edit_index(step_dir, lambda index: index["tree"]["dict"].update(lr=0.2))
    assert Checkpointer(step_dir.parent).load()["lr"] == 0.2


def test_every_flipped_bit_of_the_index_is_found(step_dir: Path) -> None:
    assert_every_flipped_bit_is_found((step_dir / INDEX).read_bytes())


def test_every_flipped_byte_of_the_data_file_is_found(step_dir: Path) -> None:
    intact = (step_dir / DATA).read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        (step_dir / DATA).write_bytes(damaged)
        with pytest.raises(
            CorruptCheckpointError, match=f"{DATA}: (header|tensor '[wb]') has checksum "
        ):
            verify(step_dir.parent)
    assert_refused(step_dir, f"{DATA}: tensor 'b' has checksum ")


@pytest.mark.parametrize("size_bytes", [0, 7, 100, -1])
def test_truncated_data_file(step_dir: Path, size_bytes: int) -> None:
    data = (step_dir / DATA).read_bytes()
    (step_dir / DATA).write_bytes(data[:size_bytes])
    assert_refused(step_dir, rf"{DATA}: has \d+ bytes; expected {len(data)}")


@pytest.mark.parametrize("size_bytes", [0, 1, 90, -1])
def test_truncated_index(step_dir: Path, size_bytes: int) -> None:
    (step_dir / INDEX).write_bytes((step_dir / INDEX).read_bytes()[:size_bytes])
    assert_refused(step_dir, f"{INDEX}: ")


@pytest.mark.parametrize("name", [DATA, INDEX])
def test_missing_file(step_dir: Path, name: str) -> None:
    (step_dir / name).unlink()
    assert_refused(step_dir, f"{step_dir / name}: the file is missing")


def test_data_file_that_is_no_file(step_dir: Path) -> None:
    (step_dir / DATA).unlink()
    (step_dir / DATA).mkdir()
    assert_refused(step_dir, f"{step_dir / DATA}: is no regular file")


def test_index_without_an_end(step_dir: Path) -> None:
    (step_dir / INDEX).unlink()
    os.mkfifo(step_dir / INDEX)
    assert_refused(step_dir, f"{step_dir / INDEX}: is no regular file")
    (step_dir / INDEX).unlink()
    (step_dir / INDEX).symlink_to("/dev/zero")
    assert_refused(step_dir, f"{step_dir / INDEX}: is no regular file")
    (step_dir / INDEX).unlink()
    (step_dir / INDEX).touch()
    os.truncate(step_dir / INDEX, 1 << 40)
    assert_refused(
        step_dir, f"{step_dir / INDEX}: has 1099511627776 bytes; expected at most 2147483648"
    )


@pytest.mark.parametrize("name", ["w", "b"])
def test_bytes_that_are_read_twice(step_dir: Path, name: str) -> None:
    """As a small file could become any amount of memory."""

    def edit(index: dict[str, Any]) -> None:
        index["tensors"] |= {f"copy {i}": index["tensors"][name] for i in range(200)}

    edit_index(step_dir, edit)
    assert_refused(step_dir, f"{INDEX}: tensors .* and .* share bytes of {DATA}, from byte ")


def test_a_link_is_read_and_checked_where_files_are_mapped(step_dir: Path) -> None:
    path = step_dir.parent
    (step_dir / DATA).rename(path / "elsewhere")
    (step_dir / DATA).symlink_to(path / "elsewhere")
    torch.testing.assert_close(
        Checkpointer(path).load(mmap=True)["w"], torch.arange(6.0).view(2, 3)
    )
    damaged = bytearray((path / "elsewhere").read_bytes())
    damaged[-1] ^= 1
    (path / "elsewhere").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match=f"{step_dir / DATA}: tensor .* has checksum"):
        Checkpointer(path).load(mmap=True)


def test_the_file_that_was_opened_is_mapped(step_dir: Path) -> None:
    """Not one that has taken its name since."""
    with LocalStorage(step_dir.parent).open_step(4) as files:
        files.open(DATA)
        size_bytes = (step_dir / DATA).stat().st_size
        expected = (step_dir / DATA).read_bytes()
        (step_dir / DATA).unlink()
        (step_dir / DATA).write_bytes(b"x" * size_bytes)
        found = files.map(DATA, 0, size_bytes)
        assert found is not None
        assert found.tobytes() == expected


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "a\\b", "..", "."])
def test_file_names_that_leave_the_step(step_dir: Path, name: str) -> None:
    def edit(index: dict[str, Any]) -> None:
        index["tensors"]["w"]["shards"][0]["file"] = name
        index["files"][name] = index["files"][DATA]

    edit_index(step_dir, edit)
    assert_refused(step_dir, re.escape(f"file name {name!r} is not a plain name inside the folder"))


def set_shard(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"]["w"]["shards"][0].update(fields)


def set_tensor(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"]["w"].update(fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda index: index.update(version=4),
            "format version 4 is newer than 3, the newest read here: upgrade",
        ),
        (lambda index: index.update(version=0), "unknown format version 0; expected 1 to 3"),
        (lambda index: index.update(version="1"), "version is 1; expected int"),
        (lambda index: index.update(format="zip"), "format is 'zip'; expected 'gcore-ckpt'"),
        (lambda index: index.pop("tree"), "'tree' is missing"),
        (lambda index: index.update(tensors=[]), r"tensors is \[\]; expected dict"),
        (lambda index: index["tensors"].pop("w"), "tree: tensor 'w' is not in the index"),
        (lambda index: index.update(tree={"gone": []}), r"tree: unknown node \{'gone': \[\]\}"),
        (
            lambda index: index.update(tree={"float_bits": "0x00"}),
            "tree: float_bits '0x00' are not 64 bits",
        ),
        (
            lambda index: index.update(tree={"array": "b"}),
            "tree: array 'b' has dtype bfloat16, which numpy does not",
        ),
        (
            lambda index: index.update(tree=json.loads("[" * 200 + "]" * 200)),
            "tree: more than 100 containers inside",
        ),
        (set_tensor(dtype="float7"), "tensor 'w': unknown dtype 'float7'; expected one of bool, "),
        (set_tensor(shape=[2, -3]), "tensor 'w': shape is -3; expected 0 or more"),
        (set_tensor(shape=[2, True]), "tensor 'w': shape is True; expected int"),
        (
            set_shard(shape=[2, 4]),
            r"tensor 'w': shard of shape \(2, 4\) at \(0, 0\) is not inside the tensor's shape",
        ),
        (
            set_shard(start=[1, 0]),
            r"tensor 'w': shard of shape \(2, 3\) at \(1, 0\) is not inside the tensor's shape",
        ),
        (
            set_shard(start=[0]),
            r"tensor 'w': shard of shape \(2, 3\) at \(0,\) is not inside the tensor's shape",
        ),
        (
            set_shard(offset_bytes=0),
            "tensor 'w': shard at bytes 0 to 24 is outside the data of data-00000.safetensors",
        ),
        (
            set_shard(offset_bytes=10**18),
            "tensor 'w': shard at bytes 1.* is outside the data of data-00000",
        ),
        (
            set_shard(file="data-00001.safetensors"),
            "tensor 'w': shard is in 'data-00001.safetensors', which is not",
        ),
        (
            lambda index: index["tensors"]["w"]["shards"].append(
                index["tensors"]["w"]["shards"][0]
            ),
            r"tensor 'w': its shards hold 12 elements, its shape \(2, 3\) has 6",
        ),
        (
            set_tensor(shape=[0, 2**62, 2**62], shards=[]),
            r"tensor 'w': shape \(0, .*\) is too large",
        ),
        (set_tensor(shape=[10**30]), "tensor 'w': shape is 10+; expected 2\\*\\*63 - 1 or less"),
        (set_tensor(shards=[]), "tensor 'w': its shards hold 0 elements"),
        (set_tensor(shape=[2**40, 2**20], shards=[]), "tensor 'w': its shards hold 0 elements"),
        (set_shard(checksums=""), "tensor 'w': 0 digits of checksums do not fit 24 bytes"),
        (
            lambda index: index.update(checksum_block_bytes=0),
            "tensor 'w': 16 digits of checksums do not fit",
        ),
        (
            lambda index: index.update(tree={"items": [[1.5, 2]]}),
            r"tree: unknown item \[1.5, 2\] of a dict",
        ),
        (lambda index: index["tensors"]["w"].pop("dtype"), "tensor 'w': 'dtype' is missing"),
    ],
)
def test_wrong_index(step_dir: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_index(step_dir, edit)
    assert_refused(step_dir, f"{step_dir / INDEX}: {message}")


def test_index_nested_beyond_what_json_reads(step_dir: Path) -> None:
    (step_dir / INDEX).write_text("[" * 100_000)
    assert_refused(step_dir, f"{INDEX}: ")


def test_step_deleted_while_it_is_opened(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_then_decode(data: bytes, where: str) -> Any:
        shutil.rmtree(step_dir)
        return decode_index(data, where)

    monkeypatch.setattr("gcore_ckpt.loading.reader.decode_index", delete_then_decode)
    with pytest.raises(CheckpointNotFoundError, match="was deleted while it was being read"):
        Checkpointer(step_dir.parent).load()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"view": ["w", [2], [1], 5]}, "a view ends at element 7 of the 6 of 'w'"),
        ({"view": ["w", [2], [1, 1], 0]}, r"a view has shape \(2,\) and stride \(1, 1\)"),
        ({"view": ["w", [2], [-1], 1]}, "stride of a view is -1; expected 0 or more"),
        (
            {"view": ["w", [2], [1]]},
            "a view has 3 parts; expected a name, a shape, strides and an offset",
        ),
        ({"view": ["w", [2**62, 2**62], [0, 0], 0]}, "shape of a view .* is too large"),
        ({"view": [3, [2], [1], 0]}, "tensor of a view is 3; expected str"),
        ({"view": ["v", [2], [1], 0]}, "tensor 'v' is not in the index"),
        ({"bytes": "a===b"}, "base64|padding|Incorrect"),
        ({"bytes": 3}, "unknown node"),
        ({"set": [1, 1]}, "a set holds an item twice"),
        ({"frozenset": [[1]]}, "a set holds what cannot be in one"),
        ({"numpy_scalar": ["|O8", "00" * 8]}, "8 bytes are no numpy scalar of type '|O8'"),
        ({"numpy_scalar": ["<f4", "00"]}, "1 bytes are no numpy scalar of type '<f4'"),
        ({"numpy_scalar": ["<f4", "xx"]}, "hexadecimal"),
        ({"numpy_scalar": ["<f4,<f4", "00" * 8]}, "no numpy scalar of type"),
    ],
)
def test_hostile_nodes_are_refused(step_dir: Path, node: Any, message: str) -> None:
    edit_index(step_dir, lambda index: index["tree"]["dict"].update(b=node))
    assert_refused(step_dir, message)
    if "view" in node:
        with pytest.raises(
            (CorruptCheckpointError, CheckpointMismatchError),
            match=message + "|no tensor in the check",
        ):
            Checkpointer(step_dir.parent).load({"b": torch.zeros(2)})
