"""The capacity of a cluster whose nodes come and go, and the largest sizes of a run that fit on it."""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray

from gcore_controller.errors import ClusterError, ControllerError
from gcore_controller.runtimes.sizes import SizedConfig, Sizes

Node = Mapping[str, float]
"""The amount of each resource that a node has, by Ray's names."""

_POLL_EVERY_S = 1.0
_SETTLED_S = 3.0
"""Nodes that join together are at most a few seconds apart."""


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


class CapacityWatch:
    """Compares the nodes of a cluster with those that a run was sized for.

    Args:
        config: with the sizes that are asked for.

    Attributes:
        whole: The largest sizes that fitted when `size` was called last.
    """

    def __init__(self, config: SizedConfig) -> None:
        self.whole = config.sizes
        self._config = config
        self._nodes: dict[str, Node] = {}
        self._last_change: tuple[frozenset[str], float] = (frozenset(), 0.0)
        """The names of the nodes, and since when there have been these."""

    def size(self) -> Sizes:
        """Return the largest sizes that fit now.

        Raises:
            ClusterError: no sizes fit.
        """
        self._nodes = alive_nodes()
        if self._config.ray.elastic:
            self.whole = largest(self._nodes.values(), self._config)
        return self.whole

    @property
    def shortfall(self) -> str:
        """See `Backend.shortfall`."""
        asked = self._config.sizes
        return "" if asked == self.whole else f"the cluster has capacity for {self.whole}, of {asked}"

    async def loss(self, sizes: Sizes) -> CapacityChangedError:
        """Wait until nodes are lost and these sizes do not fit any more; return the error that says so."""
        while True:
            await asyncio.sleep(_POLL_EVERY_S)
            nodes = alive_nodes()
            if nodes.keys() != self._last_change[0]:
                self._last_change = (frozenset(nodes), time.monotonic())
            lost = [name for name in self._nodes if name not in nodes]
            if lost and self._config.ray.elastic and not has_capacity(nodes.values(), self._config, sizes):
                return CapacityChangedError(f"node {', '.join(lost)} was lost")

    def check_growth(self) -> None:
        """Check whether the run can grow.

        Raises:
            CapacityChangedError: nodes joined some seconds ago, and larger sizes fit.
        """
        names, since_s = self._last_change
        if not self.shortfall or names <= self._nodes.keys() or time.monotonic() < since_s + _SETTLED_S:
            return
        nodes = alive_nodes()
        if largest(nodes.values(), self._config) != self.whole:
            joined = ", ".join(name for name in nodes if name not in self._nodes)
            raise CapacityChangedError(f"node {joined} has joined")
