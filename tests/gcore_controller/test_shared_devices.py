"""Training ranks on the GPUs of engines, on a real Ray cluster whose nodes say that they have GPUs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster

from gcore_controller import Context, RoleActors, Sizes, TrainerSpec
from gcore_controller.errors import DeviceError
from gcore_controller.runtimes.ray import RayTrainerGroup, trainer_group
from gcore_controller.runtimes.ray.controllers import RayControllers
from gcore_controller.runtimes.ray.devices import share_devices

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]

NUM_NODES, GPUS_PER_NODE = 2, 2
NODE = {"num_cpus": 4, "num_gpus": GPUS_PER_NODE, "object_store_memory": 100 << 20}
SIZES = Sizes(controllers=1, engines=3, judges={"judge": 1}, ranks=4, ranks_in_turns=True)


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cloudpickle.register_pickle_by_value(request.module)
    cluster = Cluster()
    for _ in range(NUM_NODES):
        cluster.add_node(wait=True, **NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Engine:
    """Reserves what an engine does."""

    def __init__(self) -> None:
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES")


@dataclass
class Handle:
    actor: Any
    factory: Any

    def becoming(self, factory: Any) -> "Handle":
        return Handle(self.actor, factory)

    def lendable(self, role: str, others: Any) -> "Handle":
        del role, others
        return self


def start_engine(factory: Any, *, num_threads: int, **options: Any) -> Any:
    assert num_threads == 2, "of four engines, two are on each node, and share 5 threads there"
    return Handle(
        ray.remote(Engine).options(**options, max_restarts=-1).remote(),
        factory,
    )


async def end_engine(handle: Any) -> None:
    ray.kill(handle.actor)


async def put_to_sleep(handle: Any) -> None:
    raise AssertionError(f"{handle} is not used")


async def connect_engine(handle: Any, *, start_timeout_s: float) -> Any:
    del start_timeout_s
    raise AssertionError(f"{handle} is not used")


def make_worker(device: str) -> Any:
    """A rank without models."""
    return SimpleNamespace(
        roles=["actor"], replica=lambda _: (0, 1), device=device, close=lambda: None
    )


def enter(rank: int) -> None:
    del rank


SPEC = TrainerSpec(
    make_worker=make_worker, num_ranks=4, device="cpu", num_threads=5, enter_process=enter
)


def count_threads(worker: Any) -> int:
    """A message: the threads of torch in the rank's process."""
    del worker
    return torch.get_num_threads()


def rank_of(worker: Any) -> int:
    """A message: the rank that torch.distributed knows."""
    del worker
    return torch.distributed.get_rank()


def place(worker: Any) -> tuple[str, str | None]:
    """A message: the node of a rank, and the GPUs that it sees."""
    del worker
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


def node_of(actor: Any) -> str:
    del actor
    return ray.get_runtime_context().get_node_id()


def places(group: RayTrainerGroup) -> list[tuple[str, str | None]]:
    return [ray.get(actor.ask.remote(place)) for actor in group.ranks.actors]


async def visible_gpus(ctx: Context[None]) -> tuple[str, str | None]:
    """A program: the node of a controller, and the GPUs that it sees."""
    del ctx
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


async def test_controllers_with_models_have_gpus_of_their_own() -> None:
    controllers = await RayControllers.start(world_size=4, num_cpus=0.5, resources={"GPU": 1.0})
    try:
        found = await controllers.run(visible_gpus, roles=None)
    finally:
        await controllers.close()
    assert len(set(found)) == NUM_NODES * GPUS_PER_NODE
    assert {gpu for _, gpu in found} == {"0", "1"}


async def test_ranks_with_gpus_of_their_own_are_numbered_by_node_and_gpu() -> None:
    """Ray starts them on each node in turn, so that neighbours would be on two nodes."""
    group = RayTrainerGroup()
    try:
        await group.start(SPEC, num_cpus=0.5, num_gpus=1.0, timeout_s=300.0)
        own = places(group)
        assert own == sorted(own)
        assert len(set(own)) == NUM_NODES * GPUS_PER_NODE
        joined = [ray.get(actor.ask.remote(rank_of)) for actor in group.ranks.actors]
        assert joined == [0, 1, 2, 3]
        threads = [ray.get(actor.ask.remote(count_threads)) for actor in group.ranks.actors]
        assert threads == [2, 2, 2, 2], "two ranks of a node share its 5 threads"
    finally:
        group.close()


async def test_a_gpu_that_failed_is_left_out_if_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_group, "_OTHER_DEVICE_S", 10.0)
    group = RayTrainerGroup()
    options: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": 1.0, "timeout_s": 300.0}
    try:
        await group.start(replace(SPEC, num_ranks=3), **options)
        before = places(group)
        group.loss = DeviceError("training rank 1 failed", 1)
        await group.start(replace(SPEC, num_ranks=3), **options)
        assert before[1] not in places(group)
        assert len(set(places(group))) == 3
        assert len(group.failed) == 1
        # Four ranks need it again.
        await group.start(SPEC, **options)
        assert before[1] in places(group)
        assert group.failed == []
    finally:
        group.close()


async def test_ranks_are_on_the_gpus_of_engines(cluster: Cluster) -> None:
    reserved = SimpleNamespace(gpus_per_engine=1.0, gpus_per_rank=1.0, timeout_s=300.0)
    config: Any = SimpleNamespace(ray=reserved, device="cuda", threads=5, sizes=SIZES)
    engines = RoleActors[Any](
        ["engine", "judge"],
        lambda *_: cast(Any, None),
        start=start_engine,
        end=end_engine,
        put_to_sleep=put_to_sleep,
        connect=connect_engine,
    )
    group = RayTrainerGroup()
    try:
        await engines.resize(SIZES, config)
        ranks, _ = share_devices(SIZES, await engines.devices())
        # No GPU is left, and the ranks need none of their own.
        await group.start(SPEC, num_cpus=0.5, num_gpus=1.0, timeout_s=300.0, devices=ranks)
        own = places(group)
        assert own == sorted(own), "neighbours are on one node"
        assert len(set(own)) == NUM_NODES * GPUS_PER_NODE
        assert own == [(device.node, *device.gpus) for device in ranks]
        # An engine that becomes the judge's keeps its process, and the ranks stay where they are.
        moved = Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=4, ranks_in_turns=True)
        await engines.resize(moved, config)
        assert share_devices(moved, await engines.devices())[0] == ranks
        # Each engine with a judge on its device, of which a judge reserves nothing either.
        in_turns = replace(SIZES, engines=4, judges={"judge": 4}, in_turns=True)
        await engines.resize(in_turns, config)
        assert share_devices(in_turns, await engines.devices())[0] == ranks
        nodes = [
            [ray.get(handle.actor.__ray_call__.remote(node_of)) for handle in engines.handles[role]]
            for role in ("engine", "judge")
        ]
        assert nodes[0] == nodes[1]
        assert sorted(nodes[0]) == [node for node, _ in own]
        # A node is lost, and another one comes: Ray starts engines there, and their judges follow.
        [lost] = cluster.worker_nodes
        spare = cluster.add_node(wait=True, **NODE)
        cluster.remove_node(lost)
        await engines.resize(in_turns, config)
        nodes = [
            [ray.get(handle.actor.__ray_call__.remote(node_of)) for handle in engines.handles[role]]
            for role in ("engine", "judge")
        ]
        assert nodes[0] == nodes[1]
        assert spare.node_id in nodes[0]
    finally:
        # Some of its ranks are gone with their node.
        group.kill()
        await engines.close()
