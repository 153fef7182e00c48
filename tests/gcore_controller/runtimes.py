"""The same program under every runtime."""

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gcore_controller import Context, VirtualTimeLoop, run_inline, run_simulated
from gcore_controller.collectives.base import take_tickets as take_from
from gcore_controller.collectives.peer import Message, PeerCollectives
from gcore_controller.context import run_program
from gcore_controller.errors import UnpicklableValueError

Ctx = Context[list[str]]
AnyProgram = Callable[[Ctx], Awaitable[Any]]

HANG_S = 120
"""A guard against hangs, in real seconds."""


class Run(Protocol):
    """Run a program on so many controllers, to its end."""

    def __call__(
        self, program: AnyProgram, world_size: int, *, timeout_s: float | None = None
    ) -> list[Any]: ...


def inline(program: AnyProgram, world_size: int, *, timeout_s: float | None = None) -> list[Any]:
    async def guarded() -> list[Any]:
        async with asyncio.timeout(HANG_S):
            return await run_inline(program, roles=[], world_size=world_size, timeout_s=timeout_s)

    return asyncio.run(guarded())


def simulated(program: AnyProgram, world_size: int, *, timeout_s: float | None = None) -> list[Any]:
    return run_simulated(program, roles=[], world_size=world_size, timeout_s=timeout_s)


def over_messages(
    program: AnyProgram, world_size: int, *, timeout_s: float | None = None
) -> list[Any]:
    """What Ray's controllers do, in one process and without Ray; it has no deadline."""
    assert timeout_s is None
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run_over_messages(program, world_size))


def ignore_message(message: Message) -> None:
    """Do nothing."""


async def run_over_messages(
    program: AnyProgram,
    world_size: int,
    *,
    on_message: Callable[[Message], None] = ignore_message,
) -> list[Any]:
    """Pickled messages that take their time, and may overtake each other."""
    rng = random.Random(0)
    counters = [Counter[str]() for _ in range(world_size)]
    peers: list[PeerCollectives] = []

    async def send(rank: int, message: Message) -> None:
        try:
            packed = pickle.dumps(message)
        except Exception as error:
            raise UnpicklableValueError(f"{type(error).__name__}: {error}") from error
        on_message(message)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        try:
            received = pickle.loads(packed)
        except Exception as error:
            raise UnpicklableValueError(
                f"rank {rank} cannot unpickle it: {type(error).__name__}: {error}"
            ) from error
        peers[rank].deliver(received)

    async def take_tickets(rank: int, count: int, counter: str, limit: int | None) -> range:
        await asyncio.sleep(0)
        return take_from(counters[rank], count, counter, limit)

    peers += [
        PeerCollectives(rank, world_size, send=send, take_tickets=take_tickets)
        for rank in range(world_size)
    ]

    async def run(peer: PeerCollectives) -> Any:
        result = await run_program(program, Context(group=peer, roles=[]))
        peer.finish()
        return result

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(peer)) for peer in peers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for peer in peers:
            await peer.close()
    return [task.result() for task in running]
