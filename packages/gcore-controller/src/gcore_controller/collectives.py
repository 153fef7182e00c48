"""How controllers meet: collectives over Python objects, and their form inside one process.

Controllers exchange small objects and references here; bulk bytes travel between the roles that make and use them.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, itemgetter
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

    async def take_tickets(self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None) -> range:
        """The next ``count`` numbers of a counter that all controllers share, from 0: each goes to one of them.

        No collective: a controller may call it when it likes. Which one gets which numbers depends on who is first.

        Args:
            at: the rank that counts: every rank has counters of its own.
            limit: only numbers below it, so there may be fewer; the next call goes on behind them.
        """
        ...

    def channel(self, name: str) -> "Collectives":
        """The same controllers, for a task that runs beside others: calls are in order within a channel, not between.

        Counters of tickets are those of all channels.
        """
        ...


class TicketCounters:
    """Those of one rank, by name."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, count: int, counter: str, limit: int | None) -> range:
        """See `Collectives.take_tickets`."""
        start = self._next.get(counter, 0)
        stop = start + count if limit is None else max(start, min(start + count, limit))
        self._next[counter] = stop
        return range(start, stop)


class _Round:
    """One collective in flight: what has arrived, and the future of what comes of it."""

    def __init__(self, op: str, world_size: int) -> None:
        self.op = op
        self.values: list[Any] = [None] * world_size
        self.num_arrived = 0
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class InlineGroup:
    """The meeting place of ``world_size`` controllers that are tasks of one event loop; objects pass by reference."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: at least 1 is needed")
        self.world_size = world_size
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._tickets = [TicketCounters() for _ in range(world_size)]

    async def meet(
        self, *, rank: int, channel: str, sequence: int, op: str, value: Any, combine: Callable[[list[Any]], T]
    ) -> T:
        """Hand in ``value`` for a channel's collective number ``sequence``; what ``combine`` makes of all, by rank.

        It is called once, by the last to come: among thousands of controllers, one sum for each would take long.
        """
        place = (channel, sequence)
        current = self._rounds.get(place)
        if current is None:
            current = self._rounds[place] = _Round(op, self.world_size)
        if current.op != op:
            current.result.cancel()
            raise mismatch(sequence, rank=rank, op=op, other_op=current.op)
        current.values[rank] = value
        current.num_arrived += 1
        if current.num_arrived == self.world_size:
            del self._rounds[place]
            current.result.set_result(combine(current.values))
        return await current.result

    def take_tickets(self, count: int, counter: str, *, at: int, limit: int | None) -> range:
        """See `Collectives.take_tickets`."""
        return self._tickets[at].take(count, counter, limit)


class InlineCollectives:
    """One controller's view of an `InlineGroup`."""

    def __init__(self, group: InlineGroup, rank: int, *, channel: str = "") -> None:
        self._group = group
        self._rank = rank
        self._channel = channel
        self._sequence = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    async def _meet(self, op: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        sequence = self._sequence
        self._sequence += 1
        return await self._group.meet(
            rank=self._rank, channel=self._channel, sequence=sequence, op=op, value=value, combine=combine
        )

    async def all_gather(self, value: T) -> list[T]:
        return list(await self._meet("all_gather", value, _as_they_are))

    async def all_reduce(self, value: float) -> float:
        return await self._meet("all_reduce", value, sum_in_order)

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        return await self._meet(f"broadcast from {src}", value, itemgetter(src))

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        check_parts(parts, self.world_size)
        return [sent[self._rank] for sent in await self._meet("all_to_all", parts, _as_they_are)]

    async def barrier(self) -> None:
        await self._meet("barrier", None, _as_they_are)

    async def take_tickets(self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None) -> range:
        check_count(count)
        return self._group.take_tickets(count, counter, at=at, limit=limit)

    def channel(self, name: str) -> "InlineCollectives":
        return InlineCollectives(self._group, self._rank, channel=name)


def _as_they_are(values: list[Any]) -> list[Any]:
    return values


def sum_in_order(values: list[float]) -> float:
    """One after the other: Python's own sum of floats is not the same in every version."""
    return reduce(add, values, 0.0)


def mismatch(sequence: int, *, rank: int, op: str, other_op: str) -> CollectiveMismatchError:
    """What to raise where controllers' calls differ."""
    return CollectiveMismatchError(
        f"collective {sequence}: rank {rank} called {op} where another controller called {other_op}; "
        "every controller must make the same calls in the same order"
    )


def check_parts(parts: Sequence[object], world_size: int) -> None:
    """
    Raises:
        ValueError: not one part for each controller.
    """
    if len(parts) != world_size:
        raise ValueError(f"parts has {len(parts)} entries: one for each of {world_size} controllers is needed")


def check_count(count: int) -> None:
    """
    Raises:
        ValueError: a negative number of tickets.
    """
    if count < 0:
        raise ValueError(f"count is {count}: 0 or more is needed")
