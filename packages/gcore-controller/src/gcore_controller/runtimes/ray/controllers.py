"""The controllers of a run on Ray: their actors, and the process that starts them and waits for them."""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gcore_controller.collectives.base import TicketCounters, Whereabouts, describe
from gcore_controller.collectives.peer import Message, PeerCollectives
from gcore_controller.context import (
    Context,
    Program,
    Reported,
    ResultT,
    RolesT,
    StageTimer,
    refuse_report,
    run_program,
)
from gcore_controller.errors import (
    ClusterError,
    CollectiveMismatchError,
    ControllerDiedError,
    DeadlineError,
    UnpicklableValueError,
)
from gcore_controller.runtimes.ray.cluster import check_capacity, connect, free_resources, future_of, put, reason_of

T = TypeVar("T")

_ANSWER_TIMEOUT_S = 10.0
_NEWS_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class ControllerActor(Generic[RolesT, ResultT]):
    """Runs a program, and carries messages between it and the other controllers."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._run: asyncio.Task[ResultT] | None = None
        self._begin([], 0)

    def _begin(self, peers: Sequence[Any], number: int) -> None:
        self._peers = list(peers)
        self._run_number = number
        self._tickets = TicketCounters()
        # A task that is left over from an earlier run must not interfere with this one.
        send, take_tickets = partial(self._send, number), partial(self._take_tickets_at, number)
        self._collectives = PeerCollectives(self._rank, self._world_size, send=send, take_tickets=take_tickets)
        self._timer = StageTimer()
        self._reports: asyncio.Queue[tuple[Any, asyncio.Future[None]]] = asyncio.Queue()
        self._last_report: asyncio.Future[None] | None = None

    async def meet(self, peers: Sequence[Any], run_number: int) -> str:
        """Prepare for a new run with these controllers; return this process and its node in words."""
        await self._collectives.close()
        self._begin(peers, run_number)
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def run(self, packed: tuple[Program[RolesT, ResultT], RolesT]) -> ResultT:
        program, roles = packed
        clock = asyncio.get_running_loop().time
        self._timer = StageTimer(clock)
        context = Context(
            group=self._collectives, roles=roles, timer=self._timer, clock=clock, put=put, reported=self._report
        )
        self._run = asyncio.create_task(run_program(program, context))
        result = await self._run
        self._collectives.finish()
        return result

    async def deliver(self, message: Message, run_number: int) -> None:
        # Messages that are left over from a run that has ended are dropped.
        if run_number == self._run_number:
            self._collectives.deliver(message)

    async def take_tickets(self, count: int, counter: str, limit: int | None, run_number: int) -> range:
        if run_number != self._run_number:
            raise CollectiveMismatchError("take_tickets was called by a task of a run that has ended")
        return self._tickets.take(count, counter, limit)

    async def next_report(self) -> Any:
        """Let the last report return, and wait for the next value that the program reports."""
        if self._last_report is not None and not self._last_report.done():
            self._last_report.set_result(None)
        value, self._last_report = await self._reports.get()
        return value

    async def whereabouts(self) -> Whereabouts:
        return self._collectives.whereabouts(self._timer.current)

    async def end(self) -> None:
        """Cancel the program, and wait until it has cleaned up."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
        await self._collectives.close()

    async def _send(self, run_number: int, rank: int, message: Message) -> None:
        try:
            delivery = self._peers[rank].deliver.remote(message, run_number)
        except Exception as error:
            # Nothing but the value can be wrong here, and pickling runs code of its class.
            raise UnpicklableValueError(_first_line(error.__cause__ or error)) from error
        try:
            await delivery
        except RayTaskError as error:
            # The actor takes in every message that it can read.
            raise UnpicklableValueError(f"rank {rank} cannot unpickle it: {_first_line(error.cause)}") from error

    async def _report(self, rank: int, value: Any) -> None:
        del rank
        taken = asyncio.get_running_loop().create_future()
        self._reports.put_nowait((value, taken))
        await taken

    async def _take_tickets_at(self, run_number: int, rank: int, count: int, counter: str, limit: int | None) -> range:
        if rank == self._rank:
            return await self.take_tickets(count, counter, limit, run_number)
        return await self._peers[rank].take_tickets.remote(count, counter, limit, run_number)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error; Ray appends an inventory of the whole object."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
    reported: Reported = refuse_report,
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
    """Controllers on the nodes of a Ray cluster, which run one program after another; made by `start`."""

    def __init__(self, bundle: dict[str, float], *, world_size: int, start_timeout_s: float) -> None:
        self._world_size = world_size
        self._placement: Any = placement_group([bundle] * world_size, strategy="SPREAD")
        self._bundle = bundle
        self._start_timeout_s = start_timeout_s
        self._controllers: list[Any] = [None] * world_size
        self._num_runs = 0
        self._is_running = False
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
        """Reserve resources for the controllers.

        Args:
            num_cpus: that each controller reserves, with other ``resources`` by Ray's names.
            start_timeout_s: how long it may take to reserve the resources and, at every run, to start the controllers.
            address: of the cluster, as `ray.init` takes it; default: the one that this process is connected to, the one
                that RAY_ADDRESS names, or a new one on this machine, until `close`.

        Raises:
            ClusterError: there are too few resources, or they are not free in time; or the cluster does not accept this
                process's token.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        was_connected = ray.is_initialized()
        if not was_connected:
            connect(address)
        controllers = None
        try:
            bundle = {"CPU": num_cpus, **(resources or {})}
            check_capacity(bundle, world_size)
            controllers = cls(bundle, world_size=world_size, start_timeout_s=start_timeout_s)
            controllers._disconnects = not was_connected
            what = f"{world_size} controllers, each with {bundle}, found no capacity"
            await _in_time(controllers._placement.ready(), start_timeout_s, what)
        except BaseException:
            if controllers is not None:
                await controllers.close()
            elif not was_connected:
                ray.shutdown()
            raise
        return controllers

    async def run(
        self,
        program: Program[RolesT, ResultT],
        *,
        roles: RolesT,
        timeout_s: float | None = None,
        reported: Reported = refuse_report,
    ) -> list[ResultT]:
        """Run a program on every controller, after replacing those that have died.

        Args:
            program: a function that Ray can pickle, as it can closures and what modules on every node hold.
            roles: pickled, too: handles of services, rather than services.
            timeout_s: how long the whole run may take; None: as long as it takes.
            reported: called with the rank and the value of every `Context.report`, one per controller at a time.

        Returns:
            each controller's result, by rank.

        Raises:
            ClusterError: controllers do not start, or run another program.
            ControllerDiedError: a controller's process or node was lost; it says which, where, and of what.
            Exception: see `run_inline`; the first controller's error has a note that says where it was raised. Or what
                ``reported`` raised.
        """
        if self._is_running:
            raise ClusterError("these controllers run another program; wait for it, or start others")
        self._is_running = True
        try:
            return await self._run(program, roles, timeout_s, reported)
        finally:
            self._is_running = False

    async def _run(
        self, program: Program[RolesT, ResultT], roles: RolesT, timeout_s: float | None, reported: Reported
    ) -> list[ResultT]:
        self._num_runs += 1
        places = await self._introduce()
        controllers = list(self._controllers)
        packed = ray.put((program, roles))
        forwarding = [asyncio.create_task(_forward_reports(c, rank, reported)) for rank, c in enumerate(controllers)]
        calls = [c.run.remote(packed) for c in controllers]
        running = asyncio.create_task(_answers_of_all(calls, controllers, places, timeout_s=timeout_s))
        try:
            await asyncio.wait([running, *forwarding], return_when=asyncio.FIRST_COMPLETED)
            for task in forwarding:
                if task.done():
                    task.result()
            return await running
        finally:
            running.cancel()
            for task in forwarding:
                task.cancel()
            await asyncio.gather(running, *forwarding, return_exceptions=True)
            await self._end_programs()

    async def stages(self) -> list[str | None]:
        """Return the stage that each controller is in; None: it is in none, or does not answer."""
        return [where and where.stage for where in (await _whereabouts_of(self._controllers)).values()]

    async def close(self) -> None:
        """End all processes."""
        for controller in self._controllers:
            if controller is not None:
                ray.kill(controller)
        remove_placement_group(self._placement)
        if self._disconnects:
            ray.shutdown()

    async def _introduce(self) -> list[str]:
        """Start the controllers that are missing, and introduce all to each other; return where each one is."""
        make: Any = ray.remote(ControllerActor)
        for rank, controller in enumerate(self._controllers):
            if controller is None:
                place = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
                others = {name: amount for name, amount in self._bundle.items() if name != "CPU"}
                options = {"num_cpus": self._bundle["CPU"], "resources": others, "scheduling_strategy": place}
                self._controllers[rank] = make.options(**options).remote(rank, self._world_size)
        calls = [c.meet.remote(self._controllers, self._num_runs) for c in self._controllers]
        what = f"{self._world_size} controllers did not all start"
        return await _in_time(_answers_of_all(calls, self._controllers), self._start_timeout_s, what)

    async def _end_programs(self) -> None:
        """Cancel programs that still run and let them clean up; kill controllers that do not answer."""
        ends = [future_of(controller.end.remote()) for controller in self._controllers]
        await asyncio.wait(ends, timeout=_END_TIMEOUT_S)
        for rank, end in enumerate(ends):
            if not end.done() or end.exception():
                ray.kill(self._controllers[rank])
                self._controllers[rank] = None


async def _forward_reports(controller: Any, rank: int, reported: Reported) -> None:
    """Pass on the reports of a controller until it dies."""
    with suppress(RayActorError):
        while True:
            await reported(rank, await controller.next_report.remote())
    await asyncio.get_running_loop().create_future()  # the run itself raises the error


async def _in_time(work: Awaitable[T], timeout_s: float, what: str) -> T:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(work), timeout_s)
    except TimeoutError:
        raise ClusterError(f"{what} within {timeout_s} s: free are {free_resources()}") from None


async def _answers_of_all(
    calls: Sequence[Any], controllers: Sequence[Any], places: Sequence[str] = (), *, timeout_s: float | None = None
) -> list[Any]:
    """Wait for the results of a call of every controller, by rank; see `RayControllers.run` for errors."""
    runs = [future_of(call) for call in calls]
    _, pending = await asyncio.wait(runs, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    if _errors(runs):
        await _raise_first(runs, controllers, [f", {place}," for place in places] or [""] * len(runs))
    if pending:
        where = describe(await _whereabouts_of(controllers))
        raise DeadlineError(f"the run is not done after {timeout_s} s: {where}")
    return [run.result() for run in runs]


async def _whereabouts_of(controllers: Sequence[Any]) -> dict[int, Whereabouts | None]:
    """Return where each controller is, by rank; None: it has died, or its event loop is blocked."""
    calls = {rank: future_of(c.whereabouts.remote()) for rank, c in enumerate(controllers) if c is not None}
    if calls:
        await asyncio.wait(calls.values(), timeout=_ANSWER_TIMEOUT_S)
    answers = {rank: call.result() for rank, call in calls.items() if call.done() and not call.exception()}
    return {rank: answers.get(rank) for rank in range(len(controllers))}


async def _raise_first(
    runs: "Sequence[asyncio.Future[Any]]", controllers: Sequence[Any], places: Sequence[str]
) -> NoReturn:
    errors = _errors(runs)
    ids = {controller._actor_id.hex() for controller in controllers}
    if any(isinstance(cause := _cause(e), RayActorError) and cause.actor_id in ids for e in errors.values()):
        # A controller that found another one gone may be quicker than the news of that one's death.
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_TIMEOUT_S):
                while not any(map(_is_death, errors.values())) and len(errors) < len(runs):
                    await asyncio.wait([run for run in runs if not run.done()], return_when=asyncio.FIRST_COMPLETED)
                    errors = _errors(runs)
    for rank, error in errors.items():
        if _is_death(error):
            assert isinstance(error, RayActorError)
            raise ControllerDiedError(f"controller {rank}{places[rank]} died: {reason_of(error)}") from None
    rank, error = next(iter(errors.items()))
    cause = _cause(error)
    cause.add_note(f"raised by controller {rank}{places[rank]}:\n{error}")
    raise cause from None


def _errors(runs: "Sequence[asyncio.Future[Any]]") -> dict[int, BaseException]:
    """Return the errors that runs have raised, by rank."""
    found = ((rank, run.exception()) for rank, run in enumerate(runs) if run.done())
    return {rank: error for rank, error in found if error is not None}


def _is_death(error: BaseException) -> bool:
    """Return whether the controller itself died; if it raised the error of another's death, that has both types."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _cause(error: BaseException) -> BaseException:
    """Return the error that was raised in the other process."""
    return error.cause if isinstance(error, RayTaskError) else error
