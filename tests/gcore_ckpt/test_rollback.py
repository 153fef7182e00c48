"""Going back to an earlier step: what is set aside, what is refused, and what a kill at any moment leaves."""

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from gcore_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    save,
    verify,
)
from gcore_ckpt.storage.local import LocalStorage, open_storage
from gcore_ckpt.storage.objects import Objects
from gcore_ckpt.tools.cli import main


class RankPool(Protocol):
    def run(
        self, function: str, *arguments: object, size: int, timeout_s: float = 60
    ) -> list[Any]: ...
    def errors(
        self, function: str, *arguments: object, size: int, timeout_s: float = 60
    ) -> list[str]: ...


class RankServer(Protocol):
    def pool(self, size: int) -> AbstractContextManager[RankPool]: ...


@pytest.fixture(params=["folder", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "ckpt") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def save_steps(path: str | Path, *steps: int, run: str = "old", **options: Any) -> None:
    with Checkpointer(path, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"step": step, "run": run, "x": torch.full((5,), step)})


def runs(path: str | Path) -> dict[int, str]:
    checkpointer = Checkpointer(path)
    for step in checkpointer.steps():
        verify(path, step)
    return {step: checkpointer.load(step=step)["run"] for step in checkpointer.steps()}


def test_a_run_that_goes_back_keeps_its_own_steps(path: str) -> None:
    save_steps(path, 10, 20, 30, 40, 50, keep=None, incremental=True)
    with Checkpointer(path, keep=2, incremental=True) as checkpointer:
        assert checkpointer.load(step=20)["step"] == 20
        assert checkpointer.rollback(20) == [30, 40, 50]
        assert checkpointer.steps() == [10, 20]
        assert checkpointer.load()["step"] == 20
        for step in (30, 40, 50, 60):
            checkpointer.save(
                step, {"step": step, "run": "new", "x": torch.full((5,), step)}
            ).wait()
            found = checkpointer.load()
            assert (found["step"], found["run"]) == (step, "new")
    assert runs(path) == {50: "new", 60: "new"}
    assert open_storage(path).steps_set_aside() == [30, 40, 50]
    with Checkpointer(path) as checkpointer:
        assert checkpointer.rollback(50) == [60]
        assert checkpointer.rollback(50) == []
        checkpointer.save(60, {"step": 60, "run": "third", "x": torch.ones(5)})
    assert runs(path) == {50: "new", 60: "third"}
    assert open_storage(path).steps_set_aside() == [30, 40, 50, 60]
    assert main(["prune", path, "--set-aside"]) == 0
    assert open_storage(path).steps_set_aside() == []
    assert runs(path) == {50: "new", 60: "third"}


@pytest.mark.parametrize("step", [30, 45, 50])
def test_a_save_that_is_not_above_the_latest_is_refused_before_anything_is_written(
    path: str, step: int
) -> None:
    save_steps(path, 20, 50)
    with Checkpointer(path, keep=2) as checkpointer:
        checkpointer.load(step=20)
        with pytest.raises(CheckpointWriteError, match=r"50.*first call rollback") as caught:
            checkpointer.save(step, {"x": torch.ones(3)})
        assert str(step) in str(caught.value)
        assert checkpointer.steps() == [20, 50]
        checkpointer.rollback(20)
        checkpointer.save(step, {"run": "new"})
    assert runs(path) == {20: "old", step: "new"}


def test_a_new_process_that_saves_below_the_latest_is_refused(path: str) -> None:
    save_steps(path, 20, 50)
    with pytest.raises(
        CheckpointWriteError, match="step is 30; expected more than 50, the latest step that"
    ):
        save(path, {}, step=30)
    with Checkpointer(path) as checkpointer:
        checkpointer.save(60, {"run": "new"})
        checkpointer.save(
            55, {"run": "new"}
        )  # below one of its own: what order it saves in is its own affair
        checkpointer.wait()
        checkpointer.load(step=20)
        with pytest.raises(CheckpointWriteError, match="step is 30; expected more than 60"):
            checkpointer.save(30, {})
        checkpointer.save(70, {"run": "new"})
    assert runs(path) == {20: "old", 50: "old", 55: "new", 60: "new", 70: "new"}


def test_what_cannot_be_rolled_back_to(path: str) -> None:
    save_steps(path, 20, 50)
    with Checkpointer(path) as checkpointer:
        with pytest.raises(
            CheckpointNotFoundError,
            match=r"no step 30 to roll back to; its committed steps are \[20",
        ):
            checkpointer.rollback(30)
        with pytest.raises(TypeError, match="step is 'latest'; expected an int"):
            checkpointer.rollback("latest")  # pyright: ignore[reportArgumentType]
        assert checkpointer.steps() == [20, 50]
    with pytest.raises(CheckpointError, match="is closed"):
        checkpointer.rollback(20)


def test_saves_in_flight_are_set_aside_too(path: str) -> None:
    with Checkpointer(path, max_in_flight=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"run": "old"})
        assert checkpointer.rollback(1) == [2, 3]
        assert checkpointer.steps() == [1]


def test_a_damaged_record_is_an_error_and_nothing_is_loaded(tmp_path: Path) -> None:
    save_steps(tmp_path, 20, 50)
    (tmp_path / "rollback.json").write_text(json.dumps({"pending": "all"}))
    with pytest.raises(
        CorruptCheckpointError, match=f"{tmp_path}/rollback.json: format is 'None'; expected"
    ):
        Checkpointer(tmp_path).load()


CHILD = """
import os, signal, sys
from gcore_ckpt.storage.local import LocalStorage

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "shutil.rmtree")
storage = LocalStorage(sys.argv[1])
left = None

def kill_at_last(event, arguments):
    global left
    if left is not None and event in EVENTS:
        left -= 1
        if left == 0:
            os._exit(9)

sys.addaudithook(kill_at_last)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        storage = LocalStorage(line.split()[1])
        left = int(line.split()[0])
        storage.acquire()
        storage.set_aside([30, 40, 50])
        left = None
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_old_truth_or_the_new(tmp_path: Path) -> None:
    save_steps(tmp_path / "origin", 10, 20, 30, 40, 50)
    truths: list[Sequence[int]] = []
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        code, number = 9, 0
        while code == 9:
            number += 1
            path = tmp_path / f"copy-{number}"
            shutil.copytree(tmp_path / "origin", path)
            print(number, path, file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            steps = Checkpointer(path).steps()
            truths.append(steps)
            assert steps in ([10, 20, 30, 40, 50], [10, 20]), f"killed at event {number}"
            assert sorted([*steps, *open_storage(path).steps_set_aside()]) == [10, 20, 30, 40, 50]
            with Checkpointer(path) as checkpointer:  # the next writer completes it or begins it
                assert checkpointer.rollback(20) == [step for step in steps if step > 20]
                checkpointer.save(30, {"run": "new"})
            assert runs(path) == {10: "old", 20: "old", 30: "new"}
            assert sorted(entry.name[:9] for entry in path.glob(".tmp-*")) == []
            shutil.rmtree(path)
        server.stdin.close()
    assert code == 0
    assert number > 8
    assert [10, 20] in truths
    assert truths[0] != [10, 20]


def test_a_failure_halfway_is_completed_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10, 20, 30)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "step-00000030":
            raise OSError("no way to rename")
        return rename(path, target)

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointWriteError, match="back to step 10 failed: no way to rename"):
            checkpointer.rollback(10)
        assert checkpointer.steps() == [10]
        monkeypatch.undo()
        assert checkpointer.rollback(10) == []
        checkpointer.save(30, {"run": "new"})
    assert runs(tmp_path) == {10: "old", 30: "new"}
    assert LocalStorage(tmp_path).steps_set_aside() == [20, 30]


def test_removing_a_step_of_an_object_store_keeps_what_was_set_aside_under_its_number() -> None:
    path = f"memory://{uuid.uuid4().hex}"
    save_steps(path, 1, 2)
    with Checkpointer(path, keep=1) as checkpointer:
        checkpointer.rollback(1)
        for step in (2, 3):
            checkpointer.save(step, {"run": "new"})
    storage = open_storage(path)
    assert storage.steps() == [3]
    assert storage.steps_set_aside() == [2]
    objects = Objects(path)
    kept = {
        key.rpartition("/")[2] for key in objects.list_keys() if key.startswith("step-00000002/")
    }
    assert {"data-00000.safetensors", "index.json"} <= kept
    storage.remove_set_aside()
    assert not [key for key in objects.list_keys() if key.startswith("step-00000002/")]


@pytest.mark.slow
def test_all_ranks_go_back_together(rank_server: RankServer, tmp_path: Path) -> None:
    with rank_server.pool(3) as ranks:
        ranks.run("save_steps", str(tmp_path), [1, 2, 3], {}, size=3)
        errors = ranks.errors("save_after_loading", str(tmp_path), 1, 2, False, size=3)
        assert all("first call rollback" in error for error in errors), errors
        assert ranks.run("save_after_loading", str(tmp_path), 1, 2, True, size=3) == [[2, 3]] * 3
        assert Checkpointer(tmp_path).steps() == [1, 2]
        assert ranks.run("load_step", str(tmp_path), 2, size=3) == [True] * 3
        errors = ranks.errors("roll_back", str(tmp_path), 7, size=3)
    assert all(
        "CheckpointNotFoundError" in error and "no step 7 to roll back to" in error
        for error in errors
    ), errors
