"""Logs of nodes with file systems of their own reach the folder of the run."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_runs.logs import log_to, merged_lines
from gcore_runs.node_logs import NodeLogs, new_logs


def test_what_is_new_is_returned(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("one\n")
    assert new_logs(str(tmp_path), b"main", {}) == {"engine-0.log": (4, b"one\n")}
    (tmp_path / "engine-0.log").write_text("one\ntwo\n")
    assert new_logs(str(tmp_path), b"main", {"engine-0.log": 4}) == {"engine-0.log": (8, b"two\n")}
    assert new_logs(str(tmp_path), b"main", {"engine-0.log": 8}) == {}
    # It was rotated.
    assert new_logs(str(tmp_path), b"main", {"engine-0.log": 100}) == {
        "engine-0.log": (8, b"one\ntwo\n")
    }


def test_a_node_that_shares_the_folder_returns_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("one\n")
    (tmp_path / "main.log").write_text("the run\nmore\n")
    assert new_logs(str(tmp_path), b"the run\n", {}) == {}
    assert new_logs(str(tmp_path), b"another run\n", {}).keys() == {"engine-0.log", "main.log"}


class Engine:
    """Logs as an engine does."""

    def __init__(self, logs: Path, rank: int) -> None:
        log_to(logs, "engine", rank, redirect=True)

    def say(self, text: str) -> None:
        logging.getLogger("engine").info(text)

    def pid(self) -> int:
        return os.getpid()


def private_mounts_work() -> bool:
    return (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not private_mounts_work(),
    reason="a node with a file system of its own needs the right to mount",
)
def test_logs_of_a_node_without_the_folder_are_collected(tmp_path: Path) -> None:
    """One that has an own, empty file system where the run's folder is; also of a process that was killed."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    logs = tmp_path / "logs"
    cluster = Cluster()
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    start = f"mount -t tmpfs none {tmp_path} && exec {Path(sys.executable).with_name('ray')} start"
    command = f"{start} --address {cluster.address} --block --num-cpus 1 --object-store-memory {100 << 20}"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        cluster.wait_for_nodes()
        while len(ids := [n["NodeID"] for n in ray.nodes() if n["Alive"]]) < 2:
            time.sleep(0.2)
        with log_to(logs, "main"):
            asyncio.run(scenario(logs, ids))
    finally:
        ray.shutdown()
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
        cluster.shutdown()
    here, there = sorted(logs.glob("**/engine-*.log"), key=lambda path: len(path.parts))
    assert (here.parent, there.parent.parent) == (logs, logs)
    said = [line for line in merged_lines(logs) if "engine: says" in line]
    assert [line.rpartition(" ")[2] for line in said] == ["first", "second", "third"]
    assert [line.split()[1] for line in said] == ["engine-0", "engine-1", "engine-1"]


async def scenario(logs: Path, ids: list[str]) -> None:
    own = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote
    actors: list[Any] = []
    for rank, place in enumerate([own, *(i for i in ids if i != own)]):
        where = NodeAffinitySchedulingStrategy(place, soft=False)
        actors.append(
            remote(Engine).options(num_cpus=0, scheduling_strategy=where).remote(logs, rank)
        )
    say = partial(asyncio.wait_for, timeout=300)
    collector = NodeLogs(logs)
    await say(actors[0].say.remote("says first"))
    await say(actors[1].say.remote("says second"))
    await collector.collect()
    await collector.collect()
    await say(actors[1].say.remote("says third"))
    os.kill(await say(actors[1].pid.remote()), signal.SIGKILL)
    await collector.collect()
