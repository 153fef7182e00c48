"""Version 3 of `index.json`: what is not as it should be is refused, and it is small for many small tensors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_index import INDEX, assert_every_flipped_bit_is_found, edit_index

from gcore_ckpt import Checkpointer, CorruptCheckpointError, Shard, Shards, load, save, verify
from gcore_ckpt.format.index import decode_index

GOLDEN = Path(__file__).parent / "golden"
DATA = "data-00000.safetensors"
WHOLE = torch.arange(12, dtype=torch.int32).view(3, 4)
PARTS = [(slice(0, 1), slice(0, 4)), (slice(1, 3), slice(0, 3)), (slice(1, 3), slice(3, 4))]


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    """A step of tensors `w`, `half`, `deep.0.#` (at another path, too) and `parts`, of three shards."""
    boxes = [
        Shard(global_shape=(3, 4), offset=(r.start, c.start), tensor=WHOLE[r, c]) for r, c in PARTS
    ]
    deep = torch.ones(5)
    state = {
        "w": torch.zeros(2, 3),
        "half": torch.ones(3).half(),
        "deep": [{"#": deep}],
        "tied": deep,
    }
    save(
        tmp_path,
        {**state, "parts": Shards(boxes), "lr": 0.1, "x.y": 1, "x": {"y": torch.zeros(1)}},
        step=4,
    )
    return tmp_path / "step-00000004"


def test_every_flipped_bit_is_found(step_dir: Path) -> None:
    assert_every_flipped_bit_is_found((step_dir / INDEX).read_bytes())


def test_it_says_once_what_is_known(step_dir: Path) -> None:
    content = json.loads((step_dir / INDEX).read_text())
    assert content["version"] == 3
    tree = content["tree"]["dict"]
    assert tree["deep"] == [{"dict": {"#": {"tensor": 1}}}]
    assert tree["tied"] == {"tensor": 1}
    assert content["tensors"]["names"] == []
    file = content["files"][DATA]
    assert [
        content["tensors"]["types"][content["tensors"]["type"][row]] for row in file["tensors"]
    ] == [
        ["float32", [2, 3]],
        ["float32", [5]],
        ["float32", [1]],
        *[["int32", [3, 4]]] * 3,
        ["float16", [3]],
    ]
    assert file["parts"] == [[3, [0, 0], [1, 4]], [4, [1, 0], [2, 3]], [5, [1, 3], [2, 1]]]
    loaded = load(step_dir.parent)
    assert torch.equal(loaded["parts"], WHOLE)
    assert loaded["tied"] is loaded["deep"][0]["#"]


def names_of(state: dict[str, Any], path: Path) -> tuple[list[str], list[Any]]:
    save(path, state)
    data = (path / "step-00000000" / INDEX).read_bytes()
    return list(decode_index(data, INDEX).tensors), json.loads(data)["tensors"]["names"]


def test_a_name_that_is_no_path_is_written(tmp_path: Path) -> None:
    own = Shard(global_shape=(1,), offset=(0,), tensor=torch.ones(1), name="own")
    state = {
        "a.b": torch.ones(1),
        "a": {"b": torch.ones(2)},
        "in": {"x": own},
        "\ud800": torch.ones(3),
    }
    names, written = names_of(state, tmp_path / "some")
    assert names == ["a.b", "a.b#2", "own", "\\ud800"]
    assert written == [[1, "a.b#2"], [2, "own"], [3, "\\ud800"]]
    assert names_of({"state": torch.ones(1)}, tmp_path / "none") == (["state"], [])
    assert names_of({"x" * 1001: {"y": {"z": torch.ones(1)}}}, tmp_path / "long")[1] == [
        [0, f"{'x' * 1001}.y.z"]
    ]


@pytest.mark.parametrize("version", [2, 3])
def test_what_earlier_releases_wrote_is_read(version: int) -> None:
    """As they wrote it; version 1 is in `test_load.py`."""
    path = GOLDEN / f"version-{version}"
    assert json.loads((path / "step-00000004" / INDEX).read_text())["version"] == version
    verify(path)
    state = load(path)
    w = torch.arange(6.0).view(2, 3)
    assert torch.equal(state["w"], w)
    assert state["tied"] is state["w"]
    assert torch.equal(state["b"], torch.tensor([1, -2, 3], dtype=torch.bfloat16))
    assert (state["a"] == np.arange(4, dtype=np.uint16)).all()
    assert state["empty"].shape == (0, 2)
    assert torch.equal(state["z"], torch.tensor([1 + 2j]))
    assert state["list"] == [1, 2**80, (None, True, float("inf"))]
    assert state["lr"] == 0.1
    assert [state["optim"]["state"][i]["step"].item() for i in range(2)] == [3, 4]
    assert [*map(len, (state["a.b"], state["sub"]["a.b"], state["sub"]["a"]["b"]))] == [1, 2, 2]
    assert torch.equal(state["sub"]["a"]["b"], torch.full((2,), 2.0))
    assert torch.equal(state["rng"]["seed"], torch.arange(2))
    assert torch.equal(state["parts"], WHOLE)
    assert torch.equal(state["own name"], torch.tensor([7.0, 8.0]))
    row = torch.zeros(2, 2, dtype=torch.int32)
    load(path, {"parts": Shard(global_shape=(3, 4), offset=(1, 2), tensor=row)})
    assert torch.equal(row, WHOLE[1:, 2:])
    if version == 3:
        assert torch.equal(state["view"], w.t())
        assert state["view"].data_ptr() == state["w"].data_ptr()
        assert (state["bytes"], state["set"], state["scalar"]) == (
            b"\x00\xff",
            {1, "a"},
            np.float32(0.5),
        )


def tensors(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"].update(fields)


def columns(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["files"][DATA].update(fields)


def part(*fields: object) -> Callable[[dict[str, Any]], None]:
    """Add to the parts of tensors that the file has."""
    return lambda index: index["files"][DATA]["parts"].append(list(fields))


def replaced(name: str, number: int, value: object) -> Callable[[dict[str, Any]], None]:
    """Replace one value of a column of the file."""
    return lambda index: index["files"][DATA][name].__setitem__(number, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.pop("tree"), "'tree' is missing"),
        (lambda index: index.pop("tensors"), "'tensors' is missing"),
        (lambda index: index.update(tensors=[]), r"tensors is \[\]; expected dict"),
        (lambda index: index["tensors"].pop("types"), "'types' is missing"),
        (lambda index: index["tensors"].pop("type"), "'type' is missing"),
        (lambda index: index["tensors"].pop("names"), "'names' is missing"),
        (tensors(types=[["float7", [1]]]), "unknown dtype 'float7'; expected one of bool, "),
        (tensors(types=[["float32"]]), "type has 1 members; expected 2"),
        (tensors(types=[["float32", [-1]]]), "shape is -1; expected 0 or more"),
        (tensors(types=[["float32", [2**62, 4]]]), "shape .* is too large"),
        (tensors(types=[]), "type is 0; expected 0 or more, less than 0"),
        (tensors(type=[0, 1, 2, True]), "type is True; expected 0 or more, less than 5"),
        (tensors(type=[0, 1, 2, -1]), "type is -1; expected 0 or more, less than 5"),
        (tensors(type=[0, 1, 2, 1.0]), "type is 1.0; expected 0 or more, less than 5"),
        (lambda index: index["tensors"]["type"].pop(), "tree: tensor 4 is not in the index"),
        (lambda index: index["tensors"]["type"].append(0), "tensor 5 has no name"),
        (tensors(names=[[9, "x"]]), "tensor in names is 9; expected 0 or more, less than 5"),
        (tensors(names=[[0, 3]]), "name is 3; expected str"),
        (tensors(names=[[0]]), "entry of names has 1 members; expected 2"),
        (tensors(names=[[0, "half"]]), "5 tensors have 4 names; expected one for each"),
        (
            lambda index: index["tree"]["dict"].update(w={"tensor": 5}),
            "tree: tensor 5 is not in the index",
        ),
        (
            lambda index: index["tree"]["dict"].update(w={"tensor": -1}),
            "tree: tensor -1 is not in the index",
        ),
        (
            lambda index: index["tree"]["dict"].update(w={"tensor": True}),
            "tree: tensor True is not in the index",
        ),
        (
            lambda index: index["tree"]["dict"].update(w={"tensor": "w"}),
            "tree: tensor w is not in the index",
        ),
        (lambda index: index["tree"]["dict"].update(w={"items": [3]}), "tensor 0 has no name"),
        (
            lambda index: index.update(tree=json.loads("[" * 200 + "]" * 200)),
            "tensor 0 has no name",
        ),
        (
            lambda index: index.update(checksum_block_bytes=0),
            "checksum_block_bytes is 0; expected 1 or more",
        ),
        (lambda index: index["files"][DATA].pop("tensors"), "'tensors' is missing"),
        (replaced("tensors", 0, 5), "tensors is 5; expected 0 or more, less than 5"),
        (replaced("tensors", 0, 1), "tensor 'w': its shards hold 0 elements"),
        (
            lambda index: index["files"][DATA]["tensors"].pop(),
            f"{DATA} has 6 tensors and 7 offsets_bytes; expected",
        ),
        (
            replaced("offsets_bytes", 0, 0),
            f"tensor 'w': shard at bytes 0 to 24 is outside the data of {DATA}, bytes",
        ),
        (
            replaced("offsets_bytes", 0, 10**18),
            "offsets_bytes is 1000000000000000000; expected 0 or more, less than",
        ),
        (replaced("offsets_bytes", 0, -8), "offsets_bytes is -8; expected 0 or more, less than"),
        (
            lambda index: replaced(
                "offsets_bytes", 6, index["files"][DATA]["offsets_bytes"][0] + 4
            )(index),
            "tensors 'w' and 'half' share bytes",
        ),
        (
            part(0, [0, 0], [1, 3]),
            r"tensor 'w': its shards hold 3 elements, its shape \(2, 3\) has 6",
        ),
        (part(0, [0, 1], [2, 3]), r"tensor 'w': shard of shape \(2, 3\) at \(0, 1\) is not inside"),
        (part(0, [0], [2, 3]), r"tensor 'w': shard of shape \(2, 3\) at \(0,\) is not inside"),
        (part(7, [0, 0], [2, 3]), "part is 7; expected 0 or more, less than 7"),
        (part(0, [0, 0]), "part has 2 members; expected 3"),
        (
            columns(parts=[[3, [0, 0], [1, 4]], [4, [1, 0], [2, 3]], [5, [1, 2], [2, 1]]]),
            "'parts': its shards overlap",
        ),
        (columns(parts=[]), "tensor 'parts': "),
        (
            columns(checksums=""),
            f"{DATA} has 0 digits of checksums; expected 112 for what it holds",
        ),
        (
            columns(checksums="0" * 113),
            f"{DATA} has 113 digits of checksums; expected 112 for what it holds",
        ),
        (columns(checksums=None), "checksums is None; expected str"),
    ],
)
def test_a_wrong_index(
    step_dir: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit_index(step_dir, edit)
    for use in (load, verify):
        with pytest.raises(
            CorruptCheckpointError, match=f"^{re.escape(str(step_dir / INDEX))}: .*({message})"
        ):
            use(step_dir.parent)


def test_bytes_that_are_read_twice(step_dir: Path) -> None:
    """As a small file could become any amount of memory."""

    def edit(index: dict[str, Any]) -> None:
        file, types = index["files"][DATA], index["tensors"]["type"]
        for copy in range(200):
            index["tree"]["dict"][f"copy {copy}"] = {"tensor": len(types)}
            file["tensors"].append(len(types))
            types.append(types[0])
            file["offsets_bytes"].append(file["offsets_bytes"][0])
            file["checksums"] += file["checksums"][:16]

    edit_index(step_dir, edit)
    with pytest.raises(
        CorruptCheckpointError, match=f"tensors .* and .* share bytes of {DATA}, from byte "
    ):
        load(step_dir.parent)


def test_a_long_key_above_many_tensors_makes_no_long_names(step_dir: Path) -> None:
    """As an index of some bytes could become their square in memory."""

    def edit(index: dict[str, Any]) -> None:
        index["tree"] = {"dict": {"k" * 2000: index["tree"]}}

    edit_index(step_dir, edit)
    with pytest.raises(CorruptCheckpointError, match="tree: tensor 0 has no name"):
        load(step_dir.parent)


def test_a_damaged_small_tensor_is_named(step_dir: Path) -> None:
    """Adjacent ones are read together and checked each by itself."""
    intact = (step_dir / DATA).read_bytes()
    index = decode_index((step_dir / INDEX).read_bytes(), INDEX)
    for name, tensor in index.tensors.items():
        for shard in tensor.shards:
            damaged = bytearray(intact)
            damaged[shard.offset_bytes + shard.size_bytes - 1] ^= 1
            (step_dir / DATA).write_bytes(damaged)
            for use in (load, verify):
                with pytest.raises(
                    CorruptCheckpointError, match=f"{DATA}: tensor '{re.escape(name)}' has checksum"
                ):
                    use(step_dir.parent)


def test_many_small_tensors_have_a_small_index(tmp_path: Path) -> None:
    count = 10_000
    state = {f"layers.{i}.weight": torch.full((8,), float(i)) for i in range(count)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": state}).wait()
        assert (tmp_path / "step-00000002" / INDEX).stat().st_size < 80 * count
        loaded = checkpointer.load()["model"]
        template = {name: torch.zeros(8) for name in state}
        checkpointer.load({"model": template})
    verify(tmp_path)
    expected = torch.cat([*state.values()])
    for found in (loaded, template):
        assert list(found) == list(state)
        assert torch.equal(torch.cat([*found.values()]), expected)
