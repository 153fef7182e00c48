"""A run on Ray: gcore-controller's backend with a run's engines, their placement from step to step, and its logs."""

import asyncio
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from gcore_controller import (
    ActorRole,
    Announcer,
    ClusterError,
    Context,
    DeviceTimers,
    Handles,
    RayBackend,
    Recorder,
    RoleActors,
    Sizes,
    Span,
    TrainerSpec,
    check_token,
    connect_quietly,
)
from gcore_placement import (
    STRATEGIES,
    DynamicPartition,
    DynamicPartitionConfig,
    PartitionSpace,
    RoleLimits,
    RoleLoad,
    StrategyChoice,
)
from gcore_rollout import (
    Engine,
    EngineDiedError,
    LendingEngines,
    RayEngine,
    TimeSharedEngines,
    end_engine_actor,
    sleep_engine_actor,
    start_engine_actor,
)
from gcore_runs import BaseRLConfig, PlacementConfig, RunJob, UserError, log_to, logged, logs_of
from gcore_runs.actor_engines import ActorEngines, lend, policy_share
from gcore_runs.engines import Instrumentation, allocator_variables
from gcore_runs.node_logs import NodeLogs

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=BaseRLConfig)
EngineFactory = Callable[[], Engine[Any, Any]]
Role = Literal["gen", "reward"]
"""A role, named by its stage."""

_NUM_STEPS = 20
"""Number of steps in which the most loaded engines are looked for."""
_SLACK = 0.1
"""A role that waited for less than this fraction of its time was not held up."""


@dataclass(frozen=True, kw_only=True)
class ControllerServices:
    """The services that a controller connects to: engines, and their timers."""

    policy: Engine[Any, Any]
    num_engines: int
    """Engines of the policy; with loans, all that it may have, so that what waits for one shows in their queues."""
    judge: Engine[Any, Any] | None
    devices: DeviceTimers
    sharing: Sequence[Engine[Any, Any]] = ()
    """The engines that share devices with training ranks, and take turns with them; the policy's first."""


ConnectPolicy = Callable[[ConfigT, Instrumentation, int, int], Awaitable[tuple[Engine[Any, Any], int]]]
"""Connects a controller, by its rank among so many, to its share of a policy's servers, and returns their number."""
RunController = Callable[[JobT, Context[Handles], ControllerServices, Recorder], Awaitable[None]]
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
    if address := config.ray.address or os.environ.get("RAY_ADDRESS", ""):
        try:
            connect_quietly(address)
        except ClusterError as error:
            raise UserError(f"ray.address: {error}") from None
        except (ConnectionError, ValueError) as error:
            raise UserError(f"ray.address is {address!r}: no Ray cluster answers there ({error})") from error
    else:
        num_cpus = max(os.cpu_count() or 1, round(config.sizes.num_reserved * config.ray.cpus_per_process + 0.5))
        connect_quietly("local", num_cpus=num_cpus, include_dashboard=False)


async def start_ray_backend(
    config: ConfigT,
    *,
    engine: Callable[[ConfigT], EngineFactory],
    judge: Callable[[ConfigT], EngineFactory] | None,
    trainer_spec: Callable[[ConfigT], TrainerSpec],
    run_controller: RunController[JobT],
    checkpoints: Path,
    announce: Callable[[str], None] | None = None,
    connect_policy: ConnectPolicy[ConfigT] | None = None,
) -> RayBackend[JobT, ConfigT]:
    """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

    Args:
        config: the settings, with the sizes that are asked for.
        engine, judge: what builds the engines of these roles for given settings.
        trainer_spec: the training ranks for given settings.
        run_controller: called in the process of each controller, for every job.
        connect_policy: called there, too, where the config has no engines of the policy.

    Raises:
        ClusterError: the cluster lacks the capacity.
        UserError: the cluster cannot be reached.
    """
    _connect_to_cluster(config)
    logs = logs_of(checkpoints.absolute())
    factories: dict[ActorRole, Callable[[ConfigT], EngineFactory]] = {"engine": engine}
    if judge is not None:
        factories["judge"] = judge

    def factory(role: ActorRole, config: ConfigT, process: tuple[ActorRole, int]) -> EngineFactory:
        return partial(logged, logs, *process, partial(_with_allocator, config, factories[role](config)))

    engines = RoleActors(
        list(factories),
        factory,
        start=start_engine_actor,
        end=end_engine_actor,
        put_to_sleep=sleep_engine_actor,
        connect=RayEngine[Any, Any].connect,
    )
    placement = replace(config.placement, strategy=config.strategy)
    backend = RayBackend[JobT, ConfigT](
        config,
        engines=engines,
        trainer_spec=trainer_spec,
        program=lambda job: partial(_run_controller, job, run_controller, connect_policy, logs),
        placement=partial(LivePlacement, config=placement) if STRATEGIES[config.strategy].follows_load else None,
        engine_errors=(EngineDiedError,),
        announce=announce,
        after_end=NodeLogs(logs).collect,
    )
    return await backend.start()


def _with_allocator(config: BaseRLConfig, make: EngineFactory) -> Engine[Any, Any]:
    """Make an engine in an actor, whose environment is its own, after torch's CUDA allocator is set up there."""
    os.environ.update(allocator_variables(config))
    return make()


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
    torch.set_num_threads(max(1, config.threads // ctx.world_size))
    devices = DeviceTimers(shared=ctx.roles.shared_devices)
    announce = Announcer(ctx.report)
    instrumentation = Instrumentation(devices=devices, announce=announce)
    connected = partial(
        ActorEngines.connect,
        rank=ctx.rank,
        world_size=ctx.world_size,
        instrumentation=instrumentation,
        start_timeout_s=config.ray.timeout_s,
    )
    traits, takes_turns = STRATEGIES[config.strategy], config.takes_turns
    async with AsyncExitStack() as to_close:
        judge: Engine[Any, Any] | None = None
        judges = await connected("judge", ctx.roles.judges) if ctx.roles.judges else None
        if judges is not None:
            judge = judges.replicas
            to_close.push_async_callback(judges.replicas.close)
            if traits.is_time_shared:
                await judges.replicas.sleep()
        if ctx.roles.engines:
            engines = await connected("engine", ctx.roles.engines)
            policy, num_engines = engines.replicas, len(engines.replicas.engines)
            if traits.follows_load and judges is not None and engines.are_own and judges.are_own:
                num_engines += len(judges.replicas.engines)
                lending = lend([engines, judges], devices=devices, announce=announce)
                policy, judge = lending.engines
                moving = asyncio.create_task(_move_as_noticed(ctx, lending))
                to_close.callback(moving.cancel)
        else:
            assert connect_policy is not None, "connect_policy is None; expected a function where there are no engines"
            policy, num_engines = await connect_policy(config, instrumentation, ctx.rank, ctx.world_size)
        to_close.push_async_callback(policy.close)
        if traits.is_time_shared and judge is not None:
            if not takes_turns:
                await policy.wake()
            policy, judge = TimeSharedEngines([policy, judge], first_is_awake=not takes_turns).engines
        sharing = [policy, *filter(None, [judge])] if takes_turns else []
        services = ControllerServices(
            policy=policy, judge=judge, devices=devices, num_engines=num_engines, sharing=sharing
        )
        await run_controller(job, ctx, services, ctx.report)


async def _move_as_noticed(ctx: Context[Handles], lending: LendingEngines) -> None:
    """Move this controller's engines between the roles whenever the backend gives notice of other sizes."""
    engines, judges = len(ctx.roles.engines), len(ctx.roles.judges)
    num_places = [sum(len(range(r, n, ctx.world_size)) for n in (engines, judges)) for r in range(ctx.world_size)]
    while True:
        sizes: Sizes = await ctx.notices.get()
        share = policy_share(sizes.engines, num_places, ctx.rank)
        lending.arrange([share, num_places[ctx.rank] - share])


class LivePlacement:
    """A dynamic partition of engines that observes their work and moves them one by one, or more after a jump.

    With ``auto``, it also chooses between that and engines of both roles on every device, in turns. Every controller
    keeps an engine of the policy, and a judge is always there. It starts with the engines as ``whole`` divides them.
    """

    def __init__(self, whole: Sizes, config: PlacementConfig) -> None:
        self.whole = whole
        policy = RoleLimits(devices_per_replica=1, min_replicas=whole.controllers)
        reward, num_devices = RoleLimits(devices_per_replica=1), whole.engines + whole.judges
        self._space = PartitionSpace(num_devices=num_devices, roles=(policy, reward))
        self._horizon_steps = config.horizon_steps
        self._dynamic = self._started_at(whole.engines)
        self._choice: StrategyChoice | None = None
        if config.strategy == "auto":
            self._choice = StrategyChoice(self._space, horizon_steps=config.horizon_steps)
        self.swap_s: float | None = None if self._choice is not None else 0.0
        """Seconds to put both roles' engines to sleep and to wake them, as last measured; None: not yet."""
        self._unit_s: dict[Role, deque[float]] = {"gen": deque(maxlen=_NUM_STEPS), "reward": deque(maxlen=_NUM_STEPS)}
        """Device-seconds per token, or image, of each role in the last steps."""
        self._move_s = 0.0
        self._moved_at_s: float | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes, with the engines as they are to be divided."""
        if self._choice is not None and STRATEGIES[self._choice.strategy].is_time_shared:
            both = self._space.num_devices
            return replace(self.whole, engines=both, judges=both, in_turns=True)
        engines, judges = self._dynamic.partition.replicas
        return replace(self.whole, engines=engines, judges=judges)

    def observe(self, metrics: Mapping[str, float], devices: Mapping[str, Sequence[Span]]) -> None:
        """Observe a step, and when each device worked in it."""
        now_s = time.monotonic()
        if self._moved_at_s is not None:
            # From the decision to the end of the first step after it, or within that.
            pause_s = now_s - self._moved_at_s - metrics["timing_s/step"]
            swaps_s = (span.end_s - span.start_s for own in devices.values() for span in own if span.stage == "swap")
            self._move_s = max(0.0, pause_s, *swaps_s)
            self._moved_at_s = None
        if (loads := self._loads(metrics, devices)) is None:
            return
        policy, reward, start_s, end_s = loads
        before, stage_s = self.sizes, end_s - start_s
        self._dynamic.config = replace(self._dynamic.config, move_s=self._move_s)
        if not before.in_turns:
            self._dynamic.observe(policy, reward)
        if self._choice is not None:
            self._choice.switch_s = self._move_s
            num_turns = max(1.0, metrics.get("sampling/waves", 1.0))
            if before.in_turns or self.swap_s is None:
                # Those of the device that swapped for longest. Where engines take turns with ranks, too, they swap
                # before and after sampling with any placement.
                is_counted = (lambda s: start_s <= s.start_s < end_s) if before.ranks_in_turns else (lambda _: True)
                swaps = ([s for s in own if s.stage == "swap" and is_counted(s)] for own in devices.values())
                self.swap_s = max((sum(s.end_s - s.start_s for s in own) for own in swaps), default=0.0) / num_turns
            strategy = self._choice.observe(policy, reward, stage_s=stage_s, swap_s=self.swap_s * num_turns)
            if before.in_turns and STRATEGIES[strategy].follows_load:
                best = self._dynamic.best((policy.work_device_s, reward.work_device_s))
                self._dynamic = self._started_at(best.devices[0])
        if self.sizes != before:
            self._moved_at_s = now_s

    def _loads(
        self, metrics: Mapping[str, float], devices: Mapping[str, Sequence[Span]]
    ) -> tuple[RoleLoad, RoleLoad, float, float] | None:
        """Return the load of generation and of rewarding, the time of the first request and that of the last verdict.

        None: nothing was generated, or nothing judged.
        """
        roles = tuple(self._unit_s)
        spans = {role: [s for own in devices.values() for s in own if s.stage == role] for role in roles}
        busy_s = {role: sum(span.end_s - span.start_s for span in spans[role]) for role in roles}
        work_s = {role: self._work_s(role, busy_s[role], metrics.get(f"perf/generated/{role}", 0.0)) for role in roles}
        if not all(spans.values()):
            return None
        start_s = min(span.start_s for span in spans["gen"])
        finish_s = {role: max(span.end_s for span in spans[role]) - start_s for role in roles}
        # The judge is done soon after the last response, however many replicas it has, or it is what is waited for.
        was_waiting = {
            "gen": finish_s["gen"] - _covered_s(spans["gen"]) > _SLACK * finish_s["gen"],
            "reward": finish_s["reward"] - finish_s["gen"] < _SLACK * finish_s["gen"],
        }
        policy, reward = (
            RoleLoad(
                work_device_s=work_s[role],
                busy_device_s=busy_s[role],
                finish_s=finish_s[role],
                was_waiting=was_waiting[role],
            )
            for role in roles
        )
        return policy, reward, start_s, start_s + max(finish_s.values())

    def _work_s(self, role: Role, busy_s: float, generated: float) -> float:
        """Return the device-seconds of a role's work, as if its engines were as full as they recently were at most."""
        if not (generated and busy_s):
            return busy_s
        self._unit_s[role].append(busy_s / generated)
        return generated * min(self._unit_s[role])

    def metrics(self) -> dict[str, float]:
        """Return the engines of each role, and the measured costs of changes."""
        sizes = self.sizes
        return {
            "placement/engines": float(sizes.engines),
            "placement/judges": float(sizes.judges),
            "placement/in_turns": float(sizes.in_turns),
            "placement/move_s": self._move_s,
            "placement/swap_s": self.swap_s or 0.0,
        }

    def _started_at(self, policy_devices: int) -> DynamicPartition:
        # Loans within a step change the devices of a role, so that its time on them says nothing of its work.
        config = DynamicPartitionConfig(horizon_steps=self._horizon_steps, is_corrected=False)
        return DynamicPartition(self._space, self._space.nearest(policy_devices), config)


def _covered_s(spans: Sequence[Span]) -> float:
    """Return the seconds in which there is at least one span."""
    total_s, end_s = 0.0, float("-inf")
    for start_s, stop_s in sorted((span.start_s, span.end_s) for span in spans):
        total_s += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return total_s
