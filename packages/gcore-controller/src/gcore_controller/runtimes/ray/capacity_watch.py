"""Observation of the nodes of a cluster during a run."""

import asyncio
import time

from gcore_controller.runtimes.ray.capacity import CapacityChangedError, Node, alive_nodes, has_capacity, largest
from gcore_controller.runtimes.sizes import SizedConfig, Sizes

_WATCH_EVERY_S = 1.0
_SETTLED_S = 3.0
"""Nodes that join together are at most a few seconds apart."""


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
            await asyncio.sleep(_WATCH_EVERY_S)
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
