"""A run on Ray: gcore-controller's backend with a run's engines, their placement from step to step, and its logs."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from gcore_controller import (
    LENT,
    ActorRole,
    Context,
    DeviceTimers,
    Handles,
    Lending,
    RayBackend,
    RayTrainerClient,
    Recorder,
    RoleActors,
    Sizes,
    TrainerSpec,
    connect_quietly,
    make_announcer,
)
from gcore_placement import STRATEGIES
from gcore_rollout import (
    Engine,
    EngineDiedError,
    EngineHandle,
    LendingEngines,
    RayEngine,
    TimeSharedEngines,
)
from gcore_runs import BaseRLConfig, RunJob
from gcore_runs.actor_engines import ActorEngines, lend, role_shares
from gcore_runs.engines import (
    Instrumentation,
    allocator_variables,
    engines_in_turns,
    lending_of,
    list_preloads,
    make_next_to_gpus,
)
from gcore_runs.live_placement import LivePlacement
from gcore_runs.logs import announce_slow_calls, log_to, logged, logs_of
from gcore_runs.node_logs import NodeLogs
from gcore_runs.settings.cluster import cluster_address, read_variables, translate_refusals

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)
EngineFactory = Callable[[], Engine[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class ControllerServices:
    """The services that a controller connects to: engines, and their timers."""

    policy: Engine[Any, Any]
    num_engines: int
    """Engines of the policy; with loans, all that it may have, so that what waits for one shows in their queues."""
    judges: Mapping[ActorRole, Engine[Any, Any]]
    devices: DeviceTimers
    sharing: Sequence[Engine[Any, Any]] = ()
    """The engines that share devices with training ranks, and take turns with them; the policy's first."""
    lending: Lending | None = None
    """The loan of the ranks' devices, if that is what turns are for."""

    def connect_trainer(
        self, ctx: Context[Handles], cost_of: Callable[[Any], float]
    ) -> RayTrainerClient[Any]:
        """Return a controller's client of the training ranks; ``cost_of`` is the work of a micro-batch."""
        return RayTrainerClient(
            ctx.roles.ranks,
            ctx.group,
            self.devices,
            cost_of=cost_of,
            sharing=self.sharing,
            lending=self.lending,
        )


ConnectPolicy = Callable[
    [ConfigT, Instrumentation, int, int], Awaitable[tuple[Engine[Any, Any], int]]
]
"""Connects a controller, by its rank among so many, to its share of a policy's servers, and returns their number."""
RunController = Callable[[JobT, Context[Handles], ControllerServices, Recorder], Awaitable[None]]
"""Runs the program of a job on one controller, with the services that it is connected to."""


def _connect_to_cluster(config: BaseRLConfig) -> None:
    """Connect to the cluster of the config or of RAY_ADDRESS, or start one on this machine that is large enough."""
    address = cluster_address(config.ray)
    if address:
        with translate_refusals(address):
            connect_quietly(address, variables=read_variables(config.ray))
    else:
        num_cpus = max(os.cpu_count() or 1, config.sizes.num_reserved)
        connect_quietly("local", num_cpus=num_cpus, include_dashboard=False)


async def start_ray_backend(
    config: ConfigT,
    *,
    engine: Callable[[ConfigT], EngineFactory],
    judges: Mapping[ActorRole, Callable[[ConfigT], EngineFactory]],
    trainer_spec: Callable[[ConfigT], TrainerSpec],
    run_controller: RunController[JobT],
    checkpoints: Path,
    announce: Callable[[str], None] | None = None,
    connect_policy: ConnectPolicy[ConfigT] | None = None,
    weights_bytes: float = math.inf,
) -> RayBackend[JobT, ConfigT]:
    """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

    Args:
        config: the settings, with the sizes that are asked for.
        engine: what builds the policy's engines for given settings.
        judges: the same of each judge, by its role.
        trainer_spec: the training ranks for given settings.
        run_controller: called in the process of each controller, for every job.
        connect_policy: called there, too, where the config has no engines of the policy.
        weights_bytes: those of an engine of each role together. Where the nodes' memory holds them for all engines, one
            that gets another role keeps its engine of the former one, asleep.

    Raises:
        ClusterError: the cluster lacks the capacity.
        UserError: the cluster cannot be reached.
    """
    _connect_to_cluster(config)
    logs = logs_of(checkpoints.absolute())
    factories: dict[ActorRole, Callable[[ConfigT], EngineFactory]] = {"engine": engine, **judges}
    if config.lends_ranks:
        factories[LENT] = engine

    def factory(role: ActorRole, config: ConfigT, process: tuple[ActorRole, int]) -> EngineFactory:
        name, number = process
        if name != role:
            # A process of its own, which may be there at the same time.
            name = f"{name}_as_{role}"
        make = partial(_with_allocator, config, factories[role](config))
        return partial(logged, logs, name, number, make)

    changes_role = STRATEGIES[config.strategy].follows_load and bool(judges)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    engines = RoleActors(
        list(factories),
        factory,
        start=partial(
            EngineHandle.start,
            changes_role=changes_role,
            keeps_asleep=changes_role and holds_asleep(nodes, config, weights_bytes),
            preload=list_preloads(config),
        ),
        end=EngineHandle.end,
        put_to_sleep=EngineHandle.sleep,
        connect=RayEngine[Any, Any].connect,
    )
    placement = replace(config.placement, strategy=config.strategy)
    follow = partial(
        LivePlacement, config=placement, file=checkpoints.absolute().parent / "partition.json"
    )
    backend = RayBackend[JobT, ConfigT](
        config,
        engines=engines,
        trainer_spec=trainer_spec,
        program=lambda job: partial(_run_controller, job, run_controller, connect_policy, logs),
        placement=follow if STRATEGIES[config.strategy].follows_load else None,
        engine_errors=(EngineDiedError,),
        announce=announce,
        after_end=NodeLogs(logs).collect,
    )
    return await backend.start()


def holds_asleep(
    nodes: Iterable[Mapping[str, float]], config: BaseRLConfig, weights_bytes: float
) -> bool:
    """Return whether the memory of each node holds ``weights_bytes`` for each of its engines, as plans demand it.

    Half of it is for ranks and checkpoints. ``nodes`` have the amounts of resources by Ray's names; their memory is
    without that of the object store.
    """
    size = config.devices_per_engine
    device, amount = "CPU", float(size)
    if config.device.startswith("cuda"):
        device, amount = "GPU", config.ray.gpus_per_engine * size
    for node in nodes:
        num_engines = min(config.sizes.num_engine_places, node.get(device, 0.0) // amount)
        if num_engines and num_engines * weights_bytes > node.get("memory", 0.0) / 2:
            return False
    return True


def _with_allocator(config: BaseRLConfig, make: EngineFactory) -> Engine[Any, Any]:
    """Make an engine in an actor, whose environment is its own, next to its GPUs with torch's CUDA allocator set up."""
    os.environ.update(allocator_variables(config))
    return make_next_to_gpus(make) if config.device.startswith("cuda") else make()


async def _run_controller(
    job: Any,
    run_controller: RunController[Any],
    connect_policy: ConnectPolicy[Any] | None,
    logs: Path,
    ctx: Context[Handles],
) -> None:
    """Set this process up for a controller, connect it to the engines that it uses, and run its program."""
    import torch

    config: BaseRLConfig = job.config
    os.chdir(ctx.roles.folder)
    log_to(logs, "controller", ctx.rank, redirect=True)
    # They are spread over the nodes.
    num_here = math.ceil(ctx.world_size / sum(node["Alive"] for node in ray.nodes()))
    torch.set_num_threads(max(1, config.threads // num_here))
    devices = DeviceTimers(shared=ctx.roles.shared_devices)
    announce = make_announcer(ctx.report)
    instrumentation = Instrumentation(devices=devices, announce=announce)
    connected = partial(
        ActorEngines.connect,
        rank=ctx.rank,
        world_size=ctx.world_size,
        instrumentation=instrumentation,
        start_timeout_s=config.ray.timeout_s,
    )
    traits = STRATEGIES[config.strategy]
    takes_turns = config.takes_turns
    async with AsyncExitStack() as to_close:
        to_close.enter_context(announce_slow_calls(announce))
        judges = {role: await connected(role, actors) for role, actors in ctx.roles.judges.items()}
        judging: Sequence[Engine[Any, Any]] = [judge.replicas for judge in judges.values()]
        for engine in judging:
            to_close.push_async_callback(engine.close)
            if traits.is_time_shared:
                await engine.sleep()
        if ctx.roles.engines:
            engines = await connected("engine", ctx.roles.engines, lent=ctx.roles.lent)
            policy = engines.replicas
            num_engines = len(engines.replicas.engines)
            roles = [engines, *judges.values()]
            if traits.follows_load and judges and all(role.are_own for role in roles):
                num_engines = sum(len(role.replicas.engines) for role in roles)
                lending = lend(roles, devices=devices, announce=announce)
                policy, *judging = lending.engines
                moving = asyncio.create_task(arrange_as_noticed(ctx, lending))
                to_close.callback(moving.cancel)
        else:
            assert connect_policy is not None, (
                "connect_policy is None; expected a function where there are no engines"
            )
            policy, num_engines = await connect_policy(
                config, instrumentation, ctx.rank, ctx.world_size
            )
        to_close.push_async_callback(policy.close)
        if traits.is_time_shared and judging:
            if not takes_turns:
                await policy.wake()
            policy, *judging = TimeSharedEngines(
                [policy, *judging], first_is_awake=not takes_turns
            ).engines
        services = ControllerServices(
            policy=policy,
            judges=dict(zip(judges, judging, strict=True)),
            devices=devices,
            num_engines=num_engines,
            sharing=engines_in_turns(config, policy, judging),
            lending=lending_of(config),
        )
        await run_controller(job, ctx, services, ctx.report)


async def arrange_as_noticed(ctx: Context[Handles], lending: LendingEngines) -> None:
    """Give each role as many of this controller's engines as the sizes say that the backend sends.

    It does so after each step, and between waves of sampling where they change. Engines that were lent return, unless
    a call samples already: it has lent them for its own queues.
    """
    arranged = [len(actors) for actors in (ctx.roles.engines, *ctx.roles.judges.values())]
    num_places = [0] * ctx.world_size
    for number in arranged:
        for index in range(number):
            num_places[index % ctx.world_size] += 1
    while True:
        sizes: Sizes = await ctx.notices.get()
        counts = [sizes.engines, *sizes.judges.values()]
        if counts != arranged or not lending.is_sampling:
            lending.arrange(role_shares(counts, num_places, ctx.rank))
        arranged = counts
