"""The same program under every runtime."""

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gcore_controller import Context, run_inline
from gcore_controller.collectives import TicketCounters
from gcore_controller.peer_collectives import Message, PeerCollectives

Ctx = Context[list[str]]
AnyProgram = Callable[[Ctx], Awaitable[Any]]
Run = Callable[[AnyProgram, int], Coroutine[Any, Any, list[Any]]]


async def run_here(program: AnyProgram, world_size: int) -> list[Any]:
    return await run_inline(program, roles=[], world_size=world_size)


async def run_over_messages(program: AnyProgram, world_size: int) -> list[Any]:
    """Pickled messages that take their time, and may overtake each other."""
    rng = random.Random(0)
    counters = [TicketCounters() for _ in range(world_size)]
    peers: list[PeerCollectives] = []

    async def send(rank: int, message: Message) -> None:
        packed = pickle.dumps(message)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        peers[rank].deliver(pickle.loads(packed))

    async def take_tickets(rank: int, count: int, counter: str, limit: int | None) -> range:
        await asyncio.sleep(0)
        return counters[rank].take(count, counter, limit)

    peers += [PeerCollectives(rank, world_size, send=send, take_tickets=take_tickets) for rank in range(world_size)]

    async def run(peer: PeerCollectives) -> Any:
        return await program(Context(group=peer, roles=[]))

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(peer)) for peer in peers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
