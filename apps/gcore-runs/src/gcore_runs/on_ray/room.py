"""How much of a run a cluster has room for: its nodes come and go."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray

from gcore_controller.errors import ClusterError
from gcore_runs.sizes import SizedConfig, Sizes

Node = Mapping[str, float]
"""What a node has of each resource, by Ray's names."""


class RoomChangedError(Exception):
    """Nodes have left or joined, and the run is to go on in another size."""


def alive_nodes() -> dict[str, Node]:
    """The cluster's nodes, each under its address and the beginning of its id."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return {f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})": n["Resources"] for n in nodes if n["Alive"]}


def has_room(nodes: Iterable[Node], config: SizedConfig, sizes: Sizes) -> bool:
    """Whether every process finds what it reserves on one of the nodes, if the run has them for itself."""
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
    """What the config asks for or, where there is no room for that, about the same share of each role.

    Raises:
        ClusterError: there is no room for one of each.
    """
    nodes = list(nodes)
    smallest = None
    for sizes in _shares(config):
        if has_room(nodes, config, sizes):
            return sizes
        smallest = sizes
    needs: dict[str, float] = {}
    for need in _needs(config, smallest or config.sizes):
        for name, amount in need.items():
            needs[name] = needs.get(name, 0.0) + amount
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount)
    have = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in needs) for node in nodes)
    raise ClusterError(f"{smallest} need {wanted}: the cluster's nodes have {have or 'ended'}")


def _shares(config: SizedConfig) -> Iterator[Sizes]:
    """All of it, and ever less."""
    whole, unit = config.sizes, config.rank_unit
    num_units = whole.ranks // unit
    counts = (whole.controllers, whole.engines, whole.judges, num_units)
    for share in sorted({i / count for count in counts for i in range(1, count + 1)}, reverse=True):
        controllers, engines, judges, units = (min(count, max(1, math.floor(count * share + 1e-9))) for count in counts)
        yield replace(whole, controllers=min(controllers, engines), engines=engines, judges=judges, ranks=units * unit)


def _needs(config: SizedConfig, sizes: Sizes) -> list[dict[str, float]]:
    """What each process reserves."""
    cpus, is_on_gpu = config.ray.cpus_per_process, config.device.startswith("cuda")
    engine = {"CPU": cpus, "GPU": config.ray.gpus_per_engine if is_on_gpu else 0.0}
    rank = {"CPU": cpus, "GPU": config.ray.gpus_per_rank if is_on_gpu else 0.0}
    return [{"CPU": cpus}] * sizes.controllers + [engine] * sizes.num_engine_devices + [rank] * sizes.ranks
