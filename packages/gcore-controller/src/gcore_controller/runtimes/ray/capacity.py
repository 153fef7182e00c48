"""The capacity of a cluster whose nodes come and go: the largest sizes of a run that fit on it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray

from gcore_controller.errors import ClusterError, ControllerError
from gcore_controller.runtimes.sizes import SizedConfig, Sizes

Node = Mapping[str, float]
"""The amount of each resource that a node has, by Ray's names."""


class CapacityChangedError(ControllerError):
    """Nodes have left or joined, and the run has to continue in another size."""


def alive_nodes() -> dict[str, Node]:
    """Return the resources of the cluster's nodes, by address and first characters of the id."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return {f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})": n["Resources"] for n in nodes if n["Alive"]}


def has_capacity(nodes: Iterable[Node], config: SizedConfig, sizes: Sizes) -> bool:
    """Return whether each process fits on one of the nodes, if no other run uses them."""
    free = [dict(node) for node in nodes]
    for need in sorted(_needs(config, sizes), key=lambda need: (need.get("GPU", 0.0), need["CPU"]), reverse=True):
        place = next((f for f in free if all(f.get(name, 0.0) >= amount for name, amount in need.items())), None)
        if place is None:
            return False
        for name, amount in need.items():
            # Ray counts in ten-thousandths.
            place[name] = round(place.get(name, 0.0) - amount, 4)
    return True


def largest(nodes: Iterable[Node], config: SizedConfig) -> Sizes:
    """Return the sizes that the config asks for or, if they do not fit, about the same fraction of each role.

    Raises:
        ClusterError: the nodes lack the capacity for one process of each role.
    """
    nodes = list(nodes)
    smallest = None
    for sizes in _fractions(config):
        if has_capacity(nodes, config, sizes):
            return sizes
        smallest = sizes
    needs: dict[str, float] = {}
    for need in _needs(config, smallest or config.sizes):
        for name, amount in need.items():
            needs[name] = needs.get(name, 0.0) + amount
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount)
    have = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in needs) for node in nodes)
    raise ClusterError(f"{smallest} need {wanted}: the cluster's nodes have {have or 'ended'}")


def _fractions(config: SizedConfig) -> Iterator[Sizes]:
    """Yield the sizes that the config asks for, and then smaller and smaller ones."""
    whole, unit = config.sizes, config.rank_unit
    num_units = whole.ranks // unit
    counts = (whole.controllers, whole.engines, whole.judges, num_units)
    for fraction in sorted({i / count for count in counts for i in range(1, count + 1)}, reverse=True):
        controllers, engines, judges, units = (
            min(count, max(1, math.floor(count * fraction + 1e-9))) for count in counts
        )
        yield replace(whole, controllers=min(controllers, engines), engines=engines, judges=judges, ranks=units * unit)


def _needs(config: SizedConfig, sizes: Sizes) -> list[dict[str, float]]:
    """Return the resources that each process reserves."""
    cpus, is_on_gpu = config.ray.cpus_per_process, config.device.startswith("cuda")
    engine = {"CPU": cpus, "GPU": config.ray.gpus_per_engine if is_on_gpu else 0.0}
    rank = {"CPU": cpus, "GPU": config.ray.gpus_per_rank if is_on_gpu else 0.0}
    return [{"CPU": cpus}] * sizes.controllers + [engine] * sizes.num_engine_devices + [rank] * sizes.ranks
