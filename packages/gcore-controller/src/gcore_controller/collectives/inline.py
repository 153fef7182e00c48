"""Collectives between controllers that are tasks of one event loop; objects pass by reference."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gcore_controller.collectives.base import CheckedCollectives, TicketCounters
from gcore_controller.collectives.call_log import CallLog, CollectiveCall, Whereabouts, again, mismatch
from gcore_controller.errors import ControllerError

T = TypeVar("T")


class _Round:
    """One collective in flight: the values that have arrived, and the ranks that wait for the result."""

    def __init__(self, rank: int, call: CollectiveCall, world_size: int) -> None:
        self.first_rank = rank
        self.call = call
        self.values: list[Any] = [None] * world_size
        self.waiting: dict[int, asyncio.Future[Any]] = {}


class InlineGroup:
    """The state that ``world_size`` controllers of one event loop share."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        self.world_size = world_size
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._tickets = [TicketCounters() for _ in range(world_size)]
        self._returned: dict[int, dict[str, int]] = {}
        self.logs = [CallLog(rank, self._returned) for rank in range(world_size)]

    async def meet(self, rank: int, call: CollectiveCall, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Contribute ``value``, and return what ``combine`` makes of all values, by rank.

        It is called once, by the last rank to arrive: among thousands of controllers, one sum for each would take long.
        """
        place = (call.channel, call.sequence)
        current = self._rounds.get(place)
        if current is None:
            current = self._rounds[place] = _Round(rank, call, self.world_size)
        if current.call.op != call.op:
            raise mismatch({current.first_rank: current.call, rank: call})
        current.values[rank] = value
        if len(current.waiting) + 1 < self.world_size:
            current.waiting[rank] = asyncio.get_running_loop().create_future()
            return await current.waiting[rank]
        del self._rounds[place]
        result = combine(current.values)
        for future in current.waiting.values():
            if not future.done():
                future.set_result(result)
        return result

    def fail(self, channel: str, error: ControllerError) -> None:
        """Make the calls of all ranks on a channel raise an error, those in flight and later ones."""
        for log in self.logs:
            log.fail(channel, error)
        for place in [place for place in self._rounds if place[0] == channel]:
            for future in self._rounds.pop(place).waiting.values():
                _raise_in(future, again(error))

    def returned(self, rank: int) -> None:
        """Note that a rank's program has returned; calls that would wait for it raise `CollectiveMismatchError`."""
        self._returned[rank] = self.logs[rank].num_calls
        self.logs[rank].close()
        for place, current in list(self._rounds.items()):
            if rank in current.waiting:
                continue
            del self._rounds[place]
            for other, future in current.waiting.items():
                if error := self.logs[other].missing(current.call):
                    self.logs[other].fail(current.call.channel, error)
                    _raise_in(future, error)

    def whereabouts(self, rank: int) -> Whereabouts:
        return self.logs[rank].whereabouts

    def take_tickets(self, count: int, counter: str, at: int, limit: int | None) -> range:
        """See `Collectives.take_tickets`."""
        return self._tickets[at].take(count, counter, limit)


class InlineCollectives(CheckedCollectives):
    """One controller's view of an `InlineGroup`."""

    def __init__(self, group: InlineGroup, rank: int) -> None:
        super().__init__(rank, group.world_size, group.logs[rank])
        self._group = group

    async def _gather(self, call: CollectiveCall, value: Any, combine: Callable[[list[Any]], T]) -> T:
        return await self._group.meet(self._rank, call, value, combine)

    async def _exchange(self, call: CollectiveCall, parts: Sequence[T]) -> list[T]:
        sent: list[Sequence[T]] = await self._group.meet(self._rank, call, parts, list)
        return [of_rank[self._rank] for of_rank in sent]

    async def _take_tickets(self, count: int, counter: str, at: int, limit: int | None) -> range:
        return self._group.take_tickets(count, counter, at, limit)

    def _fail(self, channel: str, error: ControllerError) -> None:
        self._log.fail(channel, error)

    def _fail_everywhere(self, channel: str, error: ControllerError) -> None:
        self._group.fail(channel, error)


def _raise_in(future: "asyncio.Future[Any]", error: Exception) -> None:
    """Make a waiting call raise an error, unless it has been cancelled meanwhile."""
    if not future.done():
        future.set_exception(error)
        future.exception()
