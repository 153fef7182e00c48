"""The actor of one controller."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic

import ray
from ray.exceptions import RayTaskError

from gcore_controller.collectives.base import TicketCounters
from gcore_controller.collectives.call_log import Whereabouts
from gcore_controller.collectives.peer import Message, PeerCollectives
from gcore_controller.context import Context, Program, ResultT, RolesT
from gcore_controller.errors import CollectiveMismatchError, UnpicklableValueError
from gcore_controller.runtimes.programs import run_program
from gcore_controller.runtimes.ray.references import put
from gcore_controller.stages import StageTimer


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
        self._collectives = PeerCollectives(
            self._rank,
            self._world_size,
            send=partial(self._send, number),
            take_tickets=partial(self._take_tickets_at, number),
        )
        self._timer = StageTimer()
        self._reports: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._unacknowledged: dict[int, asyncio.Future[None]] = {}

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
            group=self._collectives, roles=roles, timer=self._timer, clock=clock, put=put, report=self._report
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
        """Return the next numbers of a counter that this controller keeps."""
        if run_number != self._run_number:
            raise CollectiveMismatchError("take_tickets was called by a task of a run that has ended")
        return self._tickets.take(count, counter, limit)

    async def next_report(self) -> tuple[int, Any]:
        """Wait for the next value that the program reports; return it with a number for `acknowledge`."""
        return await self._reports.get()

    async def acknowledge(self, number: int) -> None:
        """Let the report of this number return."""
        if number in self._unacknowledged:
            self._unacknowledged[number].set_result(None)

    async def whereabouts(self) -> Whereabouts:
        return self._collectives.whereabouts().during(self._timer.current)

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

    async def _report(self, value: Any) -> None:
        number = len(self._unacknowledged)
        acknowledged = self._unacknowledged[number] = asyncio.get_running_loop().create_future()
        self._reports.put_nowait((number, value))
        await acknowledged

    async def _take_tickets_at(self, run_number: int, rank: int, count: int, counter: str, limit: int | None) -> range:
        if rank == self._rank:
            return await self.take_tickets(count, counter, limit, run_number)
        return await self._peers[rank].take_tickets.remote(count, counter, limit, run_number)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error; Ray appends an inventory of the whole object."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
