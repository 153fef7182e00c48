"""The total and the free resources of a cluster."""

from collections.abc import Mapping

import ray

from gcore_controller.errors import ClusterError


def check_capacity(bundle: Mapping[str, float], world_size: int) -> None:
    """Check that a cluster, were all of it free, has the resources that the controllers need.

    Raises:
        ClusterError: it has less.
    """
    total: Mapping[str, float] = ray.cluster_resources()
    for name, amount in bundle.items():
        if amount * world_size > total.get(name, 0.0):
            raise ClusterError(
                f"{world_size} controllers need {amount * world_size:g} {name}: "
                f"the cluster has {total.get(name, 0.0):g}; start more nodes, or fewer controllers"
            )


def free_resources() -> str:
    """Return in words the resources that no process has reserved."""
    free: Mapping[str, float] = ray.available_resources()
    own = {name: amount for name, amount in free.items() if "_group_" not in name and ":" not in name}
    memory = {name: own.pop(name, 0.0) / 1e9 for name in ("memory", "object_store_memory")}
    counts = {"CPU": 0.0, **own}
    return ", ".join(
        [
            *(f"{amount:g} {name}" for name, amount in counts.items()),
            *(f"{amount:.1f} GB {name}" for name, amount in memory.items()),
        ]
    )
