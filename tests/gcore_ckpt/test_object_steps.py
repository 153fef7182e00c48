"""Steps of an object store that were uploaded as folders, and steps whose files lie in earlier ones."""

import random
import re
import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from gcore_ckpt import (
    Checkpointer,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    verify,
)
from gcore_ckpt.storage.object_store import ObjectStorage
from gcore_ckpt.storage.objects import Objects
from gcore_ckpt.tools.cli import main


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def upload(folder: Path, url: str, names: Iterable[str] | None = None) -> None:
    """Upload a folder, file by file in any order, as `aws s3 sync` does."""
    objects = Objects(url)
    for name in names or every_file(folder):
        objects.write(name, (folder / name).read_bytes())


def every_file(folder: Path) -> list[str]:
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    random.Random(0).shuffle(names)
    return names


def keys(url: str, pattern: str = "") -> list[str]:
    return sorted(key for key in Objects(url).list_keys() if re.search(pattern, key))


def save(path: str | Path, *steps: int, frozen: float = 1.0, keep: int | None = None) -> None:
    with Checkpointer(path, incremental=True, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(
                step,
                {
                    "step": step,
                    "frozen": torch.full((50_000,), frozen),
                    "x": torch.full((9,), step),
                },
            )


def check(path: str, *steps: int, frozen: float = 1.0) -> None:
    assert Checkpointer(path).steps() == list(steps)
    for step in steps:
        verify(path, step)
        state = Checkpointer(path).load(step=step)
        assert state["step"] == step
        assert torch.equal(state["frozen"], torch.full((50_000,), frozen))
        assert torch.equal(state["x"], torch.full((9,), step))


def test_an_uploaded_folder_is_read_like_a_local_one(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 10, 20, 30, 40)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.rollback(30)
    (tmp_path / ".tmp-step-00000050-0123456789ab").mkdir()
    (tmp_path / ".tmp-step-00000050-0123456789ab" / "index.json").write_text("{}")
    upload(tmp_path, url)
    check(url, 10, 20, 30)
    assert main(["ls", url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "10",
        "20",
        "30",
    ]
    assert main(["verify", url, "--all"]) == 0
    with pytest.raises(
        CheckpointNotFoundError, match=r"no step 40; its committed steps are \[10, 20, 30\]"
    ):
        Checkpointer(url).load(step=40)


def test_a_step_that_is_uploaded_in_part_is_no_step(url: str, tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    upload(tmp_path, url, [name for name in every_file(tmp_path) if "step-00000010/" in name])
    reader = Checkpointer(url)
    names = [name for name in every_file(tmp_path) if "step-00000020/" in name]
    assert len(names) == 3
    for name in sorted(names, reverse=True):  # the index before the data
        assert reader.steps() == Checkpointer(url).steps() == [10]
        assert Checkpointer(url).load()["step"] == 10
        upload(tmp_path, url, [name])
    assert reader.steps() == [10, 20]
    check(url, 10, 20)


@pytest.mark.parametrize("kept_bytes", [0, 100, -1])
def test_an_uploaded_file_that_is_short_is_an_error(
    url: str, tmp_path: Path, kept_bytes: int
) -> None:
    save(tmp_path, 10)
    upload(tmp_path, url)
    name = "step-00000010/data-00000.safetensors"
    data = (tmp_path / name).read_bytes()
    Objects(url).write(name, data[:kept_bytes])
    size = len(data[:kept_bytes])
    with pytest.raises(
        CorruptCheckpointError, match=f"{name}: has {size} bytes; expected {len(data)}"
    ):
        Checkpointer(url).load()


def test_an_uploaded_index_that_is_damaged_is_an_error(url: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    upload(tmp_path, url)
    index = (tmp_path / "step-00000010/index.json").read_bytes()
    Objects(url).write(
        "step-00000010/index.json", index.replace(b'"saved_at":"2', b'"saved_at":"1')
    )
    assert Checkpointer(url).steps() == [10]
    with pytest.raises(CorruptCheckpointError, match=r"step-00000010/index.json: checksum is "):
        Checkpointer(url).load()


def test_a_run_continues_on_an_uploaded_folder(url: str, tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    upload(tmp_path, url)
    with Checkpointer(url) as checkpointer:
        with pytest.raises(CheckpointWriteError, match="already holds step 20"):
            checkpointer.save(20, {})
        storage = ObjectStorage(url)
        with pytest.raises(FileExistsError, match="holds step 20 already"):
            storage.commit(storage.begin(20), 20, b"", {})
    save(url, 30, 40, keep=2)
    check(url, 30, 40)
    # What is left of the uploaded steps is the file with the frozen tensor, which both steps refer to.
    [frozen] = keys(url, r"step-000000[12]0/.*safetensors")
    assert frozen == "step-00000020/step-00000010-data-00000.safetensors"
    save(url, 50, 60, frozen=2.0, keep=2)
    check(url, 50, 60, frozen=2.0)
    save(url, 70, frozen=2.0, keep=1)
    assert keys(url, r"step-000000[1234]0/") == []


def test_uploaded_steps_are_set_aside_and_deleted(url: str, tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    upload(tmp_path, url)
    with Checkpointer(url) as checkpointer:
        assert checkpointer.rollback(10) == [20, 30]
    check(url, 10)
    save(url, 20)
    check(url, 10, 20)
    assert ObjectStorage(url).steps_set_aside() == [20, 30]
    assert main(["prune", url, "--set-aside"]) == 0
    assert main(["rm", url, "10"]) == 0
    check(url, 20)
    save(url, 30, frozen=3.0, keep=1)
    check(url, 30, frozen=3.0)
    save(url, 40, frozen=3.0, keep=2)
    assert keys(url, r"step-000000[12]0/") == []


def test_an_incremental_save_writes_what_has_changed(url: str) -> None:
    save(url, 1, 2, 3, 4)
    check(url, 1, 2, 3, 4)
    sizes = {key: len(Objects(url).read(key).value) for key in keys(url, "safetensors")}
    assert [key.partition("/")[0] for key, size in sizes.items() if size > 100_000] == [
        "step-00000001"
    ]
    assert len(sizes) == 4
    for step in (1, 2):
        with Checkpointer(url):
            ObjectStorage(url).remove(step)
        check(url, *range(step + 1, 5))
    assert [key.partition("/")[0] for key in keys(url, "safetensors")] == [
        f"step-0000000{step}" for step in (1, 3, 4)
    ]


def test_what_a_kept_step_refers_to_outlives_its_own_step(url: str) -> None:
    for step in range(1, 7):
        save(url, step, keep=2)
        check(url, *range(max(1, step - 1), step + 1))
    assert len(keys(url, "step-00000001/.*safetensors")) == 1
    with Checkpointer(url) as checkpointer:
        assert checkpointer.rollback(5) == [6]
    save(url, 6, 7, frozen=2.0, keep=1)
    check(url, 7, frozen=2.0)
    # What was set aside refers to it too.
    [kept] = keys(url, "step-00000001/.*safetensors")
    assert main(["prune", url, "--set-aside"]) == 0
    assert keys(url, kept)
    save(url, 8, frozen=2.0, keep=1)
    check(url, 8, frozen=2.0)
    assert [key.partition("/")[0] for key in keys(url, "step-0000000[1-7]/")] == ["step-00000006"]
    for step in (9, 10):
        save(url, step, frozen=3.0, keep=1)
        check(url, step, frozen=3.0)
    assert keys(url, "step-0000000[1-8]/") == []


def test_a_commit_that_links_to_what_is_gone_is_refused(url: str) -> None:
    save(url, 1)
    storage = ObjectStorage(url)
    attempt = storage.begin(2)
    storage.link_file(attempt, 1, "data-00000.safetensors", "step-00000001-data-00000.safetensors")
    ObjectStorage(url).remove(1)
    with pytest.raises(
        OSError, match=r"step-00000001/.*/data-00000.safetensors is missing; 5 bytes"
    ):
        storage.commit(attempt, 2, b"", {"step-00000001-data-00000.safetensors": 5})
    assert storage.steps() == []


@pytest.mark.parametrize("written", ["links.json", "committed"])
def test_a_death_in_an_incremental_commit_leaves_the_step_before(
    url: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1, 2)
    write = Objects.write

    def die(self: Objects, key: str, value: bytes | None, if_equal: bytes | None = None) -> bool:
        if key.endswith(written):
            raise KeyboardInterrupt
        return write(self, key, value, if_equal)

    storage = ObjectStorage(url)
    attempt = storage.begin(3)
    storage.link_file(
        attempt, 2, "step-00000001-data-00000.safetensors", "step-00000001-data-00000.safetensors"
    )
    size = len(Objects(url).read(keys(url, "step-00000001/.*safetensors")[0]).value)
    monkeypatch.setattr(Objects, "write", die)
    with pytest.raises(KeyboardInterrupt):
        storage.commit(attempt, 3, b"", {"step-00000001-data-00000.safetensors": size})
    monkeypatch.undo()
    check(url, 1, 2)
    save(url, 3, 4, keep=1)
    check(url, 4)
    assert attempt not in {key.rpartition("/")[0] for key in keys(url)}


def test_damaged_links(url: str) -> None:
    save(url, 1, 2)
    [links] = keys(url, "links.json")
    Objects(url).write(links, b'{"step-00000001-data-00000.safetensors": 1}')
    with pytest.raises(
        CorruptCheckpointError, match=r"links.json: step-00000001-.* is 1; expected str"
    ):
        Checkpointer(url).load()
    Objects(url).write(links, None)
    with pytest.raises(CorruptCheckpointError, match="the file is missing"):
        Checkpointer(url).load()
