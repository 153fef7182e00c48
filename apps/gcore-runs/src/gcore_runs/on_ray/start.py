"""A run on Ray: gcore-controller's backend with the engines, the placement and the logs of a run."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray._private import worker as ray_worker

from gcore_controller import (
    ActorRole,
    Announcer,
    ClusterError,
    Context,
    DeviceTimers,
    Handles,
    RayBackend,
    RemoteRecorder,
    RoleActors,
    TrainerSpec,
    check_token,
    connect,
)
from gcore_placement import STRATEGIES
from gcore_rollout import (
    Engine,
    EngineDiedError,
    EngineHandle,
    EngineReplicas,
    RayEngine,
    TimeSharedEngines,
    end_engine_actor,
    start_engine_actor,
)
from gcore_runs import log_to
from gcore_runs.engines import Instrumentation
from gcore_runs.errors import UserError
from gcore_runs.logs import logged, logs_of
from gcore_runs.loop.recorder import RunJob
from gcore_runs.on_ray.live_placement import LivePlacement
from gcore_runs.settings.run_config import BaseRLConfig


@dataclass(frozen=True, kw_only=True)
class ControllerServices:
    """The services that a controller connects to: engines, and their timers."""

    policy: Engine[Any, Any]
    num_engines: int
    """Engines of the policy."""
    judge: Engine[Any, Any] | None
    devices: DeviceTimers


JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)

EngineFactory = Callable[[], Engine[Any, Any]]
RunController = Callable[[JobT, Context[Handles], ControllerServices, RemoteRecorder[Any]], Awaitable[None]]
"""Runs the program of a job on one controller, with the services that it is connected to."""


def check_cluster(config: BaseRLConfig) -> None:
    """Check the address and the token before anything is started; `UserError` if no cluster accepts them."""
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=10.0).close()
    except OSError as error:
        raise UserError(
            f"ray.address is {address!r}: no Ray cluster answers there ({error}); expected HOST:PORT of its head, or "
            "an empty address for a new cluster on this machine"
        ) from error
    # Ray's own messages about processes that die: a run reports each in one line.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        check_token(address)
    except (ClusterError, ConnectionError) as error:
        raise UserError(f"ray.address: {error}") from error


def _connect_to_cluster(config: BaseRLConfig) -> None:
    """Connect to the cluster of the config or of RAY_ADDRESS, or start one on this machine that is large enough."""
    setattr(ray_worker, "_worker_logs_enabled", False)  # noqa: B010 - private, and Ray has no other way
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := config.ray.address or os.environ.get("RAY_ADDRESS", ""):
        try:
            connect(address, **quiet)
        except ClusterError as error:
            raise UserError(f"ray.address: {error}") from None
        except (ConnectionError, ValueError) as error:
            raise UserError(f"ray.address is {address!r}: no Ray cluster answers there ({error})") from error
    else:
        num_cpus = max(os.cpu_count() or 1, round(config.sizes.num_processes * config.ray.cpus_per_process + 0.5))
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)


async def start_ray_backend(
    config: ConfigT,
    *,
    engine: Callable[[ConfigT], EngineFactory],
    judge: Callable[[ConfigT], EngineFactory] | None,
    trainer_spec: Callable[[ConfigT], TrainerSpec],
    run_controller: RunController[JobT],
    checkpoints: Path,
    announce: Callable[[str], None] | None = None,
) -> RayBackend[JobT, ConfigT, Any]:
    """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

    Args:
        config: the settings, with the sizes that are asked for.
        engine, judge: what builds the engines of these roles for given settings.
        trainer_spec: the training ranks for given settings.
        run_controller: called in the process of each controller, for every job.

    Raises:
        ClusterError: the cluster lacks the capacity.
        UserError: the cluster cannot be reached.
    """
    _connect_to_cluster(config)
    logs = logs_of(checkpoints.absolute())
    factories: dict[ActorRole, Callable[[ConfigT], EngineFactory]] = {"engine": engine}
    if judge is not None:
        factories["judge"] = judge

    def factory(role: ActorRole, config: ConfigT, number: int) -> EngineFactory:
        return partial(logged, logs, role, number, factories[role](config))

    engines = RoleActors(
        list(factories), factory, start=start_engine_actor, end=end_engine_actor, connect=RayEngine[Any, Any].connect
    )
    follows_load = STRATEGIES[config.placement.strategy].follows_load
    backend = RayBackend[JobT, ConfigT, Any](
        config,
        engines=engines,
        trainer_spec=trainer_spec,
        program=lambda job: partial(_run_controller, job, run_controller, logs),
        placement=partial(LivePlacement, config=config.placement) if follows_load else None,
        engine_errors=(EngineDiedError,),
        announce=announce,
    )
    return await backend.start()


async def _run_controller(job: Any, run_controller: RunController[Any], logs: Path, ctx: Context[Handles]) -> None:
    """Set this process up for a controller, connect it to the engines that it uses, and run its program."""
    import torch

    config: BaseRLConfig = job.config
    os.chdir(ctx.roles.folder)
    log_to(logs, "controller", ctx.rank, redirect=True)
    torch.set_num_threads(max(1, config.threads // ctx.world_size))
    devices = DeviceTimers()
    connected = partial(_connect_engines, devices, Announcer(ctx.report), start_timeout_s=config.ray.timeout_s)
    engines = _own(ctx.roles.engines, ctx.rank, ctx.world_size)
    judges = _own(ctx.roles.judges, ctx.rank, ctx.world_size)
    in_turns = STRATEGIES[config.placement.strategy].is_time_shared
    async with AsyncExitStack() as to_close:
        judge = None
        if judges:
            judge = await connected("judge", judges, device="engine" if in_turns else None)
            to_close.push_async_callback(judge.close)
            if in_turns:
                await judge.sleep()
        policy = await connected("engine", engines)
        to_close.push_async_callback(policy.close)
        if in_turns and judge is not None:
            await policy.wake()
            policy, judge = TimeSharedEngines([policy, judge]).engines
        own = ControllerServices(policy=policy, judge=judge, devices=devices, num_engines=len(engines))
        await run_controller(job, ctx, own, RemoteRecorder[Any](ctx.report))


def _own(engines: Sequence[EngineHandle], rank: int, world_size: int) -> dict[int, EngineHandle]:
    """Return every ``world_size``-th engine by its number; if there are fewer, several controllers share one."""
    return dict(list(enumerate(engines))[rank % len(engines) :: world_size]) if engines else {}


async def _connect_engines(
    devices: DeviceTimers,
    announce: Callable[[str], None],
    role: ActorRole,
    actors: Mapping[int, EngineHandle],
    *,
    device: Literal["engine"] | None = None,
    start_timeout_s: float,
) -> Engine[Any, Any]:
    """Return the engines of some actors as one; it connects again to one that died, after Ray has restarted it."""
    instrumentation = Instrumentation(role=role, devices=devices, device=device)

    async def connect(number: int) -> Engine[Any, Any]:
        engine = await RayEngine.connect(actors[number], start_timeout_s=start_timeout_s)
        return instrumentation.instrument(engine, number)

    clients = dict(zip(actors, await asyncio.gather(*map(connect, actors)), strict=True))

    async def reconnect() -> Engine[Any, Any]:
        serving = set(map(id, replicas.engines))
        number, dead = next((number, client) for number, client in clients.items() if id(client) not in serving)
        # Another call must not find it.
        del clients[number]
        try:
            clients[number] = await connect(number)
        except BaseException:
            clients[number] = dead
            raise
        return clients[number]

    found = list(clients.values())
    newest = max(client.weight_version for client in found)
    replicas = EngineReplicas([c for c in found if c.weight_version == newest], restart=reconnect, announce=announce)
    for client in found:
        # Engines that an earlier job has left with older weights.
        if client.weight_version < newest:
            await replicas.add(client)
    return replicas
