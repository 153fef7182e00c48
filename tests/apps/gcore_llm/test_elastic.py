"""Runs on clusters whose nodes come and go: several Ray nodes on this machine."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Cli, assert_same_metrics, option_set, step_rows
from hypothesis import given, strategies as st
from ray.cluster_utils import Cluster
from tiny_jobs import HOLDING

from gcore_controller import Sizes
from gcore_controller.errors import ClusterError, ControllerDiedError
from gcore_controller.rlhf.events import Updating
from gcore_controller.runtimes.ray import RayBackend
from gcore_controller.runtimes.ray.cluster import ClusterChangedError, has_capacity, largest
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.sections import JudgeConfig, RewardModelConfig, TrainerConfig
from gcore_runs import UserError, resolve
from gcore_runs.settings.sections import RayConfig
from gcore_trainer import ParallelConfig


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node with room for one process of each role, and one more."""
    cluster = Cluster()
    cluster.add_node(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_run_grows_with_its_cluster(cli: Cli, own_args: list[str], cluster: Cluster) -> None:
    """Samples and training are those of a run that nothing happened to; `test_cluster_failures.py` has losses."""
    (cli.cwd / "holding.py").write_text(HOLDING)
    args = option_set(own_args, "--reward", "holding.py:reward")
    args = option_set(args, "--trainer.total-training-steps", "8")
    args = [
        *args,
        "--trainer.save-freq",
        "1",
        "--trainer.test-freq",
        "1000",
        "--trainer.tensorboard",
        "False",
    ]
    cli.ok(*args, "--name", "undisturbed")

    sizes = ["--controllers", "2", "--trainer.num-processes", "2"]
    command = cli.start(*args, "--runtime", "ray", "--ray.address", cluster.address, *sizes)
    run, hold = cli.cwd / "runs/default", cli.cwd / "hold"

    command.wait_for_steps(run, 2)
    hold.touch()
    second = cluster.add_node(num_cpus=4, object_store_memory=100 << 20)
    time.sleep(6)  # nodes that join are waited for, in case there are more
    hold.unlink()
    whole, half = (
        "2 controllers, 2 engines and 2 training ranks",
        "1 controller, 1 engine and 1 training rank",
    )
    command.wait_until(lambda: f"has joined; the run has {whole} now" in command.out)
    before = len(step_rows(run))
    finished = command.wait()
    cluster.remove_node(second)
    assert finished.code == 0, finished
    assert f"the cluster has capacity for {half}, of {whole}" in finished.out
    assert before + 2 <= 8
    assert_same_metrics(run, cli.cwd / "runs/undisturbed")


@pytest.mark.slow
def test_a_run_may_ask_for_all_of_its_room(cli: Cli, own_args: list[str], cluster: Cluster) -> None:
    options = ["--ray.address", cluster.address, "--controllers", "5", "--ray.elastic", "False"]
    refused = cli(*own_args, "--runtime", "ray", *options)
    assert refused.code == 2
    assert "gcore-llm: error: 5 controllers need 5 CPU: the cluster has 4" in refused.err


@pytest.mark.slow
def test_the_device_is_that_of_the_nodes(cluster: Cluster) -> None:
    """Whatever this machine has, also where the settings of a run are read again to load its models here."""
    here = resolve(TrainConfig()).device
    on_cluster = TrainConfig(runtime="ray", ray=RayConfig(address=str(cluster.address)))
    assert resolve(on_cluster).device == "cpu"
    node = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=100 << 20)
    assert resolve(on_cluster).device == "cuda"
    assert resolve(replace(on_cluster, device="cuda")).device == "cuda"
    assert resolve(replace(on_cluster, device="cpu")).device == "cpu"
    assert resolve(replace(on_cluster, device="cuda"), is_local=True).device == here
    with pytest.raises(UserError, match="device is 'gpu'; expected cpu, cuda, cuda:NUMBER or auto"):
        resolve(replace(on_cluster, device="gpu"))
    cluster.remove_node(node)


class DyingControllers:
    """Controllers of which one dies in an update; others can be started for as long as nothing stops that."""

    async def run(self, program: object, *, roles: object, reported: Any) -> None:
        del program, roles
        await reported(0, Updating())
        raise ControllerDiedError("controller 1 died")

    async def stages(self) -> list[str | None]:
        return [None, None]

    async def restore(self) -> None:
        await asyncio.Event().wait()


class LosingCapacity:
    """The capacity of a cluster whose lost node is found at once, in time to stop the first start of processes."""

    fitting_sizes = TrainConfig().sizes
    num_calls = 0

    def size(self) -> Sizes:
        self.num_calls += 1
        if self.num_calls > 1:
            raise ClusterError("what is left is too small")
        return self.fitting_sizes

    async def loss(self, sizes: Sizes) -> ClusterChangedError:
        del sizes
        await asyncio.sleep(0.01)
        return ClusterChangedError("a node was lost")


async def test_a_node_that_is_lost_in_an_update_is_noticed_by_those_that_replace_its_processes() -> (
    None
):
    """They waited, until a time limit, for a place on a cluster that had none any more."""

    async def take_in(*_: object) -> None:
        pass

    roles: Any = SimpleNamespace(handles={"engine": []}, judges={}, resize=take_in)
    backend: Any = RayBackend(
        TrainConfig(), engines=roles, trainer_spec=lambda _: roles, program=lambda _: roles
    )
    backend._controllers, backend._capacity = DyingControllers(), LosingCapacity()
    with pytest.raises(ControllerDiedError) as died:
        await backend.run("job", take_in)
    with pytest.raises(ClusterError, match="what is left is too small"):
        await asyncio.wait_for(backend.recover(died.value, keeps_models=True), 10)


CONFIG = TrainConfig(
    device="cuda",
    controllers=2,
    rollout=RolloutConfig(num_processes=4),
    trainer=TrainerConfig(num_processes=8, parallel=ParallelConfig(context_parallel_size=2)),
    ray=RayConfig(gpus_per_engine=1.0, gpus_per_rank=0.5),
)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([8], Sizes(controllers=2, engines=4, ranks=8)),
        ([4, 4], Sizes(controllers=2, engines=4, ranks=8)),
        ([4], Sizes(controllers=1, engines=2, ranks=4)),
        ([4, 1], Sizes(controllers=1, engines=2, ranks=4)),
        ([4, 2], Sizes(controllers=1, engines=3, ranks=6)),
        ([2], Sizes(controllers=1, engines=1, ranks=2)),
    ],
)
def test_ranks_go_by_whole_replicas(gpus: list[int], expected: Sizes) -> None:
    """Two ranks share a sequence, and a GPU."""
    assert largest([{"CPU": 32.0, "GPU": float(count)} for count in gpus], CONFIG) == expected


def test_a_classifier_of_each_controller_has_a_gpu() -> None:
    """Besides those of engines and ranks, which take turns."""
    reward = RewardModelConfig(kind="classifier", path="scores")
    config = replace(
        CONFIG, reward_model=reward, rollout=RolloutConfig(num_processes=4, colocated=True)
    )
    config = replace(
        config, ray=RayConfig(gpus_per_reward_model=0.5), trainer=TrainerConfig(num_processes=4)
    )
    assert config.gpus_per_controller == 0.5
    assert replace(config, device="cpu").gpus_per_controller == 0.0
    assert largest([{"CPU": 32.0, "GPU": 5.0}], config) == config.sizes
    assert largest([{"CPU": 32.0, "GPU": 4.0}], config).engines == 3


def test_a_judge_needs_room_too() -> None:
    judge = RewardModelConfig(kind="judge", path="somewhere", judge=JudgeConfig(num_processes=2))
    config = replace(CONFIG, reward_model=judge)
    assert largest([{"CPU": 32.0, "GPU": 10.0}], config) == Sizes(
        controllers=2, engines=4, judges={"judge": 2}, ranks=8
    )
    smaller = largest([{"CPU": 32.0, "GPU": 9.0}], config)
    assert smaller == Sizes(controllers=1, engines=3, judges={"judge": 1}, ranks=6)
    assert str(smaller) == "1 controller, 3 engines, 1 judge and 6 training ranks"
    assert config.with_sizes(smaller).sizes == smaller


def test_ranks_on_the_devices_of_engines_need_no_room() -> None:
    """Four GPUs for three engines, a judge, and four ranks of one GPU each."""
    judge = RewardModelConfig(kind="judge", path="somewhere", judge=JudgeConfig(num_processes=1))
    rollout = replace(CONFIG.rollout, num_processes=3, colocated=True)
    reserved = replace(CONFIG.ray, gpus_per_rank=1.0)
    ranks = replace(CONFIG.trainer, num_processes=4)
    config = replace(CONFIG, reward_model=judge, rollout=rollout, trainer=ranks, ray=reserved)
    whole = Sizes(controllers=2, engines=3, judges={"judge": 1}, ranks=4, ranks_in_turns=True)
    assert largest([{"CPU": 32.0, "GPU": 4.0}], config) == whole
    # A sixth rank would have none to share.
    more = replace(config, trainer=replace(ranks, num_processes=6))
    assert largest([{"CPU": 32.0, "GPU": 6.0}], more).ranks == 6
    assert largest([{"CPU": 32.0, "GPU": 5.0}], more).ranks < 6


def test_no_room_at_all() -> None:
    with pytest.raises(
        ClusterError, match="1 controller, 1 engine and 2 training ranks need 4 CPU and 2 GPU: the"
    ):
        largest([{"CPU": 32.0, "GPU": 1.0}], CONFIG)


@given(nodes=st.lists(st.integers(0, 6), min_size=1, max_size=5), more=st.integers(1, 6))
def test_more_nodes_make_no_run_smaller(nodes: list[int], more: int) -> None:
    def size(cpus: list[int]) -> Sizes | None:
        try:
            return largest([{"CPU": float(count)} for count in cpus], config)
        except ClusterError:
            return None

    config = replace(CONFIG, device="cpu")
    before, after = size(nodes), size([*nodes, more])
    if before is None:
        return
    assert has_capacity([{"CPU": float(count)} for count in nodes], config, before)
    assert after is not None
    assert before.controllers <= before.engines
    assert before.ranks % 2 == 0
    assert (after.controllers, after.engines, after.ranks) >= (
        before.controllers,
        before.engines,
        before.ranks,
    )
