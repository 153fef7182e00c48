"""The actor of one controller."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Generic

import ray

from gcore_controller.collectives import TicketCounters
from gcore_controller.context import Context, Program, ResultT, RolesT
from gcore_controller.peer_collectives import Message, PeerCollectives
from gcore_controller.ray_runtime.references import put
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
