"""A controller's own process on Ray: its logs, and its connections to the engines that it uses."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from gcore_controller import Announcer, Context, DeviceTimers, Handles, SizedConfig
from gcore_rollout import Engine, EngineHandle, EngineReplicas, RayEngine, TimeSharedEngines
from gcore_runs.logs import log_to
from gcore_runs.loop.instrumented_engine import Instrumentation
from gcore_runs.settings.run_config import PlacementConfig


class PlacedConfig(SizedConfig, Protocol):
    """Settings of a run on Ray."""

    @property
    def placement(self) -> PlacementConfig: ...


@dataclass(frozen=True, kw_only=True)
class ControllerServices:
    """The services that a controller connects to."""

    policy: Engine[Any, Any]
    judge: Engine[Any, Any] | None
    devices: DeviceTimers
    """Timers of the engines."""
    num_engines: int
    """Engines of the policy."""


@asynccontextmanager
async def controller_services(
    ctx: Context[Handles], config: PlacedConfig, logs: Path
) -> AsyncGenerator[ControllerServices]:
    """Set this process up for a controller, and connect it to the engines that it uses, inside the block."""
    import torch

    os.chdir(ctx.roles.folder)
    log_to(logs, "controller", ctx.rank, redirect=True)
    torch.set_num_threads(max(1, config.threads // ctx.world_size))
    devices = DeviceTimers()
    connect = partial(_connect, devices, Announcer(ctx.report), start_timeout_s=config.ray.timeout_s)
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
    """Return every ``world_size``-th engine by its number; if there are fewer, several controllers share one."""
    return dict(list(enumerate(engines))[rank % len(engines) :: world_size]) if engines else {}


async def _connect(
    devices: DeviceTimers,
    announce: Callable[[str], None],
    role: Literal["engine", "judge"],
    actors: Mapping[int, EngineHandle],
    *,
    device: Literal["engine"] | None = None,
    start_timeout_s: float,
) -> Engine[Any, Any]:
    """Return the engines of some actors as one; it connects again to one that died, after Ray has restarted it.

    Args:
        devices: timers of the engines.
        announce: called with a line when an engine has died.
        role: of the engines.
        actors: their handles by number.
        device: the role whose devices they use, if not their own.
        start_timeout_s: how long an engine may take to start.
    """
    instrumentation = Instrumentation(role=role, devices=devices, device=device)

    async def connect(number: int) -> Engine[Any, Any]:
        engine = await RayEngine.connect(actors[number], start_timeout_s=start_timeout_s)
        return instrumentation.instrument(engine, number)

    clients = await asyncio.gather(*map(connect, actors))
    of_client = {id(client): number for client, number in zip(clients, actors, strict=True)}
    replaced: set[int] = set()

    async def reconnect() -> Engine[Any, Any]:
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
    replicas = EngineReplicas([c for c in clients if c.weight_version == newest], restart=reconnect, announce=announce)
    for client in clients:
        # Engines that an earlier job has left with older weights.
        if client.weight_version < newest:
            await replicas.add(client)
    return replicas
