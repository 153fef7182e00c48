"""What is on disk after a process dies or its disk is full."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Protocol

import pytest
import torch
from waiting import wait_until

from gcore_ckpt import Checkpointer, CheckpointLockedError, verify

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GCORE_CKPT_KILLS", "15"))


class Child(Protocol):
    pid: int

    def log(self) -> list[str]: ...
    def kill(self) -> None: ...
    def join(self) -> None: ...


class ForkServer(Protocol):
    def fork(self, function: str, path: Path, log: Path) -> Child: ...


def leftovers(path: Path) -> list[Path]:
    return list(path.glob(".tmp-*"))


def test_kill_at_any_moment_leaves_whole_steps(fork_server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    rng = random.Random(0)
    for kill in range(KILLS):
        writer = fork_server.fork("save_for_ever", path, tmp_path / f"log-{kill}")
        deadline = time.monotonic() + 300
        while kill % 2 and not writer.log() and time.monotonic() < deadline:
            time.sleep(
                0.005
            )  # every other one has committed something, however slow the machine is
        time.sleep(rng.uniform(0.0, 0.1))
        writer.kill()

        steps = Checkpointer(path).steps()
        assert steps[-1:] >= [int(step) for step in writer.log()][-1:], (
            "an acknowledged step is gone"
        )
        for step in steps:
            verify(path, step)
        if steps:
            state = Checkpointer(path).load()
            assert state["step"] == steps[-1]
            assert [len(tensor) for tensor in state["tensors"]] == state["sizes"]
            assert all((tensor == state["step"]).all() for tensor in state["tensors"])

    # A kill between a commit and the deletion that follows leaves a step more; the next deletion takes it along.
    with Checkpointer(path, keep=2) as checkpointer:
        checkpointer.save(10**6, {})
    assert len(checkpointer.steps()) == 2
    assert leftovers(path) == []


def test_second_writer_is_refused_while_the_first_lives(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints"
    writer = fork_server.fork("hold_the_lock", path, tmp_path / "log")
    wait_until(writer.log)
    second = Checkpointer(path)
    with pytest.raises(
        CheckpointLockedError, match=f"{path} is being written to by process {writer.pid} on "
    ):
        second.save(2, {})
    assert torch.equal(second.load()["x"], torch.ones(3))
    writer.kill()
    second.save(2, {}).wait()
    second.close()


def test_lock_dies_with_the_writer_not_with_its_forked_children(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints"
    writer = fork_server.fork("hold_the_lock_and_fork", path, tmp_path / "log")
    wait_until(lambda: writer.log() and writer.log()[0].endswith("child process"))
    child_pid, error = writer.log()[0].split(" ", 1)
    writer.kill()
    try:
        with Checkpointer(path) as checkpointer:
            checkpointer.save(3, {}).wait()
    finally:
        os.kill(int(child_pid), signal.SIGKILL)
    assert error == "this Checkpointer was used before a fork: make a new one in the child process"


def test_full_disk_is_reported_and_leaves_the_last_step(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints"
    writer = fork_server.fork("fill_the_disk", path, tmp_path / "log")
    writer.join()
    assert writer.log() == [
        f"{where}: saving step {step} to {path} failed: [Errno 27] File too large"
        for where, step in (("handle", 2), ("third save", 3), ("close", 6))
    ]
    assert Checkpointer(path).steps() == [1, 5, 7]
    assert torch.equal(Checkpointer(path).load()["x"], torch.ones(10))
    assert leftovers(path) == []


def test_a_lost_last_save_is_no_silent_success(fork_server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    writer = fork_server.fork("lose_the_last_save", path, tmp_path / "log")
    writer.join()
    failure = f"saving step 2 to {path} failed: [Errno 27] File too large"
    log = writer.log()
    assert log[:2] == [failure, f"the process ends, and no call has raised this error: {failure}"]
    assert log[-1] == "exit code 120"
    assert Checkpointer(path).steps() == [1]
