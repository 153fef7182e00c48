"""A run on a cluster of several nodes: the metrics of one process, through the loss of each kind of what it runs on."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import Cli, assert_same_metrics, option_set, read_rows, step_rows
from process_tree import descendants, left_after
from ray.cluster_utils import Cluster
from tiny_jobs import HOLDING

pytestmark = pytest.mark.slow

NODE: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 100 << 20}
"""Capacity for all controllers and an engine over two devices, on which ranks train by turns: not for two engines."""
WHOLE = "2 controllers, 2 engines and 2 training ranks"
HALF = "1 controller, 1 engine and 1 training rank"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes; the first one stays."""
    cluster = Cluster()
    cluster.add_node(include_dashboard=False, **NODE)
    cluster.add_node(**NODE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_losses_of_each_kind_cost_no_sample(cli: Cli, own_args: list[str], cluster: Cluster) -> None:
    """vLLM over two devices twice, and two ranks on them by turns: one of each is killed, a node is lost, one joins."""
    (cli.cwd / "holding.py").write_text(HOLDING)
    # Slowly: rounding differs with who computed what, and a policy that is nearly certain makes much of it.
    args = option_set(option_set(own_args, "--actor.optim.lr", "1e-4"), "--reward", "holding.py:reward")
    args = [*option_set(args, "--trainer.total-training-steps", "10"), "--rollout.engine", "vllm"]
    args = [*args, "--trainer.save-freq", "1", "--trainer.test-freq", "1000", "--trainer.tensorboard", "False"]
    alone = cli(*args, "--name", "alone")
    assert alone.code == 0, alone

    command = cli.start(
        *args,
        *("--runtime", "ray", "--ray.address", cluster.address, "--controllers", "2", "--trainer.num-processes", "2"),
        *("--rollout.num-processes", "2", "--rollout.tensor-parallel-size", "2", "--rollout.colocated", "true"),
    )
    run, hold = cli.cwd / "runs/default", cli.cwd / "hold"

    def wait_for_a_step() -> None:
        before = num_steps()
        command.wait_until(lambda: num_steps() > before)

    def num_steps() -> int:
        return len(step_rows(run)) if (run / "metrics.jsonl").exists() else 0

    def of_cluster(title: str) -> list[int]:
        return [pid for node in cluster.list_all_nodes() for pid in descendants(raylet_of(node), title)]

    wait_for_a_step()
    workers = of_cluster("VLLM::Worker_TP")
    assert len(workers) == 4
    os.kill(workers[1], signal.SIGKILL)
    wait_for_a_step()
    ranks = of_cluster("ray::TrainingRank")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    command.wait_until(lambda: "all training ranks were started again" in command.out)
    wait_for_a_step()

    hold.touch()
    [lost] = cluster.worker_nodes
    cluster.remove_node(lost, allow_graceful=False)
    command.wait_until(lambda: f"; the run has {HALF} now, of {WHOLE}" in command.out)
    hold.unlink()
    wait_for_a_step()
    hold.touch()
    cluster.add_node(**NODE)
    time.sleep(6)  # nodes that join are waited for, in case there are more
    hold.unlink()
    command.wait_until(lambda: f"has joined; the run has {WHOLE} now" in command.out)
    workers += of_cluster("VLLM::Worker_TP")
    finished = command.wait()
    assert finished.code == 0, finished
    assert "a rank of the engine died" in finished.out + (run / "logs/main.log").read_text()
    assert_same_metrics(run, cli.cwd / "runs/alone")
    places = {name for row in read_rows(run / "spans.jsonl") for name in row["devices"]}
    assert places == {"device 0", "device 1"}, "two devices of an engine are one row, that of the ranks there, too"
    assert not left_after(workers, 10.0)


def raylet_of(node: Any) -> int:
    """The process of a node's raylet, whose children are the node's actors."""
    [raylet] = node.all_processes["raylet"]
    return raylet.process.pid


def test_megatron_ranks_on_two_nodes(cli: Cli, own_args: list[str], cluster: Cluster) -> None:
    """TP=2 x 2: the metrics of one process that trains with torch."""
    args = [*option_set(own_args, "--actor.optim.lr", "1e-4"), "--trainer.tensorboard", "False"]
    cli.ok(*args, "--name", "alone")
    finished = cli(
        *args,
        *("--runtime", "ray", "--ray.address", cluster.address, "--trainer.backend", "megatron"),
        *("--trainer.num-processes", "4", "--trainer.parallel.tensor-model-parallel-size", "2", "--name", "megatron"),
    )
    assert finished.code == 0, finished
    assert_same_metrics(cli.cwd / "runs/megatron", cli.cwd / "runs/alone")
