"""The engines that a controller uses on Ray: its share of each role's actors, and loans between roles."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, pairwise
from operator import sub
from typing import Any, Self

from gcore_controller import LENT, ActorRole, DeviceTimers
from gcore_placement import LendingRule
from gcore_rollout import Engine, EngineHandle, EngineReplicas, LendingEngines, RayEngine
from gcore_runs.engines import Instrumentation


@dataclass(eq=False)
class ActorEngines:
    """A controller's engines of one role, as one, and the actors of each."""

    instrumentation: Instrumentation
    are_own: bool
    """No other controller uses them."""
    _: KW_ONLY
    start_timeout_s: float

    def __post_init__(self) -> None:
        self._handles: dict[str, EngineHandle] = {}
        """The actors by the names of their engines: those of the first role that each had in this run."""
        self._clients: dict[str, Engine[Any, Any]] = {}
        self.making_s = 0.0
        """Most seconds that it took to make one of them."""
        self.replicas: EngineReplicas[Any, Any]

    @classmethod
    async def connect(
        cls,
        role: ActorRole,
        actors: Sequence[EngineHandle],
        *,
        rank: int,
        world_size: int,
        instrumentation: Instrumentation,
        start_timeout_s: float,
        lent: Sequence[EngineHandle] | None = None,
    ) -> Self:
        """Connect to every ``world_size``-th actor from the ``rank``-th; where they are few, controllers share one.

        Engines that died are connected to again, after Ray has restarted them. Of ``lent`` ones, which are asleep,
        controllers have every ``world_size``-th, too, but the last ones have those that are left over; None: the run
        lends none.
        """
        engines = cls(
            replace(instrumentation, role=role),
            len(actors) >= world_size,
            start_timeout_s=start_timeout_s,
        )
        share = list(enumerate(actors))[rank % len(actors) :: world_size]
        handles = {f"{role} {number}": actor for number, actor in share}
        sleepers = list(enumerate(lent or ()))[world_size - 1 - rank :: world_size]
        handles |= {f"{LENT} {number}": actor for number, actor in sleepers}
        clients = await asyncio.gather(
            *(engines._connect(name, handle) for name, handle in handles.items())
        )
        newest = max(client.weight_version for client in clients)
        asleep = clients[len(share) :]
        engines.replicas = EngineReplicas(
            [client for client in clients if client.weight_version == newest],
            restart=engines._reconnect,
            announce=instrumentation.announce,
            lent=None if lent is None else asleep,
        )
        for client in clients:
            # Engines that an earlier job has left with older weights.
            if client.weight_version < newest:
                await engines.replicas.add(client, is_lent=client in asleep)
        return engines

    async def take_over(self, name: str, giver: "ActorEngines") -> Engine[Any, Any]:
        """Return an engine of this role in place of another role's engine of this name, which serves no more."""
        # At once, so that the other role does not connect to it again in place of one that dies.
        handle = giver._handles.pop(name)
        client = giver._clients.pop(name)
        try:
            engine = await self._connect(name, handle.lent(self.instrumentation.role))
        except BaseException:
            giver._handles[name] = handle
            giver._clients[name] = client
            raise
        await client.close()
        return engine

    async def _connect(self, name: str, handle: EngineHandle) -> Engine[Any, Any]:
        client = await RayEngine.connect(handle, start_timeout_s=self.start_timeout_s)
        self.making_s = max(self.making_s, client.making_s)
        engine = self.instrumentation.instrument(client, name)
        self._handles[name] = handle
        self._clients[name] = engine
        return engine

    async def _reconnect(self) -> Engine[Any, Any]:
        serving = set(map(id, self.replicas.engines))
        gone = [
            (name, client) for name, client in self._clients.items() if id(client) not in serving
        ]
        # One that is not lent, if there are such: the replacements of these do not wait.
        name, dead = min(gone, key=lambda entry: entry[0].startswith(LENT))
        # Another call must not find it.
        del self._clients[name]
        try:
            return await self._connect(name, self._handles[name])
        except BaseException:
            self._clients[name] = dead
            raise


def lend(
    roles: Sequence[ActorEngines], *, devices: DeviceTimers, announce: Callable[[str], None]
) -> LendingEngines:
    """Return all roles' engines such that an idle one of any works for another while that has more to do."""

    async def move(name: str, giver: int, taker: int) -> Engine[Any, Any]:
        with devices.stage("swap", name):
            engine = await roles[taker].take_over(name, roles[giver])
            devices.num_lent += 1
            return engine

    pools = [role.replicas for role in roles]
    rule = LendingRule(len(roles), max(role.making_s for role in roles))
    return LendingEngines(
        pools, lend=move, choose_loan=rule.observe, report_loan=rule.lent, announce=announce
    )


def role_shares(counts: Sequence[int], num_places: Sequence[int], rank: int) -> list[int]:
    """Return how many of all engines of each role are to be this controller's, so that each has one of every role.

    Args:
        counts: engines of each role, at least as many as controllers, and together as many as there are places.
        num_places: engines of all roles that each controller has.
    """
    free = [number - len(counts) for number in num_places]
    shares: list[int] = []
    for count in counts:
        # In proportion to what earlier roles left.
        num_divided = count - len(free)
        num_free = max(1, sum(free))
        ends = [num_divided * number // num_free for number in accumulate(free, initial=0)]
        assigned = [end - start for start, end in pairwise(ends)]
        free = list(map(sub, free, assigned))
        shares.append(1 + assigned[rank])
    return shares
