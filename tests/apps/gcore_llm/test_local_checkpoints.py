"""Checkpoints on the machines of the training ranks: what dies, with its disk, costs a step."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, assert_same_metrics, option_set, step_rows
from process_tree import descendants
from ray.cluster_utils import Cluster
from tiny_jobs import HOLDING

from gcore_ckpt import Checkpointer

RANKS = ["--trainer.num-processes", "2"]


@pytest.fixture
def args(own_args: list[str]) -> list[str]:
    """Six steps, no checkpoint in the run's folder before the last."""
    args = option_set(
        option_set(own_args, "--actor.optim.lr", "1e-4"), "--trainer.total-training-steps", "6"
    )
    args += ["--trainer.save-freq", "1000", "--trainer.max-ckpt-to-keep", "5"]
    return [*args, "--trainer.test-freq", "1000", "--trainer.tensorboard", "False"]


@pytest.mark.slow
def test_a_killed_run_continues_from_this_machine(cli: Cli, args: list[str]) -> None:
    """Another run of the same name starts from its beginning, and a variable that is not set is named."""
    (cli.cwd / "holding.py").write_text(HOLDING)
    args = option_set(args, "--reward", "holding.py:reward")
    cli.ok(*args, "--name", "whole")
    local = [
        *args,
        *RANKS,
        "--local-checkpoints.folder",
        str(cli.cwd / "local"),
        "--name",
        "killed",
    ]
    run = cli.cwd / "runs/killed"
    command = cli.start(*local)
    command.wait_for_steps(run, 3)
    hold = cli.cwd / "hold"
    hold.touch()
    time.sleep(0.5)  # for the step that has its rewards already
    command.send(signal.SIGKILL)
    command.wait()
    hold.unlink()
    assert Checkpointer(run / "checkpoints").steps() == []
    before = len(step_rows(run))
    assert 3 <= before < 6
    cli.ok(*local)
    rows = step_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert_same_metrics(run, cli.cwd / "runs/whole")
    assert Checkpointer(run / "checkpoints").steps() == [6], "the last step is in the run's folder"
    assert not list((cli.cwd / "local").iterdir()), (
        "nothing stays on the machine of a run that is complete"
    )
    made = re.findall(r"step (\d+): [\d.]+ s", (run / "logs/main.log").read_text())
    assert len(made) <= 6 + 1, "at most one step was made again"

    shutil.rmtree(run)
    cli.ok(*option_set(local, "--trainer.total-training-steps", "1"))
    assert [row["step"] for row in step_rows(run)] == [1]

    refused = cli(
        *option_set(local, "--local-checkpoints.folder", "/$NOT_SET/x"), "--name", "other"
    )
    assert refused.code == 2
    assert (
        "local_checkpoints.folder is '/$NOT_SET/x', in which this rank's environment leaves"
        in refused.err
    )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that stand for machines: each has a folder of its own in its environment."""
    cluster = Cluster()
    for number in range(2):
        cluster.add_node(
            num_cpus=4,
            object_store_memory=100 << 20,
            env_vars={"LOCAL_DISK": str(tmp_path / f"disk-{number}")},
            **({"include_dashboard": False} if number == 0 else {}),
        )
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_rank_and_its_disk_are_lost(
    cli: Cli, args: list[str], machines: Any, tmp_path: Path
) -> None:
    """The copy on the other machine is loaded: at most one step is made again, to the same metrics."""
    cli.ok(*args, "--name", "whole")
    run = cli.cwd / "runs/default"
    command = cli.start(
        *(*args, *RANKS, "--runtime", "ray", "--ray.address", machines.address),
        *("--local-checkpoints.folder", "$LOCAL_DISK/checkpoints"),
    )
    command.wait_for_steps(run, 3)
    nodes = [node.all_processes["raylet"][0].process.pid for node in machines.list_all_nodes()]
    ranks = {pid: disk_of(node) for node in nodes for pid in descendants(node, "ray::TrainingRank")}
    assert len(set(ranks.values())) == 2, ranks
    lost, disk = next(iter(ranks.items()))
    before = len(step_rows(run))
    os.kill(lost, signal.SIGKILL)
    shutil.rmtree(disk)
    finished = command.wait()
    assert finished.code == 0, finished
    [line] = [
        line
        for line in finished.out.splitlines()
        if "all training ranks were started again" in line
    ]
    assert int(line.rpartition("continuing after step ")[2]) >= before - 1, line
    assert_same_metrics(run, cli.cwd / "runs/whole")
    assert not list(tmp_path.glob("disk-*/checkpoints/*"))


def disk_of(pid: int) -> Path:
    """The disk of a node, by the variable of its Raylet, which its processes inherit."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return Path(
        next(v for v in variables if v.startswith(b"LOCAL_DISK=")).decode().partition("=")[2]
    )
