"""A backend whose controllers, engines and training ranks are Ray actors, which are replaced when they die."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import ray

from gcore_controller.context import Context, run_until_done
from gcore_controller.errors import (
    ClusterError,
    ControllerDiedError,
    DeviceError,
    RankCodeError,
    RankError,
)
from gcore_controller.rlhf.events import (
    Event,
    Recorder,
    Round,
    Stepped,
    Updating,
)
from gcore_controller.runtimes.backend import LENT, Recovery, SizedConfig, Sizes
from gcore_controller.runtimes.ray.actors import ActorRole, RoleActors
from gcore_controller.runtimes.ray.cluster import (
    CapacityWatch,
    ClusterChangedError,
    check_capacity,
    free_resources,
)
from gcore_controller.runtimes.ray.controllers import RayControllers
from gcore_controller.runtimes.ray.devices import ReservedDevice, share_devices
from gcore_controller.runtimes.ray.trainer_group import RankHandles, RayTrainerGroup
from gcore_controller.trainer_group import TrainerSpec

_OBSERVE_EVERY_S = 1.0
_SLEEP_TIMEOUT_S = 10.0
"""Longest wait for an engine that is not ready, which then has no memory to give."""


JobT = TypeVar("JobT")
ConfigT = TypeVar("ConfigT", bound=SizedConfig)


class Placement(Protocol):
    """Decides after every step, and between its waves of sampling, which engines generate and which judge."""

    swap_s: float | None
    """Seconds that it takes to put engines of all roles to sleep and to wake them; None: to be measured."""

    @property
    def initial(self) -> Sizes:
        """The sizes, with the engines as they are divided at first."""
        ...

    @property
    def sizes(self) -> Sizes:
        """The sizes, with the engines as they are to be divided now."""
        ...

    def observe_wave(self, wave: Round) -> None:
        """Observe a wave of sampling that is not the last one of its step."""

    def observe(self, metrics: Mapping[str, float], last: Round) -> None:
        """Observe a step, and its last round: the rest of the step after the waves that were observed."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the present division."""
        ...


@dataclass(frozen=True, kw_only=True)
class Handles:
    """Handles of the services, as every controller gets them.

    Example:
        >>> def pick_engine(ctx: Context[Handles]) -> str:
        ...     return ctx.roles.engines[ctx.rank % len(ctx.roles.engines)]
        >>> services = {"engines": ["engine 0", "engine 1"], "judges": {}, "lent": None, "ranks": RankHandles()}
        >>> handles = Handles(**services, shared_devices={}, folder=Path.cwd())
        >>> pick_engine(Context(group=InlineCollectives(), roles=handles))
        'engine 0'
    """

    engines: Sequence[Any]
    """Engines of the policy; controller r uses every ``world_size``-th from the r-th."""
    judges: Mapping[ActorRole, Sequence[Any]]
    """Engines of each judge, by its role; divided likewise, or shared by several controllers."""
    lent: Sequence[Any] | None
    """Engines of the policy on the devices of ranks, divided from the last controller on; None: none are lent."""
    ranks: RankHandles
    shared_devices: Mapping[str, str]
    """The device of each engine, judge and rank that shares one, by names; see `DeviceTimers`."""
    folder: Path
    """The working folder, to which paths of the user are relative."""


@dataclass(eq=False)
class RayBackend(Generic[JobT, ConfigT]):
    """A `Backend` on a Ray cluster that this process is connected to.

    Example:
        >>> async def train(backend: RayBackend, recorder: Recorder) -> None:
        ...     await backend.start()  # fits its sizes to the cluster
        ...     print(f"the run has {backend.config.sizes}")
        ...     try:
        ...         await backend.run("GRPO", recorder)
        ...     finally:
        ...         await backend.close()
    """

    config: ConfigT
    """The settings, with the sizes that are asked for; from `start` on with those that there is capacity for."""
    _: KW_ONLY
    engines: RoleActors[ConfigT]
    """The actors of engines and judges, not yet started."""
    trainer_spec: Callable[[ConfigT], TrainerSpec]
    """The training ranks for given settings."""
    program: Callable[[JobT], Callable[[Context[Handles]], Awaitable[None]]]
    """The program of a job, for every controller."""
    placement: Callable[[Sizes], Placement] | None = None
    """How engines are divided for given sizes; None: as the sizes say."""
    engine_errors: tuple[type[Exception], ...] = ()
    """Errors of a program that mean that an engine died."""
    announce: Callable[[str], None] | None = None
    """Prints a line on the screen, such as what an engine died of."""
    after_end: Callable[[], Awaitable[None]] | None = None
    """Called after processes have ended: when lost ones were replaced, and when all were closed."""

    def __post_init__(self) -> None:
        self.learner = RayTrainerGroup()
        self._asked = self.config
        self._announced: set[str] = set()
        self._capacity = CapacityWatch(self.config)
        self._placement: Placement | None = None
        self._rank_devices: Sequence[ReservedDevice] = []
        self._device_names: Mapping[str, str] = {}
        self._controllers: RayControllers | None = None
        self._stages: Sequence[str | None] = []
        self._is_updating = False

    async def start(self) -> Self:
        """Start the actors of all roles, or raise `ClusterError` if the cluster lacks the capacity.

        If some of them find no capacity, it is announced.
        """
        try:
            await self._settle(keeps_models=False)
        except BaseException:
            await self.close()
            raise
        if self.announce is not None and self._capacity.shortfall:
            self.announce(self._capacity.shortfall)
        return self

    async def run(self, job: JobT, recorder: Recorder) -> None:
        handles = Handles(
            engines=self.engines.handles["engine"],
            judges=self.engines.judges,
            lent=self.engines.handles.get(LENT),
            ranks=self.learner.ranks,
            shared_devices=self._device_names,
            folder=Path.cwd(),
        )
        assert self._controllers is not None
        run = self._controllers.run(
            self.program(job), roles=handles, reported=partial(self._take_in, recorder)
        )
        try:
            await run_until_done(run, self._watch_capacity(), self._observe_stages())
        except RankError as error:
            self.learner.loss = error
            raise
        finally:
            # Nothing else finds out what is lost from now on.
            self._is_updating = False
            if self.config.sizes.shares_ranks:
                # The models may be saved now, for which they wake. An engine that died is replaced by `recover`.
                await self.engines.end_turn(timeout_s=_SLEEP_TIMEOUT_S)

    def stages(self) -> Sequence[str | None]:
        return self._stages

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        remedy = ""
        if isinstance(error, ControllerDiedError):
            remedy = "another one takes over its share"
        elif isinstance(error, self.engine_errors):
            remedy = "connecting again"
            if self.config.sizes.engines:
                remedy = "they were started again"
        elif isinstance(error, RankError):
            remedy = "all training ranks were started again"
        elif not isinstance(error, ClusterChangedError):
            if isinstance(error, RankCodeError):
                # The others wait for the one that failed, and would not answer.
                self.learner.kill()
            raise error
        before = self._capacity.fitting_sizes
        keeps_models = await self._settle(keeps_models=keeps_models)
        if self.after_end is not None:
            await self.after_end()
        if isinstance(error, DeviceError):
            on = "other devices" if self.learner.failed else "the same devices"
            remedy = f"all training ranks were started again on {on}"
        if self._capacity.fitting_sizes != before:
            remedy = f"the run has {self._capacity.fitting_sizes} now, of {self._asked.sizes}"
        message = str(error)
        if remedy:
            message += f"; {remedy}"
        cause: Literal["failure", "swap"] = "failure"
        if isinstance(error, ClusterChangedError) and error.is_swap:
            cause = "swap"
        return Recovery(message=message, keeps_models=keeps_models, cause=cause)

    async def close(self) -> None:
        """End all services; disconnect from the cluster, and end it if this process started it."""
        try:
            self.learner.close()
        finally:
            await self.engines.close()
            if self._controllers is not None:
                await self._controllers.close()
            if self.after_end is not None:
                await self.after_end()
            ray.shutdown()

    async def _take_in(self, recorder: Recorder, rank: int, event: Event) -> None:
        """Record an event; raise `ClusterChangedError` if that calls for other processes."""
        del rank
        placement = self._placement
        if isinstance(event, str):
            # Another controller with the same engine may have reported it already.
            if self.announce is not None and event not in self._announced:
                self._announced.add(event)
                self.announce(event)
            return
        if isinstance(event, Round):
            if placement is not None:
                placement.observe_wave(event)
                if placement.sizes != self.config.sizes:
                    await self._arrange_engines(placement.sizes)
            return
        arranging: asyncio.Future[object] | None = None
        if isinstance(event, Stepped) and placement is not None:
            event.metrics.update(placement.metrics())
            placement.observe(event.metrics, event.last)
            if not event.is_last:
                # Engines move while the step is recorded and saved, which waits for nothing else.
                arranging = asyncio.ensure_future(self._arrange_engines(placement.sizes))
        await recorder(event)
        if arranging is not None:
            await arranging
        self._is_updating = isinstance(event, Updating)
        if isinstance(event, Stepped) and not event.is_last:
            self._capacity.check_growth()
            if placement is not None:
                sizes = placement.sizes
                now = self.config.sizes
                if sizes != now:
                    raise ClusterChangedError(_move(now, sizes), is_swap=True)

    def _arrange_engines(self, sizes: Sizes) -> Awaitable[object]:
        """Have the controllers bring the engines of their roles to the sizes, if all of them have some of each role.

        Engines that were lent within the step return, too. The actors' handles stay those of their first roles, until
        `RoleActors.resize` brings them to the sizes. The result is to be awaited: then all controllers know.
        """
        before = self.config.sizes
        fewest = min(before.engines, sizes.engines, *before.judges.values(), *sizes.judges.values())
        if before.in_turns or sizes.in_turns or fewest < sizes.controllers:
            return asyncio.sleep(0)
        assert self._controllers is not None
        sent = self._controllers.notify(sizes)
        if sizes != before:
            self.config = self._asked.with_sizes(sizes)
            if self.announce is not None:
                self.announce(_move(before, sizes))
        return sent

    async def _settle(self, *, keeps_models: bool) -> bool:
        """Start the processes that there is capacity for, end those that are too many; return whether models stay."""
        while True:
            sizes = self._capacity.size()
            if self.placement is not None:
                if self._placement is None or self._placement.initial != sizes:
                    self._placement = self.placement(sizes)
                sizes = self._placement.sizes
            config = self._asked.with_sizes(sizes)
            if keeps_models and sizes.ranks != self.config.sizes.ranks:
                # A checkpoint of theirs may still be in flight.
                with suppress(RankError):
                    self.learner.close()
                keeps_models = False
            try:
                return await run_until_done(
                    self._resize(config, keeps_models=keeps_models), self._watch_capacity()
                )
            except ClusterChangedError:
                keeps_models = False

    async def _resize(self, config: ConfigT, *, keeps_models: bool) -> bool:
        """Start and end processes for new settings, and return whether the ranks and their models are the same."""
        if (
            self._controllers is not None
            and config.sizes.controllers != self.config.sizes.controllers
        ):
            await self._controllers.close()
            self._controllers = None
        self.config = config
        if self._controllers is None:
            needs = {"CPU": 1.0, "GPU": config.gpus_per_controller}
            check_capacity(needs, config.sizes.controllers)
        takes_turns = config.sizes.shares_ranks
        if takes_turns and keeps_models:
            # New engines start where ranks are.
            await self.learner.sleep()
        elif takes_turns:
            self.learner.kill()
        # Before the controllers: those that are too many leave their capacity, and larger ones need it on one node.
        await self.engines.resize(config.sizes, config)
        if self._controllers is None:
            await self._start_controllers(config)
        else:
            await self._controllers.restore()
        if self._placement is not None and self._placement.swap_s is None:
            self._placement.swap_s = await self.engines.swap_seconds(config)
        devices: Sequence[ReservedDevice] = []
        if takes_turns:
            # The trainer has the first turn.
            await self.engines.sleep(timeout_s=config.ray.timeout_s)
            devices = await self.engines.devices()
        before = self._rank_devices
        self._rank_devices, self._device_names = share_devices(config.sizes, devices)
        keeps_models = keeps_models and self._rank_devices == before
        if not keeps_models:
            await self.learner.start(
                self.trainer_spec(config),
                num_cpus=1.0,
                num_gpus=config.ray.gpus_per_rank if config.device.startswith("cuda") else 0,
                timeout_s=config.ray.timeout_s,
                devices=self._rank_devices,
            )
        return keeps_models

    async def _start_controllers(self, config: ConfigT) -> None:
        """Start controllers, which fit between engines over several devices, once these are placed."""
        if config.sizes.devices_per_engine > 1:
            try:
                await asyncio.wait_for(self.engines.devices(), config.ray.timeout_s)
            except TimeoutError:
                free = f"within {config.ray.timeout_s} s: free are {free_resources()}"
                raise ClusterError(
                    f"{config.sizes.num_engine_places} engines found no capacity {free}"
                ) from None
        self._controllers = await RayControllers.start(
            world_size=config.sizes.controllers,
            num_cpus=1.0,
            resources={"GPU": config.gpus_per_controller} if config.gpus_per_controller else None,
            start_timeout_s=config.ray.timeout_s,
            heartbeat_timeout_s=self.trainer_spec(config).heartbeat_timeout_s,
        )

    async def _watch_capacity(self) -> None:
        """Raise `ClusterChangedError` once not all processes fit any more."""
        while True:
            loss = await self._capacity.loss(self.config.sizes)
            # In the middle of an update the ranks find it out; otherwise the step is completed.
            if not self._is_updating:
                raise loss

    async def _observe_stages(self) -> None:
        assert self._controllers is not None
        while True:
            await asyncio.sleep(_OBSERVE_EVERY_S)
            self._stages = await self._controllers.stages()


def _move(before: Sizes, after: Sizes) -> str:
    """Describe what happens to the engines."""
    judging = " + ".join(map(str, after.judges.values()))
    if after.in_turns:
        return f"{after.engines} devices generate and judge in turns now"
    if before.in_turns:
        return f"{after.engines} engines generate and {judging} judge now, side by side"
    changes = {"policy": after.engines - before.engines}
    for role, number in after.judges.items():
        changes[role] = number - before.judges[role]
    num_moved = 0
    sources: list[str] = []
    targets: list[str] = []
    for role, change in changes.items():
        if change < 0:
            sources.append(role)
        elif change > 0:
            targets.append(role)
            num_moved += change
    return (
        f"{num_moved} engine{'s' * (num_moved > 1)} moved from the {' and the '.join(sources)} to the "
        f"{' and the '.join(targets)}: {after.engines} generate and {judging} judge now"
    )
