"""How controllers meet: collectives over Python objects, and their form inside one process.

Controllers exchange small objects and references here; bulk bytes travel between the roles that make and use them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from gcore_controller.errors import CollectiveMismatchError

T = TypeVar("T")


class Collectives(Protocol):
    """Every controller must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    async def all_gather(self, value: T) -> list[T]:
        """Every controller's value, by rank."""
        ...

    async def all_reduce(self, value: float) -> float:
        """Sum over controllers, added in rank order."""
        ...

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        """The value that rank ``src`` passed."""
        ...

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        """Give ``parts[r]`` to rank r; get what every rank gave here, by rank."""
        ...

    async def barrier(self) -> None:
        """Wait for every controller."""
        ...


class _Round:
    """One collective in flight: what has arrived, and the future on which early arrivals wait."""

    def __init__(self, op: str, world_size: int) -> None:
        self.op = op
        self.values: list[Any] = [None] * world_size
        self.num_arrived = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class InlineGroup:
    """The meeting place of ``world_size`` controllers that are tasks of one event loop; objects pass by reference."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: at least 1 is needed")
        self.world_size = world_size
        self._rounds: dict[int, _Round] = {}

    async def meet(self, *, rank: int, sequence: int, op: str, value: Any) -> list[Any]:
        """Hand in ``value`` for collective number ``sequence`` and get everyone's, by rank."""
        current = self._rounds.get(sequence)
        if current is None:
            current = self._rounds[sequence] = _Round(op, self.world_size)
        if current.op != op:
            error = CollectiveMismatchError(
                f"collective {sequence}: rank {rank} called {op} where another controller called {current.op}; "
                "every controller must make the same calls in the same order"
            )
            current.done.cancel()
            raise error
        current.values[rank] = value
        current.num_arrived += 1
        if current.num_arrived == self.world_size:
            del self._rounds[sequence]
            current.done.set_result(None)
        else:
            await current.done
        return current.values


class InlineCollectives:
    """One controller's view of an `InlineGroup`."""

    def __init__(self, group: InlineGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._sequence = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    async def _meet(self, op: str, value: Any) -> list[Any]:
        sequence = self._sequence
        self._sequence += 1
        return await self._group.meet(rank=self._rank, sequence=sequence, op=op, value=value)

    async def all_gather(self, value: T) -> list[T]:
        return list(await self._meet("all_gather", value))

    async def all_reduce(self, value: float) -> float:
        total = 0.0
        for contribution in await self._meet("all_reduce", value):
            total += contribution
        return total

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        return (await self._meet(f"broadcast from {src}", value))[src]

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        if len(parts) != self.world_size:
            raise ValueError(f"parts has {len(parts)} entries: one for each of {self.world_size} controllers is needed")
        return [sent[self._rank] for sent in await self._meet("all_to_all", parts)]

    async def barrier(self) -> None:
        await self._meet("barrier", None)
