"""Tests of every runtime share files of this folder."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster
    from runtimes import AnyProgram, Run

NUM_NODES = 2


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator["Cluster"]:
    """Start a Ray cluster of two nodes, one with the resource "controllers" and one with "services"."""
    import ray
    import runtimes
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    # Nodes cannot import test modules: what is in these travels with the programs.
    for module in (request.module, runtimes):
        cloudpickle.register_pickle_by_value(module)
    cluster = Cluster()
    for name in ("controllers", "services"):
        cluster.add_node(
            num_cpus=4, resources={name: 4}, object_store_memory=150 << 20, include_dashboard=False
        )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def on_ray(cluster: "Cluster") -> Iterator["Run"]:
    """Run programs on the same controllers, one after another."""
    from runtimes import HANG_S

    from gcore_controller.runtimes.ray import RayControllers

    del cluster
    started: dict[int, RayControllers] = {}

    def run(program: "AnyProgram", world_size: int, *, timeout_s: float | None = None) -> list[Any]:
        async def guarded() -> list[Any]:
            async with asyncio.timeout(HANG_S):
                if world_size not in started:
                    started[world_size] = await RayControllers.start(
                        world_size=world_size, num_cpus=0.5
                    )
                return await started[world_size].run(
                    program, roles=list[str](), timeout_s=timeout_s
                )

        return asyncio.run(guarded())

    yield run

    async def close() -> None:
        for controllers in started.values():
            await controllers.close()

    asyncio.run(close())
