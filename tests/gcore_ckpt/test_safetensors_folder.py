"""Which safetensors files are read as a checkpoint, and that damaged and hostile ones are refused."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from gcore_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    verify,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def assert_equal_to_the_bit(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (name, found[name].dtype, found[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def test_other_names_of_a_file(tmp_path: Path) -> None:
    state = {"x": torch.arange(3), "y": torch.ones(2, dtype=torch.complex64)}
    (tmp_path / "adapter").mkdir()
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    assert_equal_to_the_bit(Checkpointer(tmp_path / "adapter").load(), state)
    assert_equal_to_the_bit(
        Checkpointer(tmp_path / "adapter" / "adapter_model.safetensors").load(), state
    )
    save_file(state, tmp_path / "adapter" / "second.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="holds no committed step"):
        Checkpointer(tmp_path / "adapter").load()


def test_steps_come_before_weights_and_a_step_is_no_folder_of_weights(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(
        CheckpointNotFoundError, match="holds safetensors files and no step 1; expected 'latest'"
    ):
        Checkpointer(tmp_path).load(step=1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(1)})
    assert Checkpointer(tmp_path).load()["x"] == 1
    with pytest.raises(CheckpointNotFoundError, match="holds no committed step"):
        Checkpointer(tmp_path / "step-00000001").load()


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        Checkpointer(path).load()
    with pytest.raises(CorruptCheckpointError, match=message):
        verify(path)


def safetensors(header: object, data: bytes = bytes(24)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(
    dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its header ends at byte 8, its 0 bytes"),
        (b"1234567", "its header ends at byte 8, its 7 bytes"),
        (
            struct.pack("<Q", 2**64 - 1) + b"{}",
            "its header ends at byte 18446744073709551623, its 10 bytes",
        ),
        (safetensors(b"\xff\xfe"), "codec can't decode"),
        (safetensors(b"{"), "Expecting property name"),
        (safetensors(b"[" * 100_000), "recursion"),
        (safetensors([]), "header is .*; expected dict"),
        (safetensors({"__metadata__": 3}, b""), "__metadata__ is .*; expected dict"),
        (safetensors({"__metadata__": {"a": 3}}, b""), "'a' in __metadata__ is .*; expected str"),
        (safetensors(b'{"a": {}, "a": {}}'), "'a' is there twice"),
        (safetensors({"w": 3}), "tensor 'w': entry is .*; expected dict"),
        (safetensors({"w": {"dtype": "F32"}}), "tensor 'w': data_offsets and shape is missing"),
        (
            safetensors({"w": entry(dtype="F31")}),
            "tensor 'w': unknown dtype 'F31'; expected one of BOOL, ",
        ),
        (safetensors({"w": entry(dtype=["F32"])}), "tensor 'w': dtype is .*; expected str"),
        (safetensors({"w": entry(shape=[6.0])}), "tensor 'w': shape is .*; expected int"),
        (safetensors({"w": entry(shape=[True, 6])}), "tensor 'w': shape is .*; expected int"),
        (safetensors({"w": entry(shape=[-2, -3])}), r"tensor 'w': shape is -2; expected 0 or more"),
        (
            safetensors({"w": entry(shape=[2, 4])}),
            r"data_offsets 0 to 24 do not fit F32 of shape \(2, 4\), 32 bytes",
        ),
        (safetensors({"w": entry(shape=[0, 2**62, 4], offsets=[0, 0])}, b""), "is too large"),
        (safetensors({"w": entry(offsets=[24, 0])}), "data_offsets 24 to 0 do not fit"),
        (safetensors({"w": entry(offsets=[0, 24, 48])}), "data_offsets are 3 numbers; expected 2"),
        (
            safetensors({"w": entry(offsets=[1, 25])}),
            r"tensor 'w' begins at byte \d+, the one before it ends at",
        ),
        (
            safetensors({"v": entry(), "w": entry()}),
            r"tensor 'w' begins at byte \d+, the one before it ends at",
        ),
        (safetensors({"w": entry()}, bytes(23)), r"its tensors end at byte \d+, the file has"),
        (safetensors({"w": entry()}, bytes(25)), r"its tensors end at byte \d+, the file has"),
    ],
)
def test_hostile_safetensors_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(data)
    assert_refused(tmp_path, f"{WEIGHTS}: .*{message}")


def test_a_file_whose_header_is_larger_than_the_cap(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    assert_refused(tmp_path, "its header ends at byte 100000009, its 100000100 bytes")


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).mkdir()
    assert_refused(tmp_path, f"{WEIGHTS}: is no regular file")


def drop(content: dict[str, Any]) -> None:
    del content["weight_map"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop, "weight_map is missing"),
        (lambda content: content.update(weight_map=[]), "weight_map is .*; expected dict"),
        (lambda content: content["weight_map"].update(a=1), "file of 'a' is .*; expected str"),
        (
            lambda content: content["weight_map"].update(a="../b"),
            "file name '../b' is not a plain name",
        ),
        (
            lambda content: content["weight_map"].update(a="/etc/passwd"),
            "file name '/etc/passwd' is not a plain name",
        ),
        (
            lambda content: content["weight_map"].update(a=".."),
            r"file name '\.\.' is not a plain name",
        ),
        (
            lambda content: content["weight_map"].update(c="1.safetensors"),
            "tensor 'c' is not in 1.safetensors, where",
        ),
        (
            lambda content: content["weight_map"].update(a="3.safetensors"),
            "3.safetensors: the file is missing",
        ),
    ],
)
def test_hostile_index_files(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    content: dict[str, Any] = {
        "metadata": {},
        "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
    }
    for name, file in content["weight_map"].items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps(content))
    assert list(Checkpointer(tmp_path).load()) == ["a", "b"]
    edit(content)
    (tmp_path / INDEX).write_text(json.dumps(content))
    assert_refused(tmp_path, message)


NUMBERS = st.integers(-2, 30) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "BOOL", "F4", "", 3]),
        "shape": st.lists(NUMBERS, max_size=3) | st.none(),
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | st.lists(NUMBERS),
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRIES | st.none()).map(
    json.dumps
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    header=HEADERS.map(str.encode) | st.binary(max_size=40),
    size=st.integers(0, 40),
    cut=st.integers(0, 3),
)
def test_no_header_does_more_than_load_or_be_refused(
    header: bytes, size: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzzed-{os.getpid()}.safetensors"
    data = safetensors(header, bytes(size))
    path.write_bytes(data[: len(data) - cut])
    try:
        state = Checkpointer(path).load()
    except CheckpointError:
        return
    assert_equal_to_the_bit(state, load_file(path))
