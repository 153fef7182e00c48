"""Checkpoints of torch.distributed.checkpoint are taken over, and pickles that would do something are not run."""

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from gcore_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
)
from gcore_ckpt.tools.dcp import import_dcp


def save(folder: Path, state: dict[str, Any]) -> Path:
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        save_with_dcp(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", {"w": torch.arange(6.0).view(2, 3), "n": {"lr": 0.1}})


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def test_what_dcp_saved_in_one_process(tmp_path: Path) -> None:
    state: dict[str, Any] = trained() | {
        "list": [1, 2.5, torch.ones(2, dtype=torch.bfloat16), {"x": torch.zeros(3, 0)}],
        "holes": [torch.ones(1), {}, torch.zeros(1)],
        "tuple": (1, "two", None, True),
        "scalar": torch.tensor(7),
        "view": torch.arange(12).view(3, 4).t(),
        "ordered": OrderedDict(a=1),
    }
    import_dcp(save(tmp_path / "dcp", state), tmp_path / "ckpt", step=5)
    found = Checkpointer(tmp_path / "ckpt").load(step=5)
    assert list(found) == list(state)
    for name, tensor in state["model"].items():
        assert torch.equal(found["model"][name], tensor)
    for number, moments in state["optim"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(found["optim"]["state"][str(number)][name], tensor)
    assert found["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert found["list"][:2] == [1, 2.5]
    assert torch.equal(found["list"][2], state["list"][2])
    assert found["list"][3]["x"].shape == (3, 0)
    assert torch.equal(found["holes"][0], torch.ones(1))
    assert found["holes"][1] is None
    assert found["tuple"] == state["tuple"]
    assert torch.equal(found["scalar"], state["scalar"])
    assert torch.equal(found["view"], state["view"])
    assert found["ordered"] == {"a": 1}


def test_what_two_ranks_saved(tmp_path: Path) -> None:
    script = Path(__file__).with_name("save_with_dcp.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, script, tmp_path],
        env=environment,
        check=True,
        timeout=600,
        stderr=subprocess.PIPE,
    )
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    import_dcp(tmp_path / "dcp", tmp_path / "ckpt")
    found = Checkpointer(tmp_path / "ckpt").load()
    assert found["step"] == 12
    assert torch.equal(found["model"]["rows"], torch.arange(35.0).view(7, 5))
    assert torch.equal(found["model"]["columns"], torch.arange(12).view(4, 3))
    assert torch.equal(found["model"]["one"], torch.ones(1, 2, dtype=torch.bfloat16))
    assert torch.equal(found["model"]["copies"], torch.full((3,), 2.5))


def test_without_paths_names_stay_flat(tmp_path: Path, source: Path) -> None:
    edit(source, lambda metadata: replace(metadata, planner_data=None))
    import_dcp(source, tmp_path / "ckpt")
    assert list(Checkpointer(tmp_path / "ckpt").load()) == ["w", "n.lr"]


def test_metadata_as_older_versions_of_torch_pickled_them(tmp_path: Path, source: Path) -> None:
    def change(metadata: Metadata) -> Metadata:
        tensor = metadata.state_dict_metadata["w"]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.properties = OldTensorProperties(dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
        return metadata

    edit(source, change)
    import_dcp(source, tmp_path / "ckpt")
    assert torch.equal(Checkpointer(tmp_path / "ckpt").load()["w"], torch.arange(6.0).view(2, 3))


def test_where_it_cannot_be_saved(tmp_path: Path, source: Path) -> None:
    import_dcp(source, tmp_path / "ckpt", step=3)
    with pytest.raises(
        CheckpointWriteError, match="already holds step 3; a committed step is never overwritten"
    ):
        import_dcp(source, tmp_path / "ckpt", step=3)
    with pytest.raises(
        CheckpointNotFoundError,
        match=r"holds no \.metadata, as torch\.distributed\.checkpoint writes",
    ):
        import_dcp(tmp_path, tmp_path / "ckpt", step=4)
    save(tmp_path / "set", {"x": 1j})
    with pytest.raises(
        CheckpointWriteError,
        match=r"holds what cannot be saved: state\['x'\] is a builtins.complex",
    ):
        import_dcp(tmp_path / "set", tmp_path / "ckpt", step=4)


class Creates:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def assert_refused(source: Path, path: Path, message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        import_dcp(source, path)
    assert not path.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_not_run(tmp_path: Path, source: Path, protocol: int) -> None:
    bomb = Creates(tmp_path / "created")
    (source / ".metadata").write_bytes(pickle.dumps(Metadata({}, bomb, {}), protocol))
    assert_refused(
        source, tmp_path / "ckpt", r"\.metadata: names [\w.]+, which metadata of DCP do not hold"
    )
    assert not (tmp_path / "created").exists()


def test_a_malicious_value_is_not_run(tmp_path: Path) -> None:
    source = save(tmp_path / "dcp", {"x": Creates(tmp_path / "created")})
    message = r"'x': __0_0.distcp: torch.load\(weights_only=True\) refuses what is at byte 0: .*"
    assert_refused(source, tmp_path / "ckpt", message)
    assert not (tmp_path / "created").exists()


def test_a_pickle_cannot_change_the_classes_that_it_names(tmp_path: Path, source: Path) -> None:
    # GLOBAL, then BUILD with (None, {"args": 1}), which sets an attribute of what is below it: here of a class.
    module = MetadataIndex.__module__
    data = f"c{module}\nMetadataIndex\n(N(S'fqn'\nI1\ndtb.".encode()
    (source / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        import_dcp(source, tmp_path / "ckpt")
    assert not hasattr(MetadataIndex, "fqn")


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "torch load",
        "torch.storage _load_from_bytes",
        "torch nn",
        "os system",
        "torch Size.count",
    ],
)
def test_names_that_metadata_do_not_hold(tmp_path: Path, source: Path, name: str) -> None:
    module, _, attribute = name.partition(" ")
    (source / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    assert_refused(
        source, tmp_path / "ckpt", f"names {module}.{attribute}, which metadata of DCP do not hold"
    )


def edit(source: Path, change: Callable[[Metadata], object]) -> None:
    metadata = FileSystemReader(source).read_metadata()
    (source / ".metadata").write_bytes(pickle.dumps(change(metadata)))


def with_storage(**fields: object) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        for info in metadata.storage_data.values():
            vars(info).update(fields)
        return metadata

    return change


def with_tensor(
    size: list[int] | None = None, *, dtype: object = torch.float32
) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        tensor = metadata.state_dict_metadata["w"]
        assert isinstance(tensor, TensorStorageMetadata)
        properties = TensorProperties(dtype=dtype)  # pyright: ignore[reportArgumentType]
        metadata.state_dict_metadata["w"] = replace(
            tensor, size=torch.Size(size or [2, 3]), properties=properties
        )
        return metadata

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_storage(relative_path="../secret"),
            ": file name '../secret' is not a plain name inside the folder",
        ),
        (with_storage(relative_path="other"), r"No such file"),
        (
            with_storage(length=10**9),
            r"__0_0.distcp has \d+ bytes; expected more: it was cut short",
        ),
        (with_storage(length=3), "fewer bytes than its shape"),
        (with_storage(offset=-1), "size is -1; expected 0 or more"),
        (with_storage(offset=40), r"torch.load\(weights_only=True\) refuses what is at byte 40"),
        (
            with_storage(transform_descriptors=["zstd"]),
            "was transformed by an extension of DCP; expected plain files",
        ),
        (with_tensor([2, 4]), "do not hold each of its 8 elements once"),
        (with_tensor([2**30, 2**30]), "do not hold each of its 1152921504606846976 elements once"),
        (with_tensor([2**40, 2**40]), "is too large"),
        (with_tensor([1, 3]), "has a chunk outside of its shape"),
        (with_tensor(dtype=torch.int32), "holds something else at byte .* than a tensor of"),
        (with_tensor(dtype=3), "has a int for its dtype"),
        (
            lambda metadata: replace(metadata, storage_data={}),
            "holds a NoneType in the place of a _StorageInfo",
        ),
        (
            lambda metadata: replace(metadata, storage_data=None),
            "storage_data is None; expected dict",
        ),
        (lambda metadata: replace(metadata, planner_data={"w": ("n.lr",)}), "is another's"),
        (
            lambda metadata: replace(metadata, planner_data={"w": ("n.lr", "x")}),
            "is another's|leads through a value",
        ),
        (
            lambda metadata: replace(metadata, planner_data={"w": ()}),
            "a path is a tuple of 0 parts",
        ),
        (
            lambda metadata: replace(metadata, planner_data={"w": ("l", 10**12)}),
            "a list has 1000000000001 items",
        ),
        (lambda _: MetadataIndex("w"), "holds a MetadataIndex in the place of a Metadata"),
        (lambda _: [1], "holds a list in the place of a Metadata"),
    ],
)
def test_damaged_metadata(
    tmp_path: Path, source: Path, change: Callable[[Metadata], object], message: str
) -> None:
    edit(source, change)
    assert_refused(source, tmp_path / "ckpt", message)


@pytest.mark.parametrize("size_bytes", [0, 1, 50, -1])
def test_truncated_files(tmp_path: Path, source: Path, size_bytes: int) -> None:
    for name in (".metadata", "__0_0.distcp"):
        data = (source / name).read_bytes()
        (source / name).write_bytes(data[:size_bytes])
        assert_refused(source, tmp_path / "ckpt", name)
        (source / name).write_bytes(data)
