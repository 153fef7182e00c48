"""A Ray cluster of this machine alone, for tests."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

# Ray reads it on import, which a test module may do before `gcore_rollout.engines.remote.ray_engine` does.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray would kill workers where other tests fill this machine's memory.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

import engine_oracles
import fake_engine
import ray
import slow_hf_engine
from ray import cloudpickle
from ray.cluster_utils import Cluster


@contextmanager
def ray_cluster(*nodes: str, store_mb: Mapping[str, int] | None = None) -> Generator[None]:
    """A cluster with these nodes, each of which has a resource of its name; this process is on the first.

    ``store_mb`` is the size of each object store in MiB, at least 75; default: 100.
    """
    # Test modules are in no place where a node would find them: what is in these travels with the factories.
    for module in (engine_oracles, fake_engine, slow_hf_engine):
        cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportPrivateImportUsage]
    cluster = Cluster()
    for node in nodes:
        store_bytes = (store_mb or {}).get(node, 100) << 20
        cluster.add_node(
            num_cpus=8,
            resources={node: 1},
            object_store_memory=store_bytes,
            include_dashboard=False,
        )
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
