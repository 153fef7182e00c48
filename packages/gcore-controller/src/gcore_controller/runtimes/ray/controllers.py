"""The controllers of a run on Ray, as the process that starts them sees them."""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gcore_controller.context import Program, Reported, ResultT, RolesT, refuse_report
from gcore_controller.errors import ClusterError
from gcore_controller.runtimes.ray.connection import connect
from gcore_controller.runtimes.ray.controller_actor import ControllerActor
from gcore_controller.runtimes.ray.replies import answers_of_all, whereabouts_of
from gcore_controller.runtimes.ray.resources import check_capacity, free_resources

T = TypeVar("T")

_END_TIMEOUT_S = 10.0


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
    """Controllers on the nodes of a Ray cluster, which run one program after another; made by `start`.

    Attributes:
        world_size: How many there are.
    """

    def __init__(self, placement: Any, bundle: Mapping[str, float], *, world_size: int, start_timeout_s: float) -> None:
        self.world_size = world_size
        self._placement = placement
        self._bundle = dict(bundle)
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
            world_size: how many.
            num_cpus: that each controller reserves.
            resources: that each controller reserves besides, by Ray's names.
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
        try:
            bundle = {"CPU": num_cpus, **(resources or {})}
            check_capacity(bundle, world_size)
            placement = placement_group([bundle] * world_size, strategy="SPREAD")
            controllers = cls(placement, bundle, world_size=world_size, start_timeout_s=start_timeout_s)
            controllers._disconnects = not was_connected
            try:
                what = f"{world_size} controllers, each with {bundle}, found no capacity"
                await _in_time(placement.ready(), start_timeout_s, what)
            except BaseException:
                remove_placement_group(placement)
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
            CollectiveMismatchError: controllers made different calls, or one returned while others wait for it.
            ControllerDiedError: a controller's process or node was lost; it says which, where, and of what.
            DeadlineError: the run took longer; it says where each controller was, and for whom collectives waited.
            ProgramExitedError: a program called `sys.exit` or cancelled itself.
            Exception: the first controller's error, as it was raised there, with a note that says where; or what
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
        names = [f", {name}," for name in await self._introduce()]
        controllers = list(self._controllers)
        packed = ray.put((program, roles))
        forwarding = [asyncio.create_task(_forward_reports(c, rank, reported)) for rank, c in enumerate(controllers)]
        running = asyncio.create_task(
            answers_of_all(
                [c.run.remote(packed) for c in controllers], names=names, timeout_s=timeout_s, controllers=controllers
            )
        )
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
        return [where and where.stage for where in (await whereabouts_of(self._controllers)).values()]

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
                self._controllers[rank] = make.options(**options).remote(rank, self.world_size)
        calls = [c.meet.remote(self._controllers, self._num_runs) for c in self._controllers]
        # A controller that dies here has no place yet.
        meeting = answers_of_all(calls, names=[""] * self.world_size)
        return await _in_time(meeting, self._start_timeout_s, f"{self.world_size} controllers did not all start")

    async def _end_programs(self) -> None:
        """Cancel programs that still run and let them clean up; kill controllers that do not answer."""
        ends = [asyncio.ensure_future(controller.end.remote()) for controller in self._controllers]
        await asyncio.wait(ends, timeout=_END_TIMEOUT_S)
        for rank, end in enumerate(ends):
            if not end.done() or end.exception():
                end.add_done_callback(lambda done: done.cancelled() or done.exception())
                ray.kill(self._controllers[rank])
                self._controllers[rank] = None


async def _forward_reports(controller: Any, rank: int, reported: Reported) -> None:
    """Pass on the reports of a controller until it dies."""
    with suppress(RayActorError):
        while True:
            number, value = await controller.next_report.remote()
            await reported(rank, value)
            await controller.acknowledge.remote(number)
    await asyncio.get_running_loop().create_future()  # the run itself raises the error


async def _in_time(work: Awaitable[T], timeout_s: float, what: str) -> T:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(work), timeout_s)
    except TimeoutError:
        raise ClusterError(f"{what} within {timeout_s} s: free are {free_resources()}") from None
