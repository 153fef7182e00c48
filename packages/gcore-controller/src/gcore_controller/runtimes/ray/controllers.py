"""The controllers of a run on Ray: their actors, and the process that starts them and waits for them."""

import asyncio
import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gcore_controller.collectives.base import Whereabouts, describe, take_tickets
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
    run_until_done,
)
from gcore_controller.errors import (
    ClusterError,
    CollectiveError,
    ControllerDiedError,
    ControllerError,
    UnpicklableValueError,
)
from gcore_controller.runtimes.ray.actors import ActorGroup, answers_in_time
from gcore_controller.runtimes.ray.cluster import check_capacity, connect, free_resources, put

T = TypeVar("T")

_MAX_RESTARTS = 3
"""How many times controllers are started on other nodes because one of them died as it started."""


class ControllerActor(Generic[RolesT, ResultT]):
    """Runs a program, and carries messages between it and the other controllers."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._run: asyncio.Task[ResultT] | None = None
        # The stacks of all threads, if it does not answer.
        faulthandler.register(signal.SIGUSR1, file=2, chain=False)
        self._begin([], 0)

    def _begin(self, peers: Sequence[Any], number: int) -> None:
        self._peers = list(peers)
        self._run_number = number
        self._tickets: Counter[str] = Counter()
        # A task that is left over from an earlier run must not interfere with this one.
        self._collectives = PeerCollectives(
            self._rank,
            self._world_size,
            send=partial(self._send, number),
            take_tickets=partial(self._take_tickets_at, number),
        )
        self._timer = StageTimer()
        self._reports: asyncio.Queue[tuple[Any, asyncio.Future[None]]] = asyncio.Queue()
        self._last_report: asyncio.Future[None] | None = None
        self._notices: asyncio.Queue[Any] = asyncio.Queue()

    async def meet(self, peers: Sequence[Any], run_number: int) -> str:
        """Prepare for a new run with these controllers; return this process and its node in words."""
        await self._collectives.close()
        self._begin(peers, run_number)
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    @ray.method(concurrency_group="news")
    async def is_alive(self) -> None:
        """Return at once, even if the program blocks its event loop."""

    async def run(self, packed: tuple[Program[RolesT, ResultT], RolesT]) -> ResultT:
        program, roles = packed
        clock = asyncio.get_running_loop().time
        self._timer = StageTimer(clock)
        context = Context(
            group=self._collectives,
            roles=roles,
            timer=self._timer,
            clock=clock,
            put=put,
            reported=self._report,
            notices=self._notices,
        )
        self._run = asyncio.create_task(run_program(program, context))
        result = await self._run
        self._collectives.finish()
        return result

    async def deliver(self, message: Message, run_number: int) -> None:
        # Messages that are left over from a run that has ended are dropped.
        if run_number == self._run_number:
            self._collectives.deliver(message)

    async def take_tickets(
        self, count: int, counter: str, limit: int | None, run_number: int
    ) -> range:
        if run_number != self._run_number:
            raise CollectiveError("take_tickets was called by a task of a run that has ended")
        return take_tickets(self._tickets, count, counter, limit)

    async def next_report(self) -> Any:
        """Let the last report return, and wait for the next value that the program reports."""
        if self._last_report is not None and not self._last_report.done():
            self._last_report.set_result(None)
        value, self._last_report = await self._reports.get()
        return value

    async def notify(self, notice: Any, run_number: int) -> None:
        if run_number == self._run_number:
            self._notices.put_nowait(notice)

    async def whereabouts(self) -> Whereabouts:
        return self._collectives.whereabouts(self._timer.current)

    async def end(self) -> bool:
        """Cancel the program, and return once it has cleaned up."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
        await self._collectives.close()
        return True

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
            raise UnpicklableValueError(
                f"rank {rank} cannot unpickle it: {_first_line(error.cause)}"
            ) from error

    async def _report(self, rank: int, value: Any) -> None:
        del rank
        delivered = asyncio.get_running_loop().create_future()
        self._reports.put_nowait((value, delivered))
        await delivered

    async def _take_tickets_at(
        self, run_number: int, rank: int, count: int, counter: str, limit: int | None
    ) -> range:
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
    timeout_s: float | None = None,
    reported: Reported = refuse_report,
    **options: Any,
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers, spread over the nodes of a Ray cluster.

    See `RayControllers.start` for ``options``, and `RayControllers.run` for other arguments, results and errors.
    """
    controllers = await RayControllers.start(world_size=world_size, **options)
    try:
        return await controllers.run(program, roles=roles, timeout_s=timeout_s, reported=reported)
    finally:
        await controllers.close()


class RayControllers:
    """Controllers on the nodes of a Ray cluster, which run one program after another; made by `start`."""

    def __init__(
        self,
        bundle: dict[str, float],
        *,
        world_size: int,
        start_timeout_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._bundle = bundle
        self._world_size = world_size
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._placement: Any = None
        self._controllers: list[Any] = []
        self._num_runs = 0
        self._has_replaced = False
        """Whether controllers were replaced since all had started."""
        self._turn = asyncio.Lock()
        self._disconnects = not ray.is_initialized()

    @classmethod
    async def start(
        cls,
        *,
        world_size: int = 1,
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        start_timeout_s: float = 120.0,
        heartbeat_timeout_s: float = 120.0,
        address: str | None = None,
    ) -> Self:
        """Reserve resources for the controllers.

        Args:
            num_cpus: that each controller reserves, with other ``resources`` by Ray's names, such as GPU.
            start_timeout_s: how long it may take to reserve the resources and, at every run, to start the controllers.
            heartbeat_timeout_s: how long a controller's process may show no sign of life during a run.
            address: of the cluster, as `ray.init` takes it; default: the one that this process is connected to, the one
                that RAY_ADDRESS names, or a new one on this machine, until `close`.

        Raises:
            ClusterError: there are too few resources, or they are not free in time; or the cluster does not accept this
                process's token.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        bundle = {"CPU": num_cpus, **(resources or {})}
        controllers = cls(
            bundle,
            world_size=world_size,
            start_timeout_s=start_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        if controllers._disconnects:
            connect(address)
        try:
            check_capacity(bundle, world_size)
            await controllers._reserve()
        except BaseException:
            await controllers.close()
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
        """Run a program on every controller, and replace those that have died in it.

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
        if self._turn.locked():
            raise ClusterError(
                "these controllers run another program; wait for it, or start others"
            )
        async with self._turn:
            await self.restore()
            self._num_runs += 1
            actors = list(self._controllers)
            locations = await self._call_all("meet", actors, self._num_runs)
            group = ActorGroup(
                actors, [*locations.values()], heartbeat_timeout_s=self._heartbeat_timeout_s
            )
            packed = ray.put((program, roles))
            watchers: list[Coroutine[Any, Any, None]] = []
            for rank, controller in enumerate(group.actors):
                watchers.append(_forward_reports(controller, rank, reported))
            if timeout_s is not None:
                watchers.append(self._deadline(timeout_s))
            try:
                answers = await run_until_done(group.call("run", packed), *watchers)
                return list(answers.values())
            finally:
                await self._end_programs()

    def notify(self, notice: Any) -> Awaitable[list[Any]]:
        """Send a small value to `Context.notices` of every controller, now while a program runs.

        Returns:
            What to wait for until all that answer have it.
        """
        return answers_in_time([c.notify.remote(notice, self._num_runs) for c in self._controllers])

    async def stages(self) -> list[str | None]:
        """Return the stage that each controller is in; None: it is in none, or does not answer."""
        return [where and where.stage for where in await self._whereabouts()]

    async def restore(self) -> None:
        """Wait until controllers that replace lost ones have started; called by `run`, too.

        If the node of one is lost, all start again on other nodes: Ray reserves the lost place for a while.

        Raises:
            ClusterError: the cluster lacks the capacity.
            ControllerDiedError: a controller died again and again as it started.
        """
        num_restarts = 0
        while self._has_replaced:
            try:
                await self._call_all("is_alive")
                self._has_replaced = False
            except ControllerDiedError:
                if num_restarts == _MAX_RESTARTS:
                    raise
                num_restarts += 1
                await asyncio.sleep(2.0**num_restarts)
                await self._reserve()

    async def close(self) -> None:
        """End all processes."""
        self._release()
        if self._disconnects:
            ray.shutdown()

    async def _reserve(self) -> None:
        """Reserve resources for all controllers, and start them there; end those of before."""
        self._release()
        self._placement = placement_group([self._bundle] * self._world_size, strategy="SPREAD")
        what = f"{self._world_size} controllers, each with {self._bundle}, found no capacity"
        await _in_time(self._placement.ready(), self._start_timeout_s, what)
        self._controllers = [self._start_controller(rank) for rank in range(self._world_size)]

    def _release(self) -> None:
        """End all controllers, and give their resources back."""
        for controller in self._controllers:
            ray.kill(controller)
        self._controllers = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def _call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of all controllers, which may be starting, and return their answers by rank."""
        answers = ActorGroup(self._controllers).call(method, *args)
        what = f"{self._world_size} controllers did not all start"
        return await _in_time(answers, self._start_timeout_s, what)

    def _start_controller(self, rank: int) -> Any:
        """Start a controller; an error shows when it is introduced to the others."""
        remote: Any = ray.remote
        make = remote(concurrency_groups={"news": 1})(ControllerActor)
        strategy = PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=rank
        )
        resources = {
            name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")
        }
        return make.options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            resources=resources,
            scheduling_strategy=strategy,
        ).remote(rank, self._world_size)

    async def _deadline(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        where = describe(dict(enumerate(await self._whereabouts())))
        raise ControllerError(f"the run is not done after {timeout_s} s: {where}")

    async def _whereabouts(self) -> list[Whereabouts | None]:
        """Return where each controller is, by rank; None: it has died, or its event loop is blocked."""
        return await answers_in_time([c.whereabouts.remote() for c in self._controllers])

    async def _end_programs(self) -> None:
        """Cancel programs that still run and let them clean up; replace controllers that do not answer."""
        ends = await answers_in_time([c.end.remote() for c in self._controllers])
        for rank, has_ended in enumerate(ends):
            if not has_ended:
                ray.kill(self._controllers[rank])
                self._controllers[rank] = self._start_controller(rank)
                self._has_replaced = True


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
