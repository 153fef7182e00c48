"""Collectives over Python objects: the protocol, and the checks that all runtimes share.

Controllers exchange small objects and references here; bulk bytes travel between the roles that make and use them.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import reduce
from numbers import Integral, Real
from operator import add, index, itemgetter
from typing import Any, Protocol, Self, TypeVar

from gcore_controller.collectives.call_log import CallLog, CollectiveCall
from gcore_controller.errors import CollectiveAbandonedError, ControllerError

T = TypeVar("T")

_LARGEST_EXACT = 2**53


class Collectives(Protocol):
    """Communication between the controllers, which must all make the same calls in the same order.

    A call returns when every controller has made it. Calls that differ raise `CollectiveMismatchError` on every rank
    that takes part, as does a call that waits for a controller whose program has returned. After an error the channel
    cannot be used any more: every later call on it raises the same error.

    A call that is cancelled on one rank, for instance by a timeout, still counts: the other ranks complete theirs. That
    rank's next call on the channel raises `CollectiveAbandonedError`, because its calls no longer correspond to those
    of the others.

    Values belong to all ranks that receive them: in one process (runtimes inline and sim) objects are passed by
    reference, on Ray they are copied. Do not modify a value after it was sent or received.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    async def all_gather(self, value: T) -> list[T]:
        """Return every controller's value, by rank."""
        ...

    async def all_reduce(self, value: float) -> float:
        """Return the sum over all controllers as a float, added in rank order.

        Raises:
            TypeError: ``value`` is not a number; use `all_gather` for arrays.
            ValueError: ``value`` is an integer that a float cannot represent exactly.
        """
        ...

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        """Return the value that rank ``src`` passed.

        Raises:
            ValueError: ``src`` is not a rank.
        """
        ...

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        """Send ``parts[r]`` to rank r, and return what every rank has sent to this one, by rank."""
        ...

    async def barrier(self) -> None:
        """Wait for every controller."""
        ...

    async def take_tickets(self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None) -> range:
        """Return the next ``count`` numbers of a counter that all controllers share; each number goes to one of them.

        The counter starts at 0. This is no collective: a controller may call it at any time, and numbers go to
        controllers in the order of their calls.

        Args:
            at: the rank whose counter is used; every rank has counters of its own.
            limit: return only numbers below it, so there may be fewer; the next call continues after them.
        """
        ...

    def channel(self, name: str) -> "Collectives":
        """Return the same controllers for a concurrent task: calls are ordered within a channel, not between channels.

        All channels share the counters of tickets.
        """
        ...


class TicketCounters:
    """The counters of one rank, by name."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, count: int, counter: str, limit: int | None) -> range:
        """See `Collectives.take_tickets`."""
        start = self._next.get(counter, 0)
        stop = start + count if limit is None else max(start, min(start + count, limit))
        self._next[counter] = stop
        return range(start, stop)


class CheckedCollectives(ABC):
    """Base of `Collectives` that does all checks; subclasses exchange the values.

    Args:
        rank: this rank.
        world_size: number of controllers.
        log: the calls of this rank, shared by all its channels.
    """

    def __init__(self, rank: int, world_size: int, log: CallLog) -> None:
        self._rank = rank
        self._world_size = world_size
        self._log = log
        self._channel = ""

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def channel(self, name: str) -> Self:
        other = copy(self)
        other._channel = name
        return other

    async def all_gather(self, value: T) -> list[T]:
        with self._call("all_gather") as call:
            return list(await self._gather(call, value, _as_they_are))

    async def all_reduce(self, value: float) -> float:
        own = _as_float(value)
        with self._call("all_reduce") as call:
            return await self._gather(call, own, _sum_in_order)

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        src = self._checked_rank("src", src)
        with self._call(f"broadcast(src={src})") as call:
            return await self._gather(call, value if self._rank == src else None, itemgetter(src))

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        if len(parts) != self._world_size:
            raise ValueError(f"parts has {len(parts)} entries; expected {self._world_size}, one for each rank")
        with self._call("all_to_all") as call:
            return await self._exchange(call, parts)

    async def barrier(self) -> None:
        with self._call("barrier") as call:
            await self._gather(call, None, _as_they_are)

    async def take_tickets(self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None) -> range:
        if count < 0:
            raise ValueError(f"count is {count}; expected 0 or more")
        at = self._checked_rank("at", at)
        self._log.check_open("take_tickets")
        return await self._take_tickets(count, counter, at, limit)

    @contextmanager
    def _call(self, op: str) -> Generator[CollectiveCall]:
        """Count a call, and leave the channel in a state that later calls can be checked against."""
        try:
            call = self._log.begin(self._channel, op)
        except CollectiveAbandonedError as error:
            if not self._log.has_failed(self._channel):
                self._fail_everywhere(self._channel, error)
            raise
        abandoned = False
        try:
            yield call
        except asyncio.CancelledError:
            abandoned = True
            raise
        except ControllerError as error:
            if not self._log.has_failed(self._channel):
                self._fail_everywhere(self._channel, error)
            raise
        except Exception as error:
            what = f"rank {self._rank} called a collective after its {call} had failed: {error!r:.300}"
            self._fail(self._channel, CollectiveAbandonedError(what))
            raise
        finally:
            self._log.end(call, abandoned=abandoned)

    def _checked_rank(self, name: str, value: int) -> int:
        rank = index(value)
        if not 0 <= rank < self._world_size:
            raise ValueError(f"{name} is {rank}; expected a rank from 0 to {self._world_size - 1}")
        return rank

    @abstractmethod
    async def _gather(self, call: CollectiveCall, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Return what ``combine`` makes of the values of all ranks, which it must not modify."""

    @abstractmethod
    async def _exchange(self, call: CollectiveCall, parts: Sequence[T]) -> list[T]:
        """Send a part to each rank, and return the received ones by rank."""

    @abstractmethod
    async def _take_tickets(self, count: int, counter: str, at: int, limit: int | None) -> range: ...

    @abstractmethod
    def _fail(self, channel: str, error: ControllerError) -> None:
        """Make this rank's calls on a channel raise an error, those in flight and later ones."""

    @abstractmethod
    def _fail_everywhere(self, channel: str, error: ControllerError) -> None:
        """Make the calls of all ranks on a channel raise an error, those in flight and later ones."""


def _as_they_are(values: list[Any]) -> list[Any]:
    return values


def _sum_in_order(values: list[float]) -> float:
    """Add one value after the other; Python's own sum of floats differs between versions."""
    return reduce(add, values, 0.0)


def _as_float(value: object) -> float:
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise TypeError(f"all_reduce value is of type {kind}; expected a number (gather arrays with all_gather)")
    if isinstance(value, Integral) and abs(int(value)) > _LARGEST_EXACT:
        raise ValueError(
            f"all_reduce value is {value}; expected an integer of at most 2**53, which is exact as a float"
        )
    return float(value)
