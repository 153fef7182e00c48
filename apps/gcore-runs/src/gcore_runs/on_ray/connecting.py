"""What a controller on Ray does in its own process before and after its program."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gcore_controller import Context, DeviceTimers
from gcore_rollout import Engine, EngineHandle, EngineReplicas, RayEngine, TimeSharedEngines
from gcore_runs.logs import log_to
from gcore_runs.on_ray.reports import Announcements
from gcore_runs.on_ray.services import Handles
from gcore_runs.sizes import SizedConfig
from gcore_runs.watched import Watched


@dataclass(frozen=True, kw_only=True)
class ControllerServices:
    """What is a controller's own."""

    policy: Engine[Any, Any]
    judge: Engine[Any, Any] | None
    devices: DeviceTimers
    """What notes the work of the engines."""
    num_engines: int
    """Of the policy."""


@asynccontextmanager
async def own_services(ctx: Context[Handles], config: SizedConfig) -> AsyncGenerator[ControllerServices]:
    """Make this process a controller's, and connect it to the engines that are its own, inside the block."""
    import torch

    os.chdir(ctx.roles.folder)
    log_to(ctx.roles.logs, "controller", ctx.rank, redirect=True)
    torch.set_num_threads(max(1, config.threads // ctx.world_size))
    devices = DeviceTimers()
    announce = Announcements(ctx.report)
    connect = partial(_connected, devices, announce, start_timeout_s=config.ray.timeout_s)
    engines = _own(ctx.roles.engines, ctx.rank, ctx.world_size)
    judges = _own(ctx.roles.judges, ctx.rank, ctx.world_size)
    in_turns = config.placement.strategy == "colocated"
    async with AsyncExitStack() as to_close:
        judge = None
        if judges:
            judge = await connect("judge", judges, device="engine" if in_turns else None)
            to_close.push_async_callback(judge.close)
            if in_turns:
                await judge.sleep()
        policy = await connect("engine", engines)
        to_close.push_async_callback(policy.close)
        if in_turns and judge is not None:
            await policy.wake()
            policy, judge = TimeSharedEngines([policy, judge]).engines
        yield ControllerServices(policy=policy, judge=judge, devices=devices, num_engines=len(engines))


def _own(engines: Sequence[EngineHandle], rank: int, world_size: int) -> dict[int, EngineHandle]:
    """Every ``world_size``-th, by number; where there are fewer, several controllers have the same."""
    return dict(list(enumerate(engines))[rank % len(engines) :: world_size]) if engines else {}


async def _connected(
    devices: DeviceTimers,
    announce: Callable[[str], None],
    role: Literal["engine", "judge"],
    actors: Mapping[int, EngineHandle],
    *,
    device: Literal["engine"] | None = None,
    start_timeout_s: float,
) -> Engine[Any, Any]:
    """The engines of some actors, by number, as one; one that dies is connected to again after Ray has restarted it.

    Args:
        device: whose devices they are on, if not their own.
    """
    watched = Watched(role=role, devices=devices, device=device)

    async def connect(number: int) -> Engine[Any, Any]:
        return watched.timed(await RayEngine.connect(actors[number], start_timeout_s=start_timeout_s), number)

    clients = await asyncio.gather(*map(connect, actors))
    of_client = {id(client): number for client, number in zip(clients, actors, strict=True)}
    replaced: set[int] = set()

    async def again() -> Engine[Any, Any]:
        alive = {id(engine) for engine in replicas.engines}
        dead = next(client for client in of_client if client not in alive | replaced)
        replaced.add(dead)
        try:
            client = await connect(of_client[dead])
        except BaseException:
            replaced.discard(dead)
            raise
        of_client[id(client)] = of_client[dead]
        clients.append(client)
        return client

    newest = max(client.weight_version for client in clients)
    replicas = EngineReplicas([c for c in clients if c.weight_version == newest], restart=again, announce=announce)
    for client in clients:
        # Of engines that a run before this one has left with older weights.
        if client.weight_version < newest:
            await replicas.add(client)
    return replicas
