"""A run on a cluster of several nodes: the metrics of one process, through the loss of each kind of what it runs on."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Command, assert_same_metrics, option_set, read_rows, step_rows
from process_tree import descendants, left_after
from ray.cluster_utils import Cluster
from tiny_jobs import HOLDING

pytestmark = pytest.mark.slow

NODE: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 100 << 20}
"""Capacity for all controllers and an engine over two devices, on which ranks train by turns: not for two engines."""
MEGATRON = ["--trainer.backend", "megatron", "--trainer.parallel.tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def cluster(vllm_forks: None) -> Iterator[Cluster]:
    """Two nodes; the first one stays."""
    del vllm_forks
    cluster = Cluster()
    cluster.add_node(include_dashboard=False, **NODE)
    cluster.add_node(**NODE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def cli(vllm_cli: Cli) -> Cli:
    return vllm_cli


class Watched:
    """A run on the cluster, whose processes are killed."""

    def __init__(self, command: Command, run: Path, cluster: Cluster) -> None:
        self.command, self.run, self._cluster = command, run, cluster

    def processes(self, title: str) -> list[int]:
        nodes = self._cluster.list_all_nodes()
        return [pid for node in nodes for pid in descendants(raylet_of(node), title)]

    def wait_for_a_step(self) -> None:
        before = self._num_steps()
        self.command.wait_until(lambda: self._num_steps() > before)

    def _num_steps(self) -> int:
        return len(step_rows(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def kill_a_process_of_each(self) -> list[int]:
        """Kill a process of a vLLM engine and, a step later, a training rank; return the engines' processes before."""
        self.wait_for_a_step()
        workers = self.processes("VLLM::Worker_TP")
        assert len(workers) == 4
        os.kill(workers[1], signal.SIGKILL)
        self.wait_for_a_step()
        os.kill(self.processes("ray::TrainingRank")[1], signal.SIGKILL)
        self.command.wait_until(lambda: "all training ranks were started again" in self.command.out)
        self.wait_for_a_step()
        return workers


def run_args(own_args: list[str], num_steps: int) -> list[str]:
    # Slowly: rounding differs with who computed what, and a policy that is nearly certain makes much of it.
    args = option_set(own_args, "--actor.optim.lr", "1e-4")
    args = [
        *option_set(args, "--trainer.total-training-steps", str(num_steps)),
        "--rollout.engine",
        "vllm",
    ]
    return [
        *args,
        "--trainer.save-freq",
        "1",
        "--trainer.test-freq",
        "1000",
        "--trainer.tensorboard",
        "False",
    ]


def cluster_args(cluster: Any) -> list[str]:
    """Two engines over two devices each, with whose ranks training ranks take turns."""
    args = ["--runtime", "ray", "--ray.address", cluster.address, "--controllers", "2"]
    return [
        *args,
        *(
            "--rollout.num-processes",
            "2",
            "--rollout.tensor-parallel-size",
            "2",
            "--rollout.colocated",
            "true",
        ),
    ]


def test_losses_of_each_kind_cost_no_sample(
    cli: Cli, own_args: list[str], cluster: Cluster
) -> None:
    """vLLM over two devices twice, and ranks on them by turns: one of each is killed, a node is lost, one joins.

    Megatron's TP=2 twice: the metrics of one process that trains with torch. FSDP2 loses ranks in `test_on_ray.py`.
    """
    now_half, now_whole = (
        "1 controller, 1 engine and 2 training ranks",
        "2 controllers, 2 engines and 4 training ranks",
    )
    (cli.cwd / "holding.py").write_text(HOLDING)
    args = option_set(run_args(own_args, 10), "--reward", "holding.py:reward")
    alone = cli(*args, "--name", "alone")
    assert alone.code == 0, alone

    command = cli.start(*args, *cluster_args(cluster), *MEGATRON, "--trainer.num-processes", "4")
    run, hold = cli.cwd / "runs/default", cli.cwd / "hold"
    watched = Watched(command, run, cluster)
    workers = watched.kill_a_process_of_each()

    hold.touch()
    [lost] = cluster.worker_nodes
    cluster.remove_node(lost, allow_graceful=False)
    command.wait_until(lambda: f"; the run has {now_half} now, of {now_whole}" in command.out)
    hold.unlink()
    watched.wait_for_a_step()
    hold.touch()
    cluster.add_node(**NODE)
    time.sleep(6)  # nodes that join are waited for, in case there are more
    hold.unlink()
    command.wait_until(lambda: f"has joined; the run has {now_whole} now" in command.out)
    workers += watched.processes("VLLM::Worker_TP")
    finished = command.wait()
    assert finished.code == 0, finished
    assert "a rank of the engine died" in finished.out + (run / "logs/main.log").read_text()
    assert_same_metrics(run, cli.cwd / "runs/alone")
    places = {name for row in read_rows(run / "spans.jsonl") for name in row["devices"]}
    assert places == {"device 0", "device 1"}, (
        "two devices of an engine are one row, that of the ranks there, too"
    )
    assert not left_after(workers, 60.0)


def test_a_spare_takes_over_from_a_node_with_a_controller(
    cli: Cli, own_args: list[str], cluster: Cluster
) -> None:
    """Ray still reserves the lost node for the controller when its death is known. Two nodes are left."""
    (cli.cwd / "holding.py").write_text(HOLDING)
    args = option_set(own_args, "--reward", "holding.py:reward")
    args = option_set(args, "--trainer.total-training-steps", "4")
    args = [*args, "--trainer.test-freq", "1000", "--trainer.tensorboard", "False"]
    cluster.add_node(**NODE)
    sizes = ["--controllers", "2", "--trainer.num-processes", "2"]
    command = cli.start(*args, "--runtime", "ray", "--ray.address", cluster.address, *sizes)
    watched = Watched(command, cli.cwd / "runs/default", cluster)
    watched.wait_for_a_step()
    hold = cli.cwd / "hold"
    hold.touch()
    lost = next(
        node
        for node in cluster.worker_nodes
        if descendants(raylet_of(node), "ray::ControllerActor")
    )
    cluster.remove_node(lost, allow_graceful=False)
    command.wait_until(lambda: "another one takes over its share" in command.out)
    hold.unlink()
    finished = command.wait()
    assert finished.code == 0, finished
    assert len(step_rows(watched.run)) == 4
    assert "the run has" not in finished.out


def raylet_of(node: Any) -> int:
    """The process of a node's raylet, whose children are the node's actors."""
    [raylet] = node.all_processes["raylet"]
    return raylet.process.pid
