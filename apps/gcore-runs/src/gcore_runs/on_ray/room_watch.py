"""How the nodes of a cluster change while a run is on them."""

import asyncio
import time

from gcore_runs.on_ray.room import Node, RoomChangedError, alive_nodes, has_room, largest
from gcore_runs.sizes import SizedConfig, Sizes

_WATCH_EVERY_S = 1.0
_SETTLED_S = 3.0
"""Nodes that join together are few seconds apart."""


class RoomWatch:
    """The nodes that a run was sized for, and what has become of them.

    Args:
        config: with the sizes that are asked for.

    Attributes:
        whole: The sizes that there was room for.
    """

    def __init__(self, config: SizedConfig) -> None:
        self.whole = config.sizes
        self._config = config
        self._nodes: dict[str, Node] = {}
        self._last_change: tuple[frozenset[str], float] = (frozenset(), 0.0)
        """The nodes that there are, and since when these."""

    def size(self) -> Sizes:
        """The sizes that there is room for now.

        Raises:
            ClusterError: there is none at all.
        """
        self._nodes = alive_nodes()
        if self._config.ray.elastic:
            self.whole = largest(self._nodes.values(), self._config)
        return self.whole

    @property
    def shortfall(self) -> str:
        """What of the settings there is no room for, in a line; empty: there is room for all."""
        asked = self._config.sizes
        return "" if asked == self.whole else f"the cluster has room for {self.whole}, of {asked}"

    async def loss(self, sizes: Sizes) -> RoomChangedError:
        """Wait until nodes are lost, and there is no room any more for these sizes."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            nodes = alive_nodes()
            if nodes.keys() != self._last_change[0]:
                self._last_change = (frozenset(nodes), time.monotonic())
            lost = [name for name in self._nodes if name not in nodes]
            if lost and self._config.ray.elastic and not has_room(nodes.values(), self._config, sizes):
                return RoomChangedError(f"node {', '.join(lost)} was lost")

    def check_growth(self) -> None:
        """
        Raises:
            RoomChangedError: nodes have joined a while ago, and there is room for more of the run than there was.
        """
        names, since_s = self._last_change
        if not self.shortfall or names <= self._nodes.keys() or time.monotonic() < since_s + _SETTLED_S:
            return
        nodes = alive_nodes()
        if largest(nodes.values(), self._config) != self.whole:
            joined = ", ".join(name for name in nodes if name not in self._nodes)
            raise RoomChangedError(f"node {joined} has joined")
