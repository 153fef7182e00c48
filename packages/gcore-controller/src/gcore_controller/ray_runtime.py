"""The `ray` runtime: every controller is an actor of a Ray cluster, and they talk to each other directly."""

import asyncio
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Self, TypeVar

from gcore_controller.collectives import TicketCounters
from gcore_controller.context import Context, Program, Reported, ResultT, RolesT, unheard
from gcore_controller.errors import (
    ClusterError,
    ControllerDiedError,
    DeadlineError,
    MissingExtraError,
    ReferenceLostError,
)
from gcore_controller.peer_collectives import Message, PeerCollectives
from gcore_controller.references import Reference, nbytes_of
from gcore_controller.stages import StageTimer

# Where the program was started by `uv run`, Ray would build its environment anew for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    import ray
    from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

T = TypeVar("T")

_END_TIMEOUT_S = 10.0
_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}


@dataclass(frozen=True)
class RayReference(Generic[T]):
    """A value in Ray's object stores, for as long as the process that put it lives and a reference is left."""

    object_ref: Any
    nbytes: int

    async def get(self) -> T:
        """Arrays are read-only, and those of this node are read where they lie."""
        try:
            return await self.object_ref
        except ObjectLostError as error:
            raise ReferenceLostError(
                f"a value of {self.nbytes} bytes is lost, for the process that put it or its node has ended"
            ) from error


def put(value: T, /) -> Reference[T]:
    """Copy a value into this node's object store; also for services, which have no `Context`."""
    return RayReference(ray.put(value), nbytes_of(value))


async def run_ray(
    program: Program[RolesT, ResultT],
    *,
    roles: RolesT,
    world_size: int = 1,
    num_cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    address: str | None = None,
    reported: Reported = unheard,
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers, spread over the nodes of a Ray cluster.

    See `RayControllers.start` and `RayControllers.run` for arguments, results and errors.
    """
    controllers = await RayControllers.start(
        world_size=world_size,
        num_cpus=num_cpus,
        resources=resources,
        start_timeout_s=start_timeout_s,
        address=address,
    )
    try:
        return await controllers.run(program, roles=roles, timeout_s=timeout_s, reported=reported)
    finally:
        await controllers.close()


class RayControllers:
    """Controllers on the nodes of a Ray cluster, which run one program after another; made by `start`.

    Attributes:
        world_size: How many there are.
    """

    def __init__(self, room: Any, bundle: Mapping[str, float], *, world_size: int, start_timeout_s: float) -> None:
        self.world_size = world_size
        self._room = room
        self._bundle = dict(bundle)
        self._start_timeout_s = start_timeout_s
        self._controllers: list[Any] = [None] * world_size
        self._num_runs = 0
        self._disconnects = False

    @classmethod
    async def start(
        cls,
        *,
        world_size: int = 1,
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        start_timeout_s: float = 120.0,
        address: str | None = None,
    ) -> Self:
        """Find room for the controllers.

        Args:
            world_size: how many.
            num_cpus: that each controller reserves.
            resources: that each controller reserves besides, by Ray's names.
            start_timeout_s: how long it may take until there is room for all controllers, and then, at every run, until
                they are there.
            address: of the cluster, as `ray.init` takes it; default: the one that this process is connected to, the one
                that RAY_ADDRESS names, or a new one on this machine, until `close`.

        Raises:
            ClusterError: there are too few resources, or they are not free in time.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: at least 1 is needed")
        was_connected = ray.is_initialized()
        if not was_connected:
            ray.init(address=address)
        try:
            bundle = {"CPU": num_cpus, **(resources or {})}
            _check_capacity(bundle, world_size)
            room = placement_group([bundle] * world_size, strategy="SPREAD")
            controllers = cls(room, bundle, world_size=world_size, start_timeout_s=start_timeout_s)
            controllers._disconnects = not was_connected
            try:
                what = f"{world_size} controllers, each with {bundle}, found no room"
                await _in_time(room.ready(), start_timeout_s, what)
            except BaseException:
                remove_placement_group(room)
                raise
        except BaseException:
            if not was_connected:
                ray.shutdown()
            raise
        return controllers

    async def run(
        self,
        program: Program[RolesT, ResultT],
        *,
        roles: RolesT,
        timeout_s: float | None = None,
        reported: Reported = unheard,
    ) -> list[ResultT]:
        """Run a program on every controller; those that have died before are replaced first, and the others kept.

        Args:
            program: a function that Ray can pickle, as it can closures and what modules on every node hold.
            roles: pickled, too: handles of services, rather than services.
            timeout_s: how long the whole run may take; None: as long as it takes.
            reported: called here with the rank and the value of every `Context.report`, one of a controller at a time.

        Returns:
            each controller's result, by rank.

        Raises:
            ClusterError: controllers do not start.
            ControllerDiedError: a controller's process or node was lost; it says which, where, and of what.
            DeadlineError: the run took longer; it says in which stage each controller was.
            Exception: the first controller's error, as it was raised there, with a note that tells where; or what
                ``reported`` raised.
        """
        self._num_runs += 1
        names = [f", {name}," for name in await self._meet()]
        controllers = list(self._controllers)
        packed = ray.put((program, roles))
        hearings = [asyncio.create_task(_hear(c, rank, reported)) for rank, c in enumerate(controllers)]
        running = asyncio.create_task(
            _all([c.run.remote(packed) for c in controllers], names=names, timeout_s=timeout_s, controllers=controllers)
        )
        try:
            await asyncio.wait([running, *hearings], return_when=asyncio.FIRST_COMPLETED)
            for hearing in hearings:
                if hearing.done():
                    hearing.result()
            return await running
        finally:
            running.cancel()
            for hearing in hearings:
                hearing.cancel()
            await asyncio.gather(running, *hearings, return_exceptions=True)
            await self._end_programs()

    async def stages(self) -> list[str | None]:
        """The stage that each controller is in now; None of one that is in none, or does not answer."""
        calls = (asyncio.ensure_future(c.stage.remote()) for c in self._controllers if c is not None)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def close(self) -> None:
        """End all processes."""
        for controller in self._controllers:
            if controller is not None:
                ray.kill(controller)
        remove_placement_group(self._room)
        if self._disconnects:
            ray.shutdown()

    async def _meet(self) -> list[str]:
        """Make the controllers that are missing, and let all know each other; where each is."""
        make: Any = ray.remote(_Controller)
        for rank, controller in enumerate(self._controllers):
            if controller is None:
                place = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank)
                others = {name: amount for name, amount in self._bundle.items() if name != "CPU"}
                options = {"num_cpus": self._bundle["CPU"], "resources": others, "scheduling_strategy": place}
                self._controllers[rank] = make.options(**options).remote(rank, self.world_size)
        calls = [c.meet.remote(self._controllers, self._num_runs) for c in self._controllers]
        # One that dies on the way here has no place yet.
        meeting = _all(calls, names=[""] * self.world_size)
        return await _in_time(meeting, self._start_timeout_s, f"{self.world_size} controllers did not all start")

    async def _end_programs(self) -> None:
        """Have programs that still run clean up; a controller that cannot is done without."""
        ends = [asyncio.ensure_future(controller.end.remote()) for controller in self._controllers]
        await asyncio.wait(ends, timeout=_END_TIMEOUT_S)
        for rank, end in enumerate(ends):
            if not end.done() or end.exception():
                end.add_done_callback(lambda done: done.cancelled() or done.exception())
                ray.kill(self._controllers[rank])
                self._controllers[rank] = None


async def _hear(controller: Any, rank: int, reported: Reported) -> None:
    """Hand on what a controller reports, until it has died."""
    with suppress(RayActorError):
        while True:
            number, value = await controller.next_report.remote()
            await reported(rank, value)
            await controller.heard.remote(number)
    await asyncio.get_running_loop().create_future()  # the run's own error tells of it


def _check_capacity(bundle: Mapping[str, float], world_size: int) -> None:
    total: Mapping[str, float] = ray.cluster_resources()
    for name, amount in bundle.items():
        if amount * world_size > total.get(name, 0.0):
            raise ClusterError(
                f"{world_size} controllers need {amount * world_size:g} {name}: "
                f"the cluster has {total.get(name, 0.0):g}; start more nodes, or fewer controllers"
            )


def free_resources() -> str:
    """What no process of the cluster has reserved."""
    free: Mapping[str, float] = ray.available_resources()
    own = {name: amount for name, amount in free.items() if "_group_" not in name and ":" not in name}
    memory = {name: own.pop(name, 0.0) / 1e9 for name in ("memory", "object_store_memory")}
    counts = {"CPU": 0.0, **own}
    return ", ".join(
        [
            *(f"{amount:g} {name}" for name, amount in counts.items()),
            *(f"{amount:.1f} GB {name}" for name, amount in memory.items()),
        ]
    )


async def _in_time(work: Awaitable[T], timeout_s: float, what: str) -> T:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(work), timeout_s)
    except TimeoutError:
        raise ClusterError(f"{what} within {timeout_s} s: free are {free_resources()}") from None


async def _all(
    calls: Sequence[Any], *, names: Sequence[str], timeout_s: float | None = None, controllers: Sequence[Any] = ()
) -> list[Any]:
    """What a call of every controller returns, by rank; see `run_ray` for what is raised."""
    runs = [asyncio.ensure_future(call) for call in calls]
    for run in runs:
        # After the first error, nobody asks for the others'.
        run.add_done_callback(lambda done: done.cancelled() or done.exception())
    _, pending = await asyncio.wait(runs, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    if _errors(runs):
        await _raise_first(runs, names)
    if pending:
        stages = await asyncio.gather(*(controller.stage.remote() for controller in controllers))
        where = ", ".join(f"controller {rank} in {stage or 'no stage'}" for rank, stage in enumerate(stages))
        raise DeadlineError(f"the run is not done after {timeout_s} s: {where}")
    return [run.result() for run in runs]


async def _raise_first(runs: "Sequence[asyncio.Future[Any]]", names: Sequence[str]) -> NoReturn:
    errors = _errors(runs)
    if any(isinstance(_cause(error), RayActorError) for error in errors.values()):
        # A controller that found another one gone may be quicker than the news of that one's death.
        while not any(isinstance(error, RayActorError) for error in errors.values()) and len(errors) < len(runs):
            await asyncio.wait([run for run in runs if not run.done()], return_when=asyncio.FIRST_COMPLETED)
            errors = _errors(runs)
    for rank, error in errors.items():
        if isinstance(error, RayActorError):
            raise ControllerDiedError(f"controller {rank}{names[rank]} died: {reason_of(error)}") from None
    rank, error = next(iter(errors.items()))
    cause = _cause(error)
    cause.add_note(f"raised by controller {rank}{names[rank]}:\n{error}")
    raise cause from None


def _errors(runs: "Sequence[asyncio.Future[Any]]") -> dict[int, BaseException]:
    """What runs have raised, by rank."""
    found = ((rank, run.exception()) for rank, run in enumerate(runs) if run.done())
    return {rank: error for rank, error in found if error is not None}


def _cause(error: BaseException) -> BaseException:
    """What was raised over there."""
    return error.cause if isinstance(error, RayTaskError) else error


def reason_of(error: RayActorError) -> str:
    """Ray's many words in few."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    found = re.search(r"[Ww]orker exit type: (\w+)|exit type: (\w+)", str(error))
    kind = next((g for g in found.groups() if g), "") if found else ""
    return _DEATHS.get(kind) or str(error).strip().rpartition("\n")[2]


class _Controller(Generic[RolesT, ResultT]):
    """The actor of one controller."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._run: asyncio.Task[ResultT] | None = None
        self._begin([], 0)

    def _begin(self, peers: Sequence[Any], number: int) -> None:
        self._peers = list(peers)
        self._run_number = number
        self._tickets = TicketCounters()
        self._collectives = PeerCollectives(
            self._rank, self._world_size, send=self._send, take_tickets=self._take_tickets_at
        )
        self._timer = StageTimer()
        self._reports: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._unheard: dict[int, asyncio.Future[None]] = {}

    async def meet(self, peers: Sequence[Any], run_number: int) -> str:
        """Get to know everybody for a new run; where this one is."""
        self._begin(peers, run_number)
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def run(self, packed: tuple[Program[RolesT, ResultT], RolesT]) -> ResultT:
        program, roles = packed
        clock = asyncio.get_running_loop().time
        self._timer = StageTimer(clock)
        context = Context(
            group=self._collectives, roles=roles, timer=self._timer, clock=clock, put=put, report=self._report
        )

        async def run() -> ResultT:
            return await program(context)

        self._run = asyncio.create_task(run())
        return await self._run

    async def deliver(self, message: Message, run_number: int) -> None:
        # What is left of a run that has ended is for nobody.
        if run_number == self._run_number:
            self._collectives.deliver(message)

    async def take_tickets(self, count: int, counter: str, limit: int | None) -> range:
        """Of a counter that this controller keeps."""
        return self._tickets.take(count, counter, limit)

    async def next_report(self) -> tuple[int, Any]:
        """The next value that the program reports, with a number for `heard`."""
        return await self._reports.get()

    async def heard(self, number: int) -> None:
        """What was reported under this number has been taken in."""
        if number in self._unheard:
            self._unheard[number].set_result(None)

    async def stage(self) -> str | None:
        return self._timer.current

    async def end(self) -> None:
        """Cancel the program, and wait until it has cleaned up."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])

    async def _send(self, rank: int, message: Message) -> None:
        await self._peers[rank].deliver.remote(message, self._run_number)

    async def _report(self, value: Any) -> None:
        number = len(self._unheard)
        heard = self._unheard[number] = asyncio.get_running_loop().create_future()
        self._reports.put_nowait((number, value))
        await heard

    async def _take_tickets_at(self, rank: int, count: int, counter: str, limit: int | None) -> range:
        if rank == self._rank:
            return self._tickets.take(count, counter, limit)
        return await self._peers[rank].take_tickets.remote(count, counter, limit)
