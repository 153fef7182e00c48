"""Saving in the background, errors, retention and the lock, in one process."""

import errno
import math
import os
import resource
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gcore_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from gcore_ckpt.storage.local import LocalStorage


class Gate:
    """Holds each commit back until `opened` is set, and fails those of the steps in `failing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.failing: set[int] = set()
        commit = LocalStorage.commit

        def gated(
            storage: LocalStorage, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]
        ) -> None:
            assert self.opened.wait(10)
            if step in self.failing:
                raise OSError(f"no space for {step}")
            commit(storage, attempt, step, index, sizes)

        monkeypatch.setattr(LocalStorage, "commit", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_save_returns_before_the_write_ends(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(3, {"x": torch.ones(2)})
        assert not handle.done()
        assert checkpointer.steps() == []
        with pytest.raises(TimeoutError, match=r"step 3 is still being written after 0\.01 s"):
            handle.wait(timeout_s=0.01)
        gate.opened.set()
        handle.wait()
        assert handle.done()
        assert checkpointer.steps() == [3]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_save_waits_when_too_many_are_in_flight(
    tmp_path: Path, gate: Gate, max_in_flight: int
) -> None:
    with Checkpointer(tmp_path, max_in_flight=max_in_flight) as checkpointer:
        for step in range(max_in_flight):
            checkpointer.save(step, step)
        one_more = threading.Thread(target=checkpointer.save, args=(9, 9))
        one_more.start()
        one_more.join(0.05)
        assert one_more.is_alive()
        gate.opened.set()
        one_more.join(10)
        checkpointer.wait()
        assert checkpointer.steps() == [*range(max_in_flight), 9]


def test_error_is_raised_by_the_handle_and_then_nowhere_else(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    gate.failing = {1}
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {})
        with pytest.raises(
            CheckpointWriteError, match=f"saving step 1 to {tmp_path} failed: no space for 1"
        ):
            handle.wait()
        assert handle.done()
        gate.failing = set()
        checkpointer.save(1, {}).wait()
        checkpointer.wait()


def test_uncollected_error_is_raised_once_by_what_comes_next(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    gate.failing = {1, 2, 3, 4}
    checkpointer = Checkpointer(tmp_path, max_in_flight=2)
    checkpointer.save(1, {})
    with pytest.raises(CheckpointWriteError, match="step 1"):
        checkpointer.wait()
    gate.opened.clear()
    checkpointer.save(2, {})
    checkpointer.save(3, {})
    gate.opened.set()
    with pytest.raises(CheckpointWriteError, match="step 2") as caught:
        checkpointer.wait()
    assert caught.value.__notes__ == [f"and saving step 3 to {tmp_path} failed: no space for 3"]
    checkpointer.save(4, {})
    with pytest.raises(CheckpointWriteError, match="step 4"):
        checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpointer.save(5, {})
    assert list(tmp_path.glob("step-*")) == []


def test_one_failed_save_costs_one_step_and_two_in_a_row_are_raised(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.opened.set()
    checkpointer = Checkpointer(tmp_path)
    for step in range(1, 6):
        gate.failing = {2, 4}
        checkpointer.save(step, {})
    with pytest.raises(CheckpointWriteError, match="saving step 2 ") as caught:
        checkpointer.wait()
    assert caught.value.__notes__ == [f"and saving step 4 to {tmp_path} failed: no space for 4"]
    assert checkpointer.steps() == [1, 3, 5]
    failures = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert failures == [
        f"saving step {step} to {tmp_path} failed: no space for {step}" for step in (2, 4)
    ]
    gate.failing = {6, 7}
    checkpointer.save(6, {})
    checkpointer.save(7, {})
    with pytest.raises(CheckpointWriteError, match="saving step 6 "):
        checkpointer.save(8, {})
    checkpointer.save(7, {})
    with pytest.raises(CheckpointWriteError, match="saving step 7 "):
        checkpointer.close()


def test_lost_checkpoint_does_not_hide_the_error_of_the_training_loop(
    tmp_path: Path, gate: Gate
) -> None:
    gate.opened.set()
    gate.failing = {1}

    def loop() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {})
            raise KeyError("loop")

    with pytest.raises(KeyError, match="loop") as caught:
        loop()
    assert caught.value.__notes__ == [
        f"and a checkpoint was lost: saving step 1 to {tmp_path} failed: no space for 1"
    ]


def test_existing_step_is_refused(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        checkpointer.save(1, "first")
        with pytest.raises(
            CheckpointWriteError, match=f"step 1 is being saved to {tmp_path} already"
        ):
            checkpointer.save(1, "second")
        gate.opened.set()
        checkpointer.wait()
        with pytest.raises(CheckpointWriteError, match="already holds step 1"):
            checkpointer.save(1, "second")
        assert checkpointer.load(step=1) == "first"


def test_keep_deletes_the_lowest_steps_but_never_the_new_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, step)
        checkpointer.wait()
        assert checkpointer.steps() == [20, 30]
        checkpointer.save(5, 5)
        checkpointer.wait()
        assert checkpointer.steps() == [5, 30]
    with Checkpointer(tmp_path, keep=6) as checkpointer:
        for step in (40, 50, 60):
            checkpointer.save(step, step)
        checkpointer.wait()
        assert checkpointer.steps() == [5, 30, 40, 50, 60]


def test_a_step_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(storage: LocalStorage, step: int) -> None:
        raise OSError(f"no way to delete {step}")

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {}).wait()
        monkeypatch.setattr(LocalStorage, "remove", fail)
        checkpointer.save(2, {})
        checkpointer.save(3, {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        expected = f"{tmp_path}: step 1 cannot be deleted, and is kept: no way to delete 1"
        assert caplog.messages.count(expected) == 2
        monkeypatch.undo()
        checkpointer.save(4, {})
        checkpointer.wait()
        assert checkpointer.steps() == [4]


def test_keep_every_keeps_multiples_for_good(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_every=100) as checkpointer:
        for step in range(50, 400, 50):
            checkpointer.save(step, step)
        checkpointer.wait()
        assert checkpointer.steps() == [100, 200, 300, 350]


@pytest.mark.parametrize(("best_mode", "expected"), [("max", [2, 5, 7]), ("min", [3, 5, 7])])
def test_the_best_steps_stay(
    tmp_path: Path, best_mode: Literal["max", "min"], expected: list[int]
) -> None:
    metrics = {1: 0.5, 2: 0.9, 3: 0.1, 4: math.nan, 5: None}
    options: dict[str, Any] = {"keep": 2, "keep_every": 5, "keep_best": 1, "best_mode": best_mode}
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step, metric in metrics.items():
            checkpointer.save(step, step, metric=metric)
    with Checkpointer(
        tmp_path, **options
    ) as checkpointer:  # which reads the metrics of the steps that are there
        for step in (6, 7):
            checkpointer.save(step, step, metric=0.5)
    assert checkpointer.steps() == [*expected[:2], 6, *expected[2:]]


def test_delete(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, step)
        checkpointer.delete(2)
        assert checkpointer.steps() == [1, 3]
        with pytest.raises(
            CheckpointNotFoundError, match=r"no step 2 to delete; its committed steps are \[1, 3\]"
        ):
            checkpointer.delete(2)
        checkpointer.delete(3)
        checkpointer.save(2, "again").wait()
        assert checkpointer.load() == "again"


def test_steps_are_committed_folders_in_numeric_order(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "none").steps() == []
    with Checkpointer(tmp_path) as checkpointer:
        for step in (123456789, 7):
            checkpointer.save(step, step)
        checkpointer.wait()
        for name in (".tmp-step-00000001-abc", "step-1", "step-000000002", "step-00000003.bak"):
            (tmp_path / name).mkdir()
        (tmp_path / "step-00000004").touch()
        assert checkpointer.steps() == [7, 123456789]
        assert checkpointer.load(step="latest") == 123456789


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path} holds no committed step"):
        checkpointer.load()
    with checkpointer:
        checkpointer.save(2, {})
    with pytest.raises(
        CheckpointNotFoundError, match=r"holds no step 1; its committed steps are \[2\]"
    ):
        checkpointer.load(step=1)


def test_opening_for_saving_removes_leftovers_and_reading_does_not(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-step-00000001-0123456789ab"
    leftover.mkdir()
    (leftover / "data-00000.safetensors").write_bytes(b"half")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == []
        assert leftover.exists()
        checkpointer.save(1, {})
        assert not leftover.exists()


def test_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1, {}).wait()
    with pytest.raises(CheckpointLockedError, match=f"{tmp_path} is being written to by process "):
        second.save(2, {})
    assert second.load() == {}
    first.close()
    second.save(2, {})
    second.close()


def test_a_writer_whose_folder_was_replaced_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    first = Checkpointer(path)
    first.save(1, {}).wait()
    shutil.rmtree(path)
    with Checkpointer(path) as second:
        second.save(1, {"by": "second"}).wait()
        with pytest.raises(
            CheckpointWriteError,
            match=r"saving step 2 .*/\.lock is not the file that this writer has",
        ):
            first.save(2, {}).wait()
        with pytest.raises(
            CheckpointLockedError, match=r"\.lock is not the file that this writer has locked"
        ):
            first.rollback(1)
        second.save(3, {}).wait()
    assert Checkpointer(path).steps() == [1, 3]
    shutil.rmtree(path)
    with pytest.raises(CheckpointWriteError, match=f"{path} was deleted or replaced meanwhile"):
        first.save(4, {}).wait()
    first.close()


def test_memory_that_there_is_none_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("gcore_ckpt.saving.host_memory._Pages", refuse)
            with pytest.raises(
                CheckpointWriteError,
                match=r"a save needs \d+ bytes of host memory .*Cannot allocate",
            ):
                checkpointer.save(1, {"x": torch.ones(3)})
        checkpointer.save(2, {"x": torch.ones(3)}).wait()
        assert checkpointer.steps() == [2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(tmp_path: Path, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    message = r"state\['m'\]\['x'\] is a nested tensor; expected a dense one"
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=message):
        checkpointer.save(1, {"m": {"x": nested}})


def test_staging_memory_is_reused_and_grows(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step, size in enumerate((10, 1000, 0, 100)):
            checkpointer.save(step, torch.arange(size))
        checkpointer.wait()
        assert [len(checkpointer.load(step=step)) for step in range(4)] == [10, 1000, 0, 100]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match="cannot be opened for saving"):
        Checkpointer(tmp_path / "file" / "checkpoints").save(1, {})


def test_leftover_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = tmp_path / ".tmp-step-00000001-0123456789ab"
    leftover.mkdir()

    def fail(path: Path) -> None:
        raise PermissionError(f"no way to remove {path.name}")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr("gcore_ckpt.storage.local.shutil.rmtree", fail)
        checkpointer.save(1, {}).wait()
    problem = f"cannot be removed: no way to remove {leftover.name}"
    assert caplog.messages == [f"{leftover}, which a dead writer has left, {problem}"]


def test_a_full_disk_keeps_no_lock_and_lets_steps_be_deleted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {})
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    storage = LocalStorage(tmp_path)
    checkpointer = Checkpointer(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard_limit))  # no byte can be written
    try:
        storage.acquire()
        storage.remove(1)
        storage.release()
        with pytest.raises(CheckpointWriteError, match="File too large"):
            checkpointer.save(2, {}).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    checkpointer.save(3, {}).wait()
    checkpointer.close()
    assert checkpointer.steps() == [3]


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"x": 1})
        monkeypatch.chdir("elsewhere")
        checkpointer.save(2, {"x": 2}).wait()
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load() == {"x": 2}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_system_without_locks_links_and_syncs_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsync = os.fsync

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def sync_files(fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            refuse()
        fsync(fd)

    monkeypatch.setattr("gcore_ckpt.storage.local.fcntl.flock", refuse)
    monkeypatch.setattr("gcore_ckpt.storage.local.os.fsync", sync_files)
    monkeypatch.setattr("gcore_ckpt.storage.local.os.posix_fadvise", refuse)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    first = Checkpointer(tmp_path, incremental=True)
    state = {"frozen": torch.ones(50_000)}
    for step in (1, 2):
        first.save(step, state | {"x": step}).wait()
    assert torch.equal(first.load()["frozen"], state["frozen"])
    assert (
        f"{tmp_path} is on a file system without locks ([Errno 38] Function not implemented)"
        in caplog.text
    )
    assert (
        "cannot sync folders ([Errno 38] Function not implemented): a commit may not survive"
        in caplog.text
    )
    with Checkpointer(tmp_path) as second:
        second.save(3, state).wait()
        with pytest.raises(
            CheckpointWriteError, match="or has another writer on a file system without locks"
        ):
            first.save(4, state).wait()
        second.save(5, state)
    first.close()
    assert second.steps() == [1, 2, 3, 5]


def test_opening_for_saving_leaves_what_others_have_put_there(tmp_path: Path) -> None:
    hexes = "0123456789ab"
    foreign = [
        ".tmp-mine",
        ".tmp-step-1",
        f".tmp-hf-{hexes}",
        f".tmp-step-00000001-{hexes}.bak",
        f".tmp-STEP-{hexes}",
    ]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    files = [
        ".tmp-file",
        f".tmp-step-00000002-{hexes}",
    ]  # the second could be ours, were it a folder
    for name in files:
        (tmp_path / name).touch()
    (tmp_path / f".tmp-step-00000003-{hexes}").symlink_to(tmp_path / ".tmp-mine")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {}).wait()
    assert all((tmp_path / name / "precious").exists() for name in foreign)
    assert all((tmp_path / name).exists() for name in files)
    assert (tmp_path / f".tmp-step-00000003-{hexes}").is_symlink()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"keep is 0; expected None \(keep all steps\) or 1 or more"
    ):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep_every is 0; expected None or 1 or more"):
        Checkpointer(tmp_path, keep=1, keep_every=0)
    with pytest.raises(
        ValueError, match="keep_every is 10 and keep is None, which keeps all steps"
    ):
        Checkpointer(tmp_path, keep_every=10)
    with pytest.raises(
        ValueError, match="keep_best is 3 and keep is None, which keeps all steps; expected a keep"
    ):
        Checkpointer(tmp_path, keep_best=3)
    with pytest.raises(ValueError, match="best_mode is 'low'; expected 'max' or 'min'"):
        Checkpointer(tmp_path, best_mode="low")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_in_flight is 0; expected 1 or more"):
        Checkpointer(tmp_path, max_in_flight=0)
    with pytest.raises(ValueError, match="staging is 'half'; expected 'full' or 'chunked'"):
        Checkpointer(tmp_path, staging="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="timeout_s is 0; expected more than 0"):
        Checkpointer(tmp_path, timeout_s=0)
    with pytest.raises(
        ValueError, match="process_group is 'all'; expected 'world', None or a process group"
    ):
        Checkpointer(tmp_path, process_group="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"'ftp://x' names no place .*: a path is a local folder, s3://"
    ):
        Checkpointer("ftp://x")
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="step is -1; expected 0 or more"):
        checkpointer.save(-1, {})
    with pytest.raises(TypeError, match="step is True; expected an int"):
        checkpointer.save(True, {})
    with pytest.raises(
        TypeError,
        match=r"template is 3; expected a tree of tensors \(a step is given as step=...\)",
    ):
        checkpointer.load(3)
    with pytest.raises(ValueError, match="only and mmap are for loading without a template"):
        checkpointer.load({}, only=["a"])
