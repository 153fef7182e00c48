"""What is on disk, and what ranks are notified of, when one of them dies or its disk does."""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rank_pool import RankServer
from waiting import wait_until

from gcore_ckpt import Checkpointer, verify
from gcore_ckpt.loading.loader import load_step
from gcore_ckpt.loading.reader import open_step
from gcore_ckpt.ranks.group import RankGroup
from gcore_ckpt.storage.local import open_storage

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GCORE_CKPT_KILLS", "12"))

HEARD_WITHIN_S = 60.0
"""Within which all ranks hear of the death of one: a tenth of how long they wait for one that is silent."""

NOBODY = 65534


def check_steps(path: Path, log: Path) -> None:
    """All that was acknowledged is there, and all that is there is whole."""
    steps = Checkpointer(path).steps()
    acknowledged = [int(step) for step in log.read_text().splitlines()]
    assert steps[-1:] >= acknowledged[-1:], "an acknowledged step is gone"
    assert steps
    for step in steps:
        verify(path, step)
        state = Checkpointer(path).load(step=step, only=["step", "rows", "sharded", "replicated"])
        assert state["step"] == step
        assert state["sharded"].shape == (sum(state["rows"]), 100)
        assert all((tensor == step).all() for tensor in (state["sharded"], *state["replicated"]))


@pytest.mark.parametrize("incremental", [False, True])
def test_kill_at_any_moment(rank_server: RankServer, tmp_path: Path, incremental: bool) -> None:
    path = tmp_path / "checkpoints"
    rng = random.Random(incremental)
    for number in range(-(-KILLS // 2)):
        size = rng.choice([3, 4])
        killed = rng.choice([[rng.randrange(size)], list(range(size))])
        log = tmp_path / f"log-{number}"
        survivors = [rank for rank in range(size) if rank not in killed]
        with rank_server.pool(size) as pool:
            pool.start(
                "save_for_ever",
                str(path),
                str(log),
                {"incremental": incremental},
                ranks=range(size),
            )
            wait_until(log.exists)
            time.sleep(rng.uniform(0.0, 0.1))
            for rank in killed:
                pool.kill(rank)
            for outcome in pool.collect(survivors, HEARD_WITHIN_S):
                assert f"rank {killed[0]} of {size} died" in outcome["error"]
                assert outcome["error"].startswith(
                    ("CheckpointWriteError: saving step ", "LostRankError: ")
                )
        check_steps(path, log)

    with rank_server.pool(3) as pool:
        last = Checkpointer(path).steps()[-1] + 1
        pool.run("save_steps", str(path), [last], {"keep": 2}, size=3)
        assert pool.run("load_step", str(path), last, size=3) == [True] * 3
    # A kill between a commit and the deletion that follows leaves a step more; the next deletion takes it along.
    assert len(Checkpointer(path).steps()) == 2
    assert list(path.glob(".tmp-*")) == []


def test_a_rank_that_is_dead_from_the_start(rank_server: RankServer, tmp_path: Path) -> None:
    with rank_server.pool(3) as pool:
        pool.kill(1)
        pool.start("save_once_connected", str(tmp_path), 1.0, ranks=[0, 2])
        for outcome in pool.collect([0, 2], HEARD_WITHIN_S):
            assert (
                "the 3 ranks that save or load together did not all connect within 1 s"
                in outcome["error"]
            )


def test_a_late_rank_is_named_and_a_new_checkpointer_works(
    rank_server: RankServer, tmp_path: Path
) -> None:
    with rank_server.pool(3) as pool:
        heard = pool.run("save_while_one_is_late", str(tmp_path), 2, size=3)
    assert heard[0][0] == "LostRankError: rank 2 of 3 did not answer within 5 s"
    for messages in (heard[1], heard[2]):
        assert messages[0].startswith("LostRankError: rank 0 of 3 ")
        assert "rank 1" not in messages[0]
    for messages in heard:
        assert messages[1].endswith("expected that all ranks close it and make a new one")
    assert Checkpointer(tmp_path).steps() == [1, 3]


@contextmanager
def small_file_system(size: str) -> Generator[Path | None]:
    """A new file system of this size; None where this process may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="mount-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def test_full_disk(rank_server: RankServer, tmp_path: Path) -> None:
    with small_file_system("2m") as mounted, rank_server.pool(3) as pool:
        path, ballast = (mounted or tmp_path) / "checkpoints", None
        if mounted:
            ballast = mounted / "ballast"
            ballast.write_bytes(bytes(1_200_000))
        heard = pool.run("fill_the_disk", str(path), ballast and str(ballast), size=3)
        problem = "[Errno 28] No space left on device" if mounted else "[Errno 27] File too large"
        assert heard == [heard[0]] * 3
        assert list(heard[0]) == ["handle", "third save"]
        for step, message in zip((2, 3), heard[0].values(), strict=True):
            assert message.startswith(f"saving step {step} to {path} failed: rank ")
            assert problem in message
        assert Checkpointer(path).steps() == [1, 5, 6]
        for step, expected in (
            (1, torch.arange(10)),
            (5, torch.arange(10)),
            (6, torch.ones(300_000)),
        ):
            verify(path, step)
            assert torch.equal(Checkpointer(path).load(step=step)["x"], expected)
        assert list(path.glob(".tmp-*")) == []


@contextmanager
def read_only(folder: Path, mounted: bool) -> Generator[None]:
    """Remounts the file system of the folder; without one, takes its permission to write."""
    if mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        folder.chmod(0o555)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        else:
            folder.chmod(0o777)


def test_read_only_folder(rank_server: RankServer) -> None:
    with small_file_system("4m") as mounted, tempfile.TemporaryDirectory() as other:
        folder = mounted or Path(other)
        folder.chmod(0o777)
        user = os.geteuid() if mounted or os.geteuid() else NOBODY
        with rank_server.pool(3) as pool:
            pool.run("save_as", str(folder), 1, user, size=3)
            with read_only(folder, mounted is not None):
                errors = pool.errors("save_as", str(folder), 2, user, size=3)
                assert pool.run("load_step", str(folder), 1, size=3) == [True] * 3
            pool.run("save_as", str(folder), 3, user, size=3)
        problem = "[Errno 30] Read-only file system" if mounted else "[Errno 13] Permission denied"
        assert all(
            error.startswith("CheckpointWriteError: ") and problem in error for error in errors
        ), errors
        assert Checkpointer(folder).steps() == [1, 3]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_does_not_see_the_path(
    rank_server: RankServer, tmp_path: Path, lost: int
) -> None:
    path, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    with rank_server.pool(3) as pool:
        for message in pool.run(
            "save_where_one_rank_is_elsewhere", str(path), str(elsewhere), lost, size=3
        ):
            assert message.startswith(f"saving step 1 to {path} failed: rank {lost}: ")
            assert f"No such file or directory: '{elsewhere}/" in message
        assert Checkpointer(path).steps() == []
        pool.run("save_steps", str(path), [1], {}, size=3)
        errors = pool.errors(
            "load_where_one_rank_is_elsewhere", str(path), str(elsewhere), lost, size=3
        )
        assert all(str(elsewhere) in error for error in errors)
        assert all(f"rank {lost}: " in error for rank, error in enumerate(errors) if rank != lost)


def test_a_second_group_is_refused_on_all_its_ranks(
    rank_server: RankServer, tmp_path: Path
) -> None:
    with rank_server.pool(4) as pool:
        messages = pool.run("two_groups_save", str(tmp_path), size=4)
        refused = f"{tmp_path} is being written to by process {pool.pids[0]} on "
    assert messages[:2] == ["", ""]
    for message in messages[2:]:
        assert message.startswith("CheckpointLockedError: ")
        assert refused in message
    assert Checkpointer(tmp_path).steps() == [1, 3, 4]


def test_a_step_that_is_being_read_may_be_deleted(rank_server: RankServer, tmp_path: Path) -> None:
    only = ["step", "sharded", "replicated"]
    with rank_server.pool(3) as pool:
        pool.run("save_steps", str(tmp_path), [1], {}, size=3)
        mapped = Checkpointer(tmp_path).load(only=only, mmap=True)
        with open_step(open_storage(tmp_path), 1) as reader:
            pool.run("save_steps", str(tmp_path), [2, 3], {"keep": 1}, size=3)
            assert Checkpointer(tmp_path).steps() == [3]
            read = load_step(reader, RankGroup(), None, only=only)
    for state in (mapped, read):
        assert all((tensor == 1).all() for tensor in (state["sharded"], *state["replicated"]))


def test_loads_while_steps_come_and_go(rank_server: RankServer, tmp_path: Path) -> None:
    with rank_server.pool(2) as writers, rank_server.pool(1) as readers:
        log = tmp_path / "log"
        writers.start("save_for_ever", str(tmp_path / "steps"), str(log), {}, ranks=[0, 1])
        wait_until(log.exists)
        assert readers.run("load_while_saving", str(tmp_path / "steps"), 1.5, size=1)[0] >= 3


def test_own_values_on_another_number_of_ranks(rank_server: RankServer, tmp_path: Path) -> None:
    with rank_server.pool(3) as pool:
        outcomes = pool.run("load_own_values_elsewhere", str(tmp_path), size=3)
    for rank, (first, made, refused) in enumerate(outcomes):
        assert first == [[7.0] * 3, 0]
        assert made == [None, 30 + rank]
        assert (
            "values that each of 2 ranks has of its own, and 3 load it; say what they get in the template"
            in refused
        )
