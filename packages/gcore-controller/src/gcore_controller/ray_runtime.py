"""The `ray` runtime: every controller is an actor of a Ray cluster, and they talk to each other directly."""

import asyncio
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from gcore_controller.context import Context, Program, ResultT, RolesT
from gcore_controller.errors import ClusterError, ControllerDiedError, DeadlineError, MissingExtraError
from gcore_controller.peer_collectives import Message, PeerCollectives
from gcore_controller.stages import StageTimer

# Where the program was started by `uv run`, Ray would build its environment anew for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

T = TypeVar("T")

_END_TIMEOUT_S = 10.0
_TICKET_RANK = 0
_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}


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
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers, spread over the nodes of a Ray cluster.

    Args:
        program: a function that Ray can pickle, as it can closures and what modules on every node hold.
        roles: pickled, too: handles of services, rather than services.
        num_cpus: that each controller reserves.
        resources: that each controller reserves besides, by Ray's names.
        timeout_s: how long the whole run may take; None: as long as it takes.
        start_timeout_s: how long it may take until there is room for all controllers, and then, until they are there.
        address: of the cluster, as `ray.init` takes it; default: the one that this process is connected to, the one
            that RAY_ADDRESS names, or a new one on this machine, for this run.

    Returns:
        each controller's result, by rank.

    Raises:
        ClusterError: there are too few resources, or they are not free in time.
        ControllerDiedError: a controller's process or node was lost; it says which, where, and of what.
        DeadlineError: the run took longer; it says in which stage each controller was.
        Exception: the first controller's error, as it was raised there, with a note that tells where.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: at least 1 is needed")
    was_connected = ray.is_initialized()
    if not was_connected:
        ray.init(address=address)
    bundle = {"CPU": num_cpus, **(resources or {})}
    _check_capacity(bundle, world_size)
    room = placement_group([bundle] * world_size, strategy="SPREAD")
    controllers: list[Any] = []
    try:
        await _in_time(room.ready(), start_timeout_s, f"{world_size} controllers, each with {bundle}, found no room")
        make: Any = ray.remote(_Controller)
        for rank in range(world_size):
            place = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank)
            options = {"num_cpus": num_cpus, "resources": dict(resources or {}), "scheduling_strategy": place}
            controllers.append(make.options(**options).remote(rank, world_size))
        # One that dies on the way here has no place yet.
        meeting = _all([c.meet.remote(controllers) for c in controllers], names=[""] * world_size)
        names = await _in_time(meeting, start_timeout_s, f"{world_size} controllers did not all start")
        runs = [c.run.remote(program, roles) for c in controllers]
        return await _all(runs, names=[f", {name}," for name in names], timeout_s=timeout_s, controllers=controllers)
    finally:
        await _end(controllers)
        remove_placement_group(room)
        if not was_connected:
            ray.shutdown()


def _check_capacity(bundle: Mapping[str, float], world_size: int) -> None:
    total: Mapping[str, float] = ray.cluster_resources()
    for name, amount in bundle.items():
        if amount * world_size > total.get(name, 0.0):
            raise ClusterError(
                f"{world_size} controllers need {amount * world_size:g} {name}: "
                f"the cluster has {total.get(name, 0.0):g}; start more nodes, or fewer controllers"
            )


async def _in_time(work: Awaitable[T], timeout_s: float, what: str) -> T:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(work), timeout_s)
    except TimeoutError:
        raise ClusterError(f"{what} within {timeout_s} s: free are {ray.available_resources()}") from None


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
            raise ControllerDiedError(f"controller {rank}{names[rank]} died: {_reason(error)}") from None
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


def _reason(error: RayActorError) -> str:
    """Ray's many words in few."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    found = re.search(r"[Ww]orker exit type: (\w+)|exit type: (\w+)", str(error))
    kind = next((g for g in found.groups() if g), "") if found else ""
    return _DEATHS.get(kind) or str(error).strip().rpartition("\n")[2]


async def _end(controllers: Sequence[Any]) -> None:
    """Have programs that still run clean up, then end all processes."""
    ends = [asyncio.ensure_future(controller.end.remote()) for controller in controllers]
    if ends:
        await asyncio.wait(ends, timeout=_END_TIMEOUT_S)
    for end, controller in zip(ends, controllers, strict=True):
        if end.done():
            end.exception()  # of one that has died
        ray.kill(controller)


class _Controller(Generic[RolesT, ResultT]):
    """The actor of one controller."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._peers: list[Any] = []
        self._next_tickets: dict[str, int] = {}
        self._collectives = PeerCollectives(rank, world_size, send=self._send, take_tickets=self._take_from_all)
        self._timer = StageTimer()
        self._run: asyncio.Task[ResultT] | None = None

    async def meet(self, peers: Sequence[Any]) -> str:
        """Get to know everybody; where this one is."""
        self._peers = list(peers)
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def run(self, program: Program[RolesT, ResultT], roles: RolesT) -> ResultT:
        clock = asyncio.get_running_loop().time
        self._timer = StageTimer(clock)
        context = Context(group=self._collectives, roles=roles, timer=self._timer, clock=clock)

        async def run() -> ResultT:
            return await program(context)

        self._run = asyncio.create_task(run())
        return await self._run

    async def deliver(self, message: Message) -> None:
        self._collectives.deliver(message)

    async def take_tickets(self, count: int, counter: str) -> int:
        """The first of so many; the controller of one rank counts for all."""
        start = self._next_tickets.get(counter, 0)
        self._next_tickets[counter] = start + count
        return start

    async def stage(self) -> str | None:
        return self._timer.current

    async def end(self) -> None:
        """Cancel the program, and wait until it has cleaned up."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])

    async def _send(self, rank: int, message: Message) -> None:
        await self._peers[rank].deliver.remote(message)

    async def _take_from_all(self, count: int, counter: str) -> int:
        return await self._peers[_TICKET_RANK].take_tickets.remote(count, counter)
